"""ClusterLayout: one layer's tokens by cluster in a file of their own, beside those in order."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.methods.dynakv.cluster_reads import ClusterRead, LayoutCounters
from penstock.methods.dynakv.co_retrieval import co_retrievals, pool_order, retrieved
from penstock.methods.dynakv.index import FollowedClusters
from penstock.methods.dynakv.pooled_clusters import PooledClusters
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import ByteArray, Int64Array, Ticket

Put: TypeAlias = Callable[[ClusterRead | ByteArray, Int64Array, Int64Array], None]
"""Takes what has landed (or entries in memory), which entries of it, and rows of the pool's memory
that they go to."""


class Wanted(NamedTuple):
    """Tokens to bring into slots."""

    rows: Int64Array
    """[missing]"""
    entries: Int64Array
    """Token minus the index's base. [missing]"""
    targets: Int64Array
    """Row of the pool's memory that each goes to. [missing]"""


class ClusterLayout:
    """Where the entries of a layer's clusters are in their file, and those that wait for a split.

    Source: DynaKV, sections 4.2 (entries that wait are in memory) and 5. Cluster c of row r has
    number `r * capacity + c` in the file.

    Differences: every token is in the layer's region as well, in its order: prefills stream it and
    crops read it, whole transfers both, while a flash layout of clusters alone would have to be
    read whole. That takes the disk's space and writes twice.
    """

    def __init__(
        self, file: PooledClusters, index: FollowedClusters, *, rows: int, max_tokens: int,
        capacity: int,
    ) -> None:  # fmt: skip
        self._file, self._index, self._capacity = file, index, capacity
        self._place_of = np.zeros((rows, max_tokens), dtype=place_dtype(max_tokens))
        """Which entry of its cluster, in the file's order, a token is. [rows, max_tokens]"""
        self.live = False
        """Whether every token is there; otherwise they are read in their order."""
        self._waiting: dict[tuple[int, int], ByteArray] = {}
        """Entries that are in no file, by row and entry."""

    @property
    def counters(self) -> LayoutCounters:
        """What reading and writing has cost."""
        return self._file.counters

    def clear(self) -> None:
        """Forget everything; every cluster is placed anew, and the layout is live then."""
        self.live = False
        self._file.clear()
        self._waiting.clear()

    # The prompt -------------------------------------------------------------------------------

    def place_row(self, row: int, entries: ByteArray, budget: int, scaling: float) -> None:
        """Store a row's clusters, those that its prompt's queries retrieved together side by side.

        Args:
            entries: uint8 [tokens, entry_bytes]
            budget: tokens that a step selects.
            scaling: of the logits.

        Raises:
            StorageError: they could not be written.
        """
        clusters, first = self._index.clusters, row * self._capacity
        owners = clusters.entries.cluster_of[row, : len(entries)].astype(np.int64)
        by_cluster = owners.argsort(kind="stable")
        counts = np.bincount(owners)
        ends = counts.cumsum()
        members = {
            first + c: by_cluster[end - count : end]
            for c, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True))
            if count
        }
        within = np.arange(len(owners)) - (ends - counts)[owners[by_cluster]]
        self._place_of[row, by_cluster] = within
        self._file.place(self._order(row, first, list(members), budget, scaling), members, entries)

    def _order(
        self, row: int, first: int, numbers: list[int], budget: int, scaling: float
    ) -> list[int]:
        queries = self._index.prompt_queries
        if queries is None:
            return numbers
        statistics = self._index.clusters.statistics
        number = int(statistics.counts[row])
        sizes = torch.from_numpy(statistics.sizes[row, :number])
        centroids = torch.from_numpy(statistics.centroids[row, :number])
        taken = retrieved(queries[row].transpose(0, 1).cpu(), centroids, sizes, budget, scaling)
        order = pool_order(co_retrievals(taken)) + first
        present = set(numbers)
        return [int(c) if int(c) in present else -1 for c in order]

    # Retrieval --------------------------------------------------------------------------------

    def submit(self, wanted: Wanted, buffer: AlignedBuffer) -> "ClusterFetch":
        """Start reading the clusters of the wanted tokens, whole; waiting tokens come from memory.

        Args:
            buffer: what the reads land in, until the fetch has landed.

        Raises:
            StorageError: a cluster was lost by a failed write.
        """
        owners = self._index.clusters.entries.cluster_of[wanted.rows, wanted.entries]
        stored = owners >= 0
        waiting = [
            (self._waiting[row, entry], target)
            for row, entry, target in zip(*(part[~stored].tolist() for part in wanted), strict=True)
        ]
        rows, entries, targets = (part[stored] for part in wanted)
        numbers = rows * self._capacity + owners[stored]
        clusters, place = np.unique(numbers, return_inverse=True)
        inside = self._place_of[rows, entries].astype(np.int64)
        return ClusterFetch(self._file, clusters, place, inside, targets, waiting, buffer)

    def waiting(self, row: int, entry: int) -> ByteArray:
        """An entry that waits for its cluster's split: uint8 [entry_bytes]."""
        return self._waiting[row, entry]

    def in_file_order(self, row: int, members: Int64Array) -> Int64Array:
        """Members of one cluster as they lie in the file."""
        ordered: Int64Array = members[self._place_of[row, members].argsort()]
        return ordered

    def read(self, row: int, cluster: int) -> ByteArray:
        """The stored entries of a cluster, in the file's order: uint8 [members, entry_bytes].

        Raises:
            StorageError: a read failed, or they were lost by a failed write.
        """
        return self._file.read([row * self._capacity + cluster])[0]

    # What is decoded --------------------------------------------------------------------------

    def append(self, entry: int, labels: Int64Array, entries: ByteArray) -> None:
        """Take in one entry of every row.

        Args:
            entry: token minus the index's base.
            labels: as `AdaptiveClusters.append` gives them. [rows]
            entries: uint8 [rows, entry_bytes]

        Raises:
            StorageError: a write failed.
        """
        joined = (labels >= 0).nonzero()[0]
        for row in (labels < 0).nonzero()[0].tolist():
            self._waiting[row, entry] = entries[row].copy()
        if len(joined):
            numbers = joined * self._capacity + labels[joined]
            self._place_of[joined, entry] = self._file.pools.count[numbers]
            self._file.append_each(numbers, entries[joined])

    def split(
        self, row: int, cluster: int, child: int, moves: NDArray[np.bool_], members: Int64Array,
        entries: ByteArray,
    ) -> None:  # fmt: skip
        """Follow a split: stored entries in the file's order, then those that waited.

        Args:
            child: minus one: the cluster stayed whole and takes in what waited.
            moves: which go to the child. [entries]
            members: tokens minus the index's base. [entries]
            entries: uint8 [entries, entry_bytes]

        Raises:
            StorageError: a write failed.
        """
        number = row * self._capacity + cluster
        count = self._file.num_entries(number)
        for entry in members[count:].tolist():
            del self._waiting[row, entry]
        if child < 0:
            self._place_of[row, members[count:]] = np.arange(count, len(members))
            self._file.append(number, entries[count:])
            return
        done = self._file.split(number, row * self._capacity + child, ~moves, entries)
        self._place_of[row, members[done.kept]] = np.arange(len(done.kept))
        self._place_of[row, members[done.moved]] = np.arange(len(done.moved))


