"""TokenOrder and PackedClusters: the layouts that DynaKV's ablations compare with."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from penstock.core.errors import StorageError
from penstock.methods.dynakv.cluster_file import ClusterFile, Split, new_clusters
from penstock.methods.dynakv.cluster_spans import Located
from penstock.storage.file import ByteArray, Int64Array, KVFile


class _OrderedEntries(ClusterFile):
    """Entries one behind the other from byte 0, without padding: slot i at i * entry_bytes.

    A layout says which slots a cluster has, by `_slots`. Writes go out at once: where nothing has a
    place of its own there is no sector of its own to keep in memory (`num_buffers` means nothing).
    """

    _total = 0

    @property
    @override
    def end_bytes(self) -> int:
        return self._sectors_end(self._total * self.entry_bytes)

    @override
    def flush(self) -> None:
        """Nothing is kept back."""

    @abstractmethod
    def _slots(self, cluster: int) -> Int64Array:
        """Where a cluster's entries lie, in entries from the start of the file. [entries]"""

    def _sectors_end(self, num_bytes: int) -> int:
        return -(-num_bytes // self.sector_bytes) * self.sector_bytes

    @override
    def _locate(self, clusters: Int64Array) -> Located:
        """One range per run of slots that follow each other."""
        each = [self._slots(cluster) for cluster in clusters.tolist()]
        counts = np.array([len(slots) for slots in each], dtype=np.int64)
        slots = np.concatenate([np.zeros(0, dtype=np.int64), *each])
        begins = np.ones(len(slots), dtype=np.bool_)
        begins[1:] = np.diff(slots) != 1
        first = begins.nonzero()[0]
        stored = np.diff(np.append(first, len(slots)))
        sector = self.sector_bytes
        lows = slots[first] * self.entry_bytes // sector * sector
        ends = (slots[first] + stored) * self.entry_bytes
        highs = -(-ends // sector) * sector
        return Located(
            counts, lows, highs, stored, stored, slots[first] * self.entry_bytes,
            np.full(len(first), self.entry_bytes), np.zeros(0, np.int64),
            np.zeros(0, f"V{sector}"),
        )  # fmt: skip

    def _write_slots(self, first_slot: int, entries: ByteArray) -> None:
        """Write entries from a slot on; others in their first and last sector stay as they are."""
        if not len(entries):
            return
        sector = self.sector_bytes
        begin, end = first_slot * self.entry_bytes, (first_slot + len(entries)) * self.entry_bytes
        low, high = begin // sector * sector, self._sectors_end(end)
        self._reserve(high)
        image = self._new_image(high - low)
        if begin > low:
            image[:sector] = self._read_old(low, sector)
        if end < min(high, self._total * self.entry_bytes):
            image[end - low :] = self._read_old(high - sector, sector)[end - high :]
        image[begin - low : end - low] = entries.reshape(-1)
        self._write(low, image)

    def _read_slots(self, first_slot: int, end_slot: int) -> ByteArray:
        """A copy of the entries in some slots, read in order to write."""
        size, sector = self.entry_bytes, self.sector_bytes
        low, high = first_slot * size // sector * sector, self._sectors_end(end_slot * size)
        if first_slot == end_slot:
            return np.zeros((0, size), dtype=np.uint8)
        begin = first_slot * size - low
        length = (end_slot - first_slot) * size
        return self._read_old(low, high - low)[begin : begin + length].reshape(-1, size).copy()


class TokenOrder(_OrderedEntries):
    """Strict sequence order: entries in the order in which they came, whatever their cluster.

    Source: DynaKV, section 5.1 and Fig. 12 ("strict sequence order"). Nothing ever moves, and a
    cluster is read in as many accesses as it has runs of neighbouring tokens. Each row (KV head)
    needs a file of its own to be compared fairly, else the rows' tokens alternate. A freed
    cluster's place is not used again.
    """

    def __init__(
        self, file: KVFile, entry_bytes: int, *, sector_bytes: int | None = None,
        num_buffers: int = 0, gap_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Lay clusters over the file; arguments as in `ClusterFile`."""
        super().__init__(
            file, entry_bytes, sector_bytes=sector_bytes, num_buffers=num_buffers,
            gap_bytes=gap_bytes,
        )  # fmt: skip
        self._slots_of: dict[int, Int64Array] = {}

    @override
    def clusters(self) -> list[int]:
        return sorted(self._slots_of)

    @override
    def num_entries(self, cluster: int) -> int:
        return len(self._slots_of[cluster])

    @override
    def place(
        self, order: Sequence[int], members: Mapping[int, Int64Array], entries: ByteArray
    ) -> None:
        """The order means nothing here."""
        self._check_new(entries)
        new = new_clusters(order, members, self._slots_of, len(entries))
        self._write_slots(self._total, entries)
        self._slots_of |= {cluster: self._total + members[cluster] for cluster in new}
        self._total += len(entries)
        self.counters.placed_bytes += entries.size

    @override
    def append(self, cluster: int, entries: ByteArray) -> None:
        self._check_new(entries)
        self._write_slots(self._total, entries)
        slots = self._take(len(entries))
        self._slots_of[cluster] = np.concatenate([self._slots_of[cluster], slots])

    @override
    def split(
        self, cluster: int, new_cluster: int, stays: npt.NDArray[np.bool_],
        entries: ByteArray | None = None,
    ) -> Split:  # fmt: skip
        """Only new entries are written."""
        assert new_cluster not in self._slots_of, "has a place"
        count = self.num_entries(cluster)
        slots = self._slots_of[cluster]
        if entries is not None and len(entries) > count:
            new = self._check_new(entries)[count:]
            self._write_slots(self._total, new)
            slots = np.concatenate([slots, self._take(len(new))])
        kept, moved = _children(stays, len(slots))
        self._slots_of[cluster], self._slots_of[new_cluster] = slots[kept], slots[moved]
        self.counters.num_splits += 1
        return Split(kept, moved)

    @override
    def free(self, cluster: int) -> None:
        del self._slots_of[cluster]

    @override
    def _forget_all(self) -> None:
        self._slots_of.clear()
        self._total = 0

    def _take(self, count: int) -> Int64Array:
        first, self._total = self._total, self._total + count
        self.counters.appended_bytes += count * self.entry_bytes
        return np.arange(first, self._total)

    @override
    def _slots(self, cluster: int) -> Int64Array:
        return self._slots_of[cluster]


class PackedClusters(_OrderedEntries):
    """Cluster by cluster without gaps: what is added to one moves all that follow it.

    Source: DynaKV, section 5.2 and Fig. 13 ("naive cluster-by-cluster layout"). The bytes really
    move in the file. A split leaves both children in the place of the cluster, the new one behind
    the other. Several rows (KV heads) in one file lie behind each other, in the order of `place`.
    """

    def __init__(
        self, file: KVFile, entry_bytes: int, *, sector_bytes: int | None = None,
        num_buffers: int = 0, gap_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Lay clusters over the file; arguments as in `ClusterFile`."""
        super().__init__(
            file, entry_bytes, sector_bytes=sector_bytes, num_buffers=num_buffers,
            gap_bytes=gap_bytes,
        )  # fmt: skip
        self._order: list[int] = []
        self._count: dict[int, int] = {}
        self._first: dict[int, int] = {}

    @override
    def clusters(self) -> list[int]:
        return sorted(self._count)

    @override
    def num_entries(self, cluster: int) -> int:
        return self._count[cluster]

    @override
    def place(
        self, order: Sequence[int], members: Mapping[int, Int64Array], entries: ByteArray
    ) -> None:
        self._check_new(entries)
        new = new_clusters(order, members, self._count, len(entries))
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *(members[c] for c in new)])
        self._write_slots(self._total, entries[rows])
        self._order += new
        self._count |= {cluster: len(members[cluster]) for cluster in new}
        self._number()
        self.counters.placed_bytes += entries.size

    @override
    def append(self, cluster: int, entries: ByteArray) -> None:
        self._check_new(entries)
        self._refuse_spoiled([cluster])
        end = self._first[cluster] + self._count[cluster]
        self._replace(cluster, end, end, entries)
        self._count[cluster] += len(entries)
        self._number()
        self.counters.appended_bytes += entries.size

    @override
    def split(
        self, cluster: int, new_cluster: int, stays: npt.NDArray[np.bool_],
        entries: ByteArray | None = None,
    ) -> Split:  # fmt: skip
        self._refuse_spoiled([cluster])
        assert new_cluster not in self._count, "has a place"
        first, count = self._first[cluster], self._count[cluster]
        if entries is None:
            entries = self._read_slots(first, first + count)
        kept, moved = _children(stays, len(self._check_new(entries)))
        assert len(entries) >= count, (len(entries), count)
        both = np.concatenate([kept, moved])
        stored = (both < count) & (both != np.arange(len(both)))
        self._replace(cluster, first, first + count, entries[both])
        self._order.insert(self._order.index(cluster) + 1, new_cluster)
        self._count[cluster], self._count[new_cluster] = len(kept), len(moved)
        self._number()
        self.counters.num_splits += 1
        self.counters.moved_bytes += int(stored.sum()) * self.entry_bytes
        self.counters.appended_bytes += (len(entries) - count) * self.entry_bytes
        return Split(kept, moved)

    @override
    def free(self, cluster: int) -> None:
        """What follows moves up."""
        first, count = self._first[cluster], self._count[cluster]
        self._replace(cluster, first, first + count, np.zeros((0, self.entry_bytes), np.uint8))
        self._spoiled.discard(cluster)
        self._order.remove(cluster)
        del self._count[cluster], self._first[cluster]
        self._number()

    @override
    def _forget_all(self) -> None:
        self._order.clear()
        self._count.clear()
        self._first.clear()
        self._number()

    def _replace(self, cluster: int, first: int, end: int, entries: ByteArray) -> None:
        """Put `entries` in the place of slots [first, end), and move what follows."""
        self.settle_reads()
        moves = end - first != len(entries)
        following = self._read_slots(end, self._total if moves else end)
        try:
            self._write_slots(first, np.concatenate([entries, following]))
        except StorageError:
            if end > first or len(following):
                place = self._order.index(cluster)
                behind = len(self._order) if moves else place + 1
                self._spoiled.update(self._order[place + (end == first) : behind])
            raise
        self.counters.moved_bytes += following.size

    def _number(self) -> None:
        """Where each cluster begins."""
        self._total = 0
        for cluster in self._order:
            self._first[cluster] = self._total
            self._total += self._count[cluster]

    @override
    def _slots(self, cluster: int) -> Int64Array:
        return self._first[cluster] + np.arange(self._count[cluster])


def _children(stays: npt.NDArray[np.bool_], num_entries: int) -> tuple[Int64Array, Int64Array]:
    """Who stays and who leaves, both in their order."""
    assert len(stays) == num_entries, (len(stays), num_entries)
    kept, moved = stays.nonzero()[0], (~stays).nonzero()[0]
    assert len(kept), "nothing stays"
    assert len(moved), "nothing moves"
    return kept, moved
