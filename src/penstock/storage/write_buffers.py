"""WriteBuffers: a sector of memory for the end of each hot cluster (DynaKV)."""

from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import ByteArray

_RESCALE = 1e100


class WriteBuffers:
    """Which clusters have a buffer, and the bytes in it. Writes nothing itself.

    Source: DynaKV, section 5.2 (page-aligned buffer): "buffers are allocated only for hot clusters
    with frequent updates, while cold clusters issue direct writes when necessary".

    The heat of a cluster is the number of its appends, each worth half as much after
    `8 * num_buffers` appends to any cluster (the paper names no rule). A cluster takes a free
    buffer at its first append, and the buffer of the coldest when it has become hotter.
    """

    def __init__(self, num_buffers: int, sector_bytes: int) -> None:
        assert num_buffers >= 0, num_buffers
        self._memory = AlignedBuffer(num_buffers, sector_bytes)
        self._free = list(range(num_buffers))
        self._slot_of: dict[int, int] = {}
        self._heat: dict[int, float] = {}
        self._worth = 1.0
        self._growth = 2.0 ** (1 / (8 * max(1, num_buffers)))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, for the ledger."""
        return self._memory.num_bytes

    def __contains__(self, cluster: int) -> bool:
        return cluster in self._slot_of

    def clusters(self) -> list[int]:
        """Clusters that have a buffer."""
        return list(self._slot_of)

    def get(self, cluster: int) -> ByteArray | None:
        """The buffer of a cluster: uint8 [sector_bytes], or None."""
        slot = self._slot_of.get(cluster)
        return None if slot is None else self._row(slot)

    def heat_up(self, cluster: int) -> None:
        """Count an append."""
        self._worth *= self._growth
        if self._worth > _RESCALE:
            self._heat = {c: heat / self._worth for c, heat in self._heat.items()}
            self._worth = 1.0
        self._heat[cluster] = self._heat.get(cluster, 0.0) + self._worth

    def colder_than(self, cluster: int) -> int | None:
        """The buffered cluster that must give way to this one; None if there is none."""
        if self._free or not self._slot_of:
            return None
        coldest = min(self._slot_of, key=lambda c: self._heat.get(c, 0.0))
        hotter = self._heat.get(cluster, 0.0) > self._heat.get(coldest, 0.0)
        return coldest if hotter else None

    def has_free(self) -> bool:
        """Whether `assign` can be called."""
        return bool(self._free)

    def assign(self, cluster: int) -> ByteArray:
        """Give a cluster a free buffer: uint8 [sector_bytes], of unknown content."""
        assert cluster not in self._slot_of, "has one"
        self._slot_of[cluster] = slot = self._free.pop()
        return self._row(slot)

    def release(self, cluster: int) -> None:
        """Take the buffer away, if there is one; what was in it is forgotten."""
        slot = self._slot_of.pop(cluster, None)
        if slot is not None:
            self._free.append(slot)

    def forget(self, cluster: int) -> None:
        """The cluster is gone: its buffer and its heat too."""
        self.release(cluster)
        self._heat.pop(cluster, None)

    def _row(self, slot: int) -> ByteArray:
        row: ByteArray = self._memory.array[slot]
        return row