class ClusterFetch:
    """Clusters on their way, in as many rounds as the buffer needs."""

    def __init__(
        self, file: PooledClusters, clusters: Int64Array, cluster_of: Int64Array,
        inside: Int64Array, targets: Int64Array, waiting: list[tuple[ByteArray, int]],
        buffer: AlignedBuffer,
    ) -> None:  # fmt: skip
        """Submit the first round.

        Args:
            clusters: numbers in the file, ascending.
            cluster_of: which of `clusters` each wanted entry is in. [stored]
            inside: which entry of its cluster it is. [stored]
            targets: where it goes. [stored]
            waiting: entries from memory, and where they go.
        """
        self._file, self._clusters, self._buffer = file, clusters, buffer
        self._cluster_of, self._inside, self._targets = cluster_of, inside, targets
        self._waiting = waiting
        self.later_bytes, self.later_reads, self.later_wait_s = 0, 0, 0.0
        """Of the rounds behind the first: read, in so many requests, waited for."""
        self._padded = _padded_bytes(file, clusters)
        self._bounds = _rounds(self._padded, buffer.num_bytes)
        self._read = self._submit()

    def _submit(self) -> ClusterRead | None:
        """Start the next round; a cluster that is larger than the buffer gets one of its own."""
        if not self._bounds:
            return None
        first, end = self._bounds[0]
        clusters = self._clusters[first:end]
        fits = int(self._padded[first:end].sum()) <= self._buffer.num_bytes
        return self._file.submit_read(clusters, self._buffer if fits else None)

    @property
    def tickets(self) -> list[Ticket]:
        """The batch of reads under way; none where there is nothing to wait for."""
        ticket = None if self._read is None else self._read.ticket
        return [] if ticket is None else [ticket]

    def land(self, put: Put) -> None:
        """Hand over the wanted entries when they are there, round by round.

        Raises:
            FetchError: a read failed.
        """
        for entry, target in self._waiting:
            put(entry[None], np.zeros(1, dtype=np.int64), np.array([target], dtype=np.int64))
        while self._read is not None:
            first, end = self._bounds.pop(0)
            here = (self._cluster_of >= first) & (self._cluster_of < end)
            starts = self._read.counts.cumsum() - self._read.counts
            which = starts[self._cluster_of[here] - first] + self._inside[here]
            start = time.perf_counter()
            self._read.wait()
            if first > 0:
                self.later_wait_s += time.perf_counter() - start
            put(self._read, which, self._targets[here])
            self._read = self._submit()
            for ticket in self.tickets:
                self.later_bytes += ticket.read_bytes
                self.later_reads += ticket.num_reads


def place_dtype(max_tokens: int) -> np.dtype[Any]:
    """The smallest that tells the entries of a cluster apart."""
    return np.dtype(np.uint16 if max_tokens <= 1 << 16 else np.int32)


def _padded_bytes(file: PooledClusters, clusters: Int64Array) -> Int64Array:
    """Whole sectors of each cluster, in bytes."""
    sector = file.sector_bytes
    padded: Int64Array = -(-file.pools.count[clusters] * file.entry_bytes // sector) * sector
    return padded


def _rounds(padded: Int64Array, room: int) -> list[tuple[int, int]]:
    """Cut clusters into runs that fit, each at least one: (first, end)."""
    out, first, size = [], 0, 0
    for i, one in enumerate(padded.tolist()):
        if size + one > room and i > first:
            out.append((first, i))
            first, size = i, 0
        size += one
    if first < len(padded):
        out.append((first, len(padded)))
    return out
