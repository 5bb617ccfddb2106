"""WriteBuffers: a sector of memory for the end of each hot cluster (DynaKV)."""

import numpy as np
import numpy.typing as npt

from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import ByteArray, Int64Array

_RESCALE = 1e100


class WriteBuffers:
    """Which clusters have a buffer, and the bytes in it. Writes nothing itself.

    Source: DynaKV, section 5.2 (page-aligned buffer): "buffers are allocated only for hot clusters
    with frequent updates, while cold clusters issue direct writes when necessary".

    The heat of a cluster is the number of its appends, each worth half as much after
    `8 * num_buffers` appends to any cluster (the paper names no rule). A cluster takes a free
    buffer at its first append, and the buffer of the coldest when it has become hotter.

    Attributes:
        rows: the bytes of each slot. void of a sector [num_buffers]
    """

    def __init__(self, num_buffers: int, sector_bytes: int) -> None:
        assert num_buffers >= 0, num_buffers
        self._memory = AlignedBuffer(num_buffers, sector_bytes)
        self._flat = self._memory.array.reshape(-1).data
        self._sector_bytes = sector_bytes
        self.rows: npt.NDArray[np.void] = self._memory.array.view(f"V{sector_bytes}").reshape(-1)
        self.clear()
        self._growth = 2.0 ** (1 / (8 * max(1, num_buffers)))

    def clear(self) -> None:
        """Forget all clusters, their bytes and their heat."""
        self._free = list(range(self._memory.num_slots))
        self._slot_of: dict[int, int] = {}
        self._slots = np.zeros(0, dtype=np.int64)  # the same by cluster, -1 where there is none
        self._heat: dict[int, float] = {}
        self._worth = 1.0
        self._coldest = 0.0  # no buffered cluster is colder

    def __contains__(self, cluster: int) -> bool:
        return cluster in self._slot_of

    def clusters(self) -> list[int]:
        """Clusters that have a buffer."""
        return list(self._slot_of)

    def get(self, cluster: int) -> ByteArray | None:
        """The buffer of a cluster: uint8 [sector_bytes], or None."""
        slot = self._slot_of.get(cluster)
        return None if slot is None else self._row(slot)

    def slots(self, clusters: Int64Array) -> Int64Array:
        """Where in `rows` the buffer of each cluster is, or -1. int64 [clusters]"""
        if len(clusters):
            self._grow_table(int(clusters.max()))
        return self._slots[clusters]

    def fill(self, cluster: int, first: int, data: memoryview) -> None:
        """Put bytes into a cluster's buffer from byte `first` of it on."""
        at = self._slot_of[cluster] * self._sector_bytes + first
        self._flat[at : at + len(data)] = data

    def heat_up(self, cluster: int) -> None:
        """Count an append."""
        self._worth *= self._growth
        if self._worth > _RESCALE:
            self._heat = {c: heat / self._worth for c, heat in self._heat.items()}
            self._worth, self._coldest = 1.0, 0.0
        self._heat[cluster] = self._heat.get(cluster, 0.0) + self._worth

    def colder_than(self, cluster: int) -> int | None:
        """The buffered cluster that must give way to this one; None if there is none."""
        heat = self._heat.get(cluster, 0.0)
        if self._free or not self._slot_of or heat <= self._coldest:
            return None
        coldest = min(self._slot_of, key=self._heat.__getitem__)
        self._coldest = self._heat[coldest]
        return coldest if heat > self._coldest else None

    def has_free(self) -> bool:
        """Whether `assign` can be called."""
        return bool(self._free)

    def assign(self, cluster: int) -> ByteArray:
        """Give a cluster a free buffer: uint8 [sector_bytes], of unknown content."""
        assert cluster not in self._slot_of, "has one"
        self._slot_of[cluster] = slot = self._free.pop()
        self._coldest = min(self._coldest, self._heat.setdefault(cluster, 0.0))
        self._grow_table(cluster)
        self._slots[cluster] = slot
        return self._row(slot)

    def release(self, cluster: int) -> None:
        """Take the buffer away, if there is one; what was in it is forgotten."""
        slot = self._slot_of.pop(cluster, None)
        if slot is not None:
            self._free.append(slot)
            self._slots[cluster] = -1

    def forget(self, cluster: int) -> None:
        """The cluster is gone: its buffer and its heat too."""
        self.release(cluster)
        self._heat.pop(cluster, None)

    def _grow_table(self, cluster: int) -> None:
        present = len(self._slots)
        if cluster >= present:
            more = max(cluster + 1, 2 * present) - present
            self._slots = np.append(self._slots, np.full(more, -1, dtype=np.int64))

    def _row(self, slot: int) -> ByteArray:
        row: ByteArray = self._memory.array[slot]
        return row
