"""ClusterFile: clusters of entries in a file, whatever their layout: place, append, split, read."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.errors import FetchError, StorageError
from penstock.methods.dynakv.cluster_pools import EMPTY
from penstock.methods.dynakv.cluster_reads import ClusterRead, LayoutCounters
from penstock.methods.dynakv.cluster_spans import Located, Spans, merge, put_buffered
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import ByteArray, Int64Array, KVFile

_RESERVE_BYTES = 256 << 10
"""The file grows by at least so much: a reservation is a call to the system."""


class Split(NamedTuple):
    """Which of a split cluster's entries went where, as indices into what it was split from."""

    kept: Int64Array
    """Entry i of the cluster is now what entry `kept[i]` was."""
    moved: Int64Array
    """Entry i of the new cluster is what entry `moved[i]` was."""


class ClusterFile(ABC):
    """The clusters of one layer in one file: K and V of one token and KV head make one entry.

    One object serves a layer, with the clusters of all rows (KV heads) numbered by the caller
    through one sequence, so that a read for all rows is one batch and rows share write buffers.
    `place` is called once per row, which gives each row pools of its own size.

    Not for several threads at once. What is written is seen by the next read. A cluster may be
    changed while it is read: what would disturb the read waits for it.

    A write that fails raises StorageError. `place` and `append` have then added nothing, and what
    was stored is still there; where an operation had begun to write over stored entries, reading
    the clusters that it spoiled is a StorageError too, until they are freed.

    Source: DynaKV, section 5. The layouts: `PooledClusters` (the paper's), and for its ablations
    `TokenOrder` (strict sequence) and `PackedClusters` (cluster by cluster).

    Attributes:
        counters: set it to a new `LayoutCounters` to begin anew.
    """

    def __init__(
        self, file: KVFile, entry_bytes: int, *, sector_bytes: int | None = None,
        num_buffers: int = 0, gap_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Lay out an empty `file`, which stays its owner's to close.

        Args:
            sector_bytes: what is written at once, a multiple of the file's own sector; a flash
                page, for example. Default: the file's sector.
            num_buffers: clusters whose last, partial sector is kept in memory until it is full.
            gap_bytes: two clusters are read as one where at most so much lies between them. It
                pays where reading the gap takes less time than one more request.
        """
        assert entry_bytes > 0, entry_bytes
        sector_bytes = sector_bytes or file.sector_bytes
        assert sector_bytes % file.sector_bytes == 0, (sector_bytes, file.sector_bytes)
        self.file = file
        self.entry_bytes = entry_bytes
        self.sector_bytes = sector_bytes
        self.gap_bytes = gap_bytes
        self.counters = LayoutCounters()
        self._num_buffers = num_buffers
        self._reserved_bytes = 0
        self._image = AlignedBuffer(0, sector_bytes)
        self._old = AlignedBuffer(0, sector_bytes)
        self._under_way: list[ClusterRead] = []
        self._spoiled: set[int] = set()

    # What a layout is -------------------------------------------------------------------------

    @abstractmethod
    def place(
        self, order: Sequence[int], members: Mapping[int, Int64Array], entries: ByteArray
    ) -> None:
        """Store the clusters of a prompt.

        Args:
            order: numbers of new clusters, each once, neighbours beside each other; EMPTY leaves a
                place free where the layout has places.
            members: rows of `entries` that belong to each, a partition of all rows.
            entries: in the order of their tokens. uint8 [tokens, entry_bytes]

        Raises:
            StoreFullError: there is no room; nothing was placed.
            StorageError: a write failed; nothing was placed.
        """

    @abstractmethod
    def append(self, cluster: int, entries: ByteArray) -> None:
        """Add `entries`, uint8 [new, entry_bytes], at the end of a cluster.

        Raises:
            StoreFullError: there is no room; nothing was added.
            StorageError: a read or write failed; see the class for what is lost.
        """

    def append_each(self, clusters: Int64Array, entries: ByteArray) -> None:
        """Add one entry to each of several clusters, as `append` one after the other would.

        Args:
            clusters: int64 [clusters], no two the same.
            entries: the entry of each. uint8 [clusters, entry_bytes]

        Raises:
            StoreFullError: there is no room.
            StorageError: a read or write failed; see the class for what is lost. In either case
                the clusters before the one that failed have their entry, and it and those behind
                it have not; `num_entries` tells them apart.
        """
        numbers = self._check_each(clusters, entries)
        for i, cluster in enumerate(numbers):
            self.append(cluster, entries[i : i + 1])

    @abstractmethod
    def split(
        self, cluster: int, new_cluster: int, stays: npt.NDArray[np.bool_],
        entries: ByteArray | None = None,
    ) -> Split:  # fmt: skip
        """Give part of a cluster, and of new entries for it, to a new cluster.

        Args:
            stays: which entries remain; some must, and some must not. bool [entries]
            entries: the cluster's stored entries in their order, which are in memory when a cluster
                is split, and after them any new ones. uint8 [entries, entry_bytes]. Default: the
                stored ones, which are then read.

        Returns:
            The orders of both: inside a cluster entries may change places.

        Raises:
            StoreFullError: there is no room; both are as they were.
            StorageError: a read or write failed; see the class for what is lost.
        """

    @abstractmethod
    def free(self, cluster: int) -> None:
        """Forget a cluster and reuse its place where the layout can.

        Raises:
            StorageError: where others had to move, and that failed.
        """

    def clear(self) -> None:
        """Forget all clusters, those in write buffers too; the file keeps its length.

        Reads under way end first. The counters go on.
        """
        self.settle_reads()
        self._spoiled.clear()
        self._forget_all()

    @abstractmethod
    def _forget_all(self) -> None: ...

    @abstractmethod
    def flush(self) -> None:
        """Write what is only in write buffers; it stays in them too.

        Raises:
            StorageError: a write failed; the entries are still in the buffers.
        """

    @abstractmethod
    def clusters(self) -> list[int]:
        """Numbers of all clusters, ascending."""

    @abstractmethod
    def num_entries(self, cluster: int) -> int:
        """Entries of a cluster, buffered ones included."""

    @property
    @abstractmethod
    def end_bytes(self) -> int:
        """Length that the file needs now (DynaKV, Fig. 13: storage usage)."""

    @abstractmethod
    def _locate(self, clusters: Int64Array) -> Located: ...

    # Reading ----------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(map(self.num_entries, self.clusters())) * self.entry_bytes

    def submit_read(
        self, clusters: Sequence[int] | Int64Array, buffer: AlignedBuffer | None = None
    ) -> ClusterRead:
        """Start reading clusters, neighbours in one access each.

        Args:
            clusters: each once, in any order.
            buffer: to read into; kept until the reads have ended. Default: a new one.

        Raises:
            StorageError: a cluster was spoiled by a failed write.
            FetchError: the file is closed. Errors of the reads themselves come from `wait`.
        """
        wanted = np.asarray(clusters, dtype=np.int64)
        self._refuse_spoiled(wanted)
        found = self._locate(wanted)
        spans = merge(found.lows, found.highs, self.gap_bytes)
        sizes = spans.highs - spans.lows
        shift = sizes.cumsum() - sizes - spans.lows  # from the file to the buffer
        if buffer is None:
            buffer = AlignedBuffer(int(sizes.sum()) // self.sector_bytes, self.sector_bytes)
        assert sizes.sum() <= buffer.num_bytes, (sizes.sum(), buffer.num_bytes)
        stored = np.zeros(len(sizes), dtype=np.int64)
        np.add.at(stored, spans.span_of, found.stored)
        live = stored > 0
        lows, highs, late = put_buffered(found, spans, live, shift, buffer)
        ticket = None
        if live.any():
            to = (lows + shift)[live] + buffer.address
            lengths = (highs - lows)[live]
            ticket = self.file.submit_reads(lows[live], lengths, to, buffer.array)
            self._count_read(stored[live], int(lengths.sum()))
            if self.gap_bytes:
                self._count_gaps(found, spans, live)
        offsets = found.addresses(shift[spans.span_of])
        read = ClusterRead(buffer, ticket, found.counts, offsets, self.entry_bytes, late)
        self._under_way = [r for r in self._under_way if not r.done()] + [read]
        return read

    def read(self, clusters: Sequence[int] | Int64Array) -> list[ByteArray]:
        """Read clusters and wait: a list of uint8 [count, entry_bytes].

        Raises:
            StorageError: a cluster was spoiled by a failed write.
            FetchError: a read failed or came up short.
        """
        return self.submit_read(clusters).split()

    def settle_reads(self) -> None:
        """Wait until no read is under way; who submitted one learns of its errors, not others."""
        for read in self._under_way:
            with contextlib.suppress(FetchError):
                read.wait()
        self._under_way = []

    def _count_read(self, stored: Int64Array, num_bytes: int) -> None:
        counters = self.counters
        times = np.bincount(stored)
        lengths = times.nonzero()[0]
        for length, more in zip(lengths.tolist(), times[lengths].tolist(), strict=True):
            counters.access_lengths[length] = counters.access_lengths.get(length, 0) + more
        counters.read_entries += int(stored.sum())
        counters.read_bytes += num_bytes

    def _count_gaps(self, found: Located, spans: Spans, live: npt.NDArray[np.bool_]) -> None:
        tight = merge(found.lows, found.highs)
        gaps = spans.highs - spans.lows
        inside = spans.lows.searchsorted(tight.lows, "right") - 1
        np.add.at(gaps, inside, tight.lows - tight.highs)
        self.counters.gap_bytes += int(gaps[live].sum())

    def _refuse_spoiled(self, clusters: Sequence[int] | Int64Array) -> None:
        if self._spoiled and not self._spoiled.isdisjoint(np.asarray(clusters).tolist()):
            raise StorageError(
                "a KV cluster was lost when writing it failed earlier; reset the cache"
            )

    # Writing ----------------------------------------------------------------------------------

    def _reserve(self, num_bytes: int) -> None:
        """Make room in the file for [0, num_bytes), and a little more."""
        if num_bytes > self._reserved_bytes:
            whole = -(-num_bytes // _RESERVE_BYTES) * _RESERVE_BYTES
            self.file.reserve(whole)
            self._reserved_bytes = whole

    def _new_image(self, num_bytes: int) -> ByteArray:
        """Aligned memory to write from: uint8 [num_bytes], of any content, until the next call."""
        self._image = self._enough(self._image, num_bytes)
        return self._image.array.reshape(-1)[:num_bytes]

    def _write(self, offset: int, data: ByteArray) -> None:
        """Write whole sectors, aligned in the file and in memory."""
        self.file.write_at(offset, data)
        self.counters.written_bytes += len(data)
        self.counters.num_writes += 1

    def _read_old(self, offset: int, num_bytes: int) -> ByteArray:
        """Read whole sectors in order to write: uint8 [num_bytes]; valid until the next call."""
        self._old = self._enough(self._old, num_bytes)
        where, length, to = np.array([[offset], [num_bytes], [self._old.address]], dtype=np.int64)
        self.file.submit_reads(where, length, to, self._old.array).wait()
        self.counters.reread_bytes += num_bytes
        return self._old.array.reshape(-1)[:num_bytes]

    def _enough(self, buffer: AlignedBuffer, num_bytes: int) -> AlignedBuffer:
        if num_bytes <= buffer.num_bytes:
            return buffer
        rows = -(-num_bytes // self.sector_bytes)
        return AlignedBuffer(max(rows, 2 * buffer.num_slots), self.sector_bytes)

    def _check_new(self, entries: ByteArray) -> ByteArray:
        assert entries.dtype == np.uint8, entries.dtype
        assert entries.ndim == 2, entries.shape
        assert entries.shape[1] == self.entry_bytes, entries.shape
        return entries

    def _check_each(self, clusters: Int64Array, entries: ByteArray) -> list[int]:
        """The clusters of `append_each`, its arguments checked."""
        self._check_new(entries)
        numbers: list[int] = clusters.tolist()
        assert len(numbers) == len(entries), (len(numbers), len(entries))
        assert len(set(numbers)) == len(numbers), "a cluster gets two entries"
        return numbers


def new_clusters(
    order: Sequence[int], members: Mapping[int, Int64Array], present: Container[int],
    num_entries: int,
) -> list[int]:  # fmt: skip
    """The clusters of an order, checked: new, each once, and a partition of the entries."""
    new = [cluster for cluster in order if cluster != EMPTY]
    assert len(set(new)) == len(new), "a cluster is placed twice"
    assert not any(cluster in present for cluster in new), "has a place"
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *(members[c] for c in new)])
    assert len(np.unique(rows)) == len(rows) == num_entries, "not a partition"
    return new


def scatter(image: ByteArray, offsets: Int64Array, entries: ByteArray) -> None:
    """Copy entry i, uint8 [entry_bytes], to byte `offsets[i]` of `image`, uint8 [num_bytes]."""
    num_bytes = entries.shape[1]
    rows: np.ndarray[tuple[int], np.dtype[np.void]] = np.ndarray(
        (max(0, len(image) - num_bytes + 1),), dtype=f"V{num_bytes}", buffer=image, strides=(1,)
    )
    rows[offsets] = np.ascontiguousarray(entries).view(f"V{num_bytes}").reshape(-1)
