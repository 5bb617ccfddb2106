"""AdaptiveClusters: which cluster each entry is in, and when clusters split (DynaKV, section 4)."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import CacheStateError
from penstock.methods.dynakv.centroid_scan import CentroidScan
from penstock.methods.dynakv.cluster_members import ClusterMembers
from penstock.methods.dynakv.cluster_statistics import ClusterStatistics, Int64Array, grouped_bytes
from penstock.methods.dynakv.cluster_step import ClusterStep
from penstock.methods.dynakv.cluster_step import UpdateRule as UpdateRule
from penstock.methods.dynakv.clustered_labels import clustered_labels, head_threshold, labels_bytes

Load: TypeAlias = Callable[[int, int], tuple[Tensor, Int64Array]]
"""Row and cluster to the keys [entries, dim] and positions [entries] of all its entries: members
and buffered ones, in any order."""


class Split(NamedTuple):
    """What became of a cluster whose entries were in memory together."""

    row: int
    cluster: int
    child: int
    """Number of the new cluster; -1 where the cluster stayed whole and took its buffer in."""
    moves: NDArray[np.bool_]
    """Which of the entries went to the child, in the order in which they were given. [entries]"""


class Adaptation(NamedTuple):
    """What one decode step did beside taking its entry in."""

    splits: list[Split]
    loaded: list[tuple[int, int]]
    """Row and cluster of those that were loaded only because the buffers were full."""


class AdaptiveClusters:
    """A partition of every row's entries into clusters that follows what is decoded.

    Source: DynaKV, sections 4.1, 4.2 and Algorithm 1. `fit` partitions the prompt; `append` takes
    a step's entry to its nearest cluster: a member where the variance stays within the row's
    threshold, otherwise buffered, which flags the cluster; `adapt` splits flagged clusters that
    were retrieved, and whatever must be loaded because the buffers reach `buffer_entries`.

    Differences, where the paper is silent or says two things:

    * A threshold is a quantile of the variances of the initial clusters, weighted by size, times a
      factor. A variance is a mean squared distance to the centroid.
    * An entry over the threshold whose cluster is in memory is buffered and split within the same
      `adapt`: Algorithm 1's second branch, with one split where it would make two.
    * All entries of a flagged cluster are buffered (the text), also those that the variance would
      allow again (Algorithm 1). Statistics are those of the members until the split.
    * Buffers are counted over all rows together, and as many clusters are loaded in a step as it
      takes (Algorithm 1 loads one): every row adds an entry a step.
    * The larger part of a split keeps the cluster's number. A part above the threshold waits for
      its next entry. Equal keys stay together; so does everything in a row that has no number
      left: it appends whatever comes (`unsplit` counts both).

    `update="static"` appends to the nearest initial centroid, which stays where it is (as DynaKV
    describes PQCache); variances are then about that point. `update="local"` buffers entries until
    there are `recluster_tokens`, which become clusters of their own (ClusterKV). Distances decide
    in both, so that they differ in nothing else.

    A row is a KV head of a sequence. Positions of a row are 0, 1, 2, ... and each is in one cluster
    at any time, as a member or buffered; buffered entries are part of it for retrieval. No KV is
    held here but the keys of `recluster_tokens`.
    """

    def __init__(
        self, *, rows: int, dim: int, max_tokens: int, max_clusters: int, tokens_per_cluster: int,
        buffer_entries: int = 16, update: UpdateRule = "adaptive", recluster_tokens: int = 320,
        threshold_quantile: float = 0.9, threshold_factor: float = 1.0, seed: int = 0,
        centroids: NDArray[np.float32] | None = None,
    ) -> None:  # fmt: skip
        """Allocate everything; nothing grows later.

        Args:
            max_clusters: of a row; with all in use nothing is split any more.
            tokens_per_cluster: of an initial cluster, on average.
            buffer_entries: B_max; buffered entries of all rows at which clusters are loaded.
            recluster_tokens: for "local" alone; at least `tokens_per_cluster`.
            threshold_quantile: of the initial variances, by size; from 0 to 1.
            centroids: memory that is shared; it holds these whenever they are wanted, and no copy
                of them is kept. [rows, max_clusters, dim]
        """
        assert buffer_entries >= 1
        assert max_clusters >= 1
        assert update != "local" or recluster_tokens >= tokens_per_cluster
        self.update, self._seed = update, seed
        self._max_clusters = max_clusters
        self._tokens_per_cluster = tokens_per_cluster
        self._recluster_tokens = recluster_tokens
        self._buffer_entries = buffer_entries
        self._quantile, self._factor = threshold_quantile, threshold_factor
        self.statistics = ClusterStatistics(rows, max_clusters, dim, centroids)
        self.entries = ClusterMembers(rows, max_tokens, max_clusters)
        self.thresholds = np.zeros(rows, dtype=np.float32)
        """tau of each row; may be changed between steps, in place. [rows]"""
        self.num_splits, self.num_loaded, self.unsplit = 0, 0, 0
        self._scan = CentroidScan(self.statistics.centroids, copies=centroids is None)
        parts = (self.statistics, self.entries, self._scan)
        self._step = ClusterStep(*parts, self.thresholds, update)
        waiting = recluster_tokens if update == "local" else 0
        self._new_keys = np.zeros((rows, waiting, dim), dtype=np.float32)
        self._num_new = self._fit_tokens = 0

    @staticmethod
    def num_bytes(
        *, rows: int, dim: int, max_tokens: int, max_clusters: int,
        update: UpdateRule = "adaptive", recluster_tokens: int = 320, centroids: bool = True,
    ) -> int:  # fmt: skip
        """Bytes of a partition of this size, for the ledger, with its centroids or without."""
        waiting = 4 * rows * dim * (recluster_tokens if update == "local" else 0)
        tables = ClusterMembers.num_bytes(rows, max_tokens, max_clusters) + 4 * rows
        size = (rows, max_clusters, dim)
        held = ClusterStatistics.num_bytes(*size, centroids=centroids)
        return waiting + tables + held + CentroidScan.num_bytes(*size, copies=centroids)

    @staticmethod
    def scratch_bytes(*, dim: int, tokens: int, tokens_per_cluster: int) -> int:
        """Temporaries of `fit_row` and `end_fit` for a prompt of so many tokens, for the ledger."""
        clusters = max(1, tokens // tokens_per_cluster)
        labels = labels_bytes(tokens, dim, clusters)
        return max(labels, 8 * tokens + grouped_bytes(clusters, dim))

    @property
    def length(self) -> int:
        """Entries of each row."""
        return self.entries.length

    # The prompt -------------------------------------------------------------------------------

    @property
    def num_clusters(self) -> int:
        """Clusters of the row that has most, numbers of empty ones included."""
        return self.statistics.num_clusters

    def fit(self, keys: Tensor) -> None:
        """Begin anew with the partition of a prompt: `begin_fit`, `fit_row`s, `end_fit`.

        Args:
            keys: any float dtype; one or more tokens, at most `max_tokens`. [rows, tokens, dim]
        """
        self.begin_fit(keys.shape[1])
        for row, part in enumerate(keys):
            self.fit_row(row, part)
        self.end_fit()

    def begin_fit(self, tokens: int) -> None:
        """Forget everything; `fit_row` for every row comes next, then `end_fit`.

        Args:
            tokens: of the prompt; from 1 to `max_tokens`.
        """
        assert 1 <= tokens <= self.entries.cluster_of.shape[1]
        self.reset()
        self._fit_tokens = tokens

    def fit_row(self, row: int, keys: Tensor) -> None:
        """Partition one row's prompt; rows come in any order, and none depends on another.

        Args:
            keys: any float dtype, of as many tokens as were announced. [tokens, dim]
        """
        tokens, statistics = self._fit_tokens, self.statistics
        assert len(keys) == tokens, "begin_fit() comes first, with the number of tokens"
        assert statistics.counts[row] == 0, "a row is partitioned once"
        wanted = max(1, min(tokens // self._tokens_per_cluster, self._max_clusters))
        labels = clustered_labels(keys, wanted, self._seed)
        taken = statistics.add_clusters(row, keys, labels, np.arange(wanted))
        self.entries.cluster_of[row, :tokens] = labels
        sizes = statistics.sizes[row, : len(taken)]
        variances = statistics.variances(row)[: len(taken)]
        tau = head_threshold(keys, variances, sizes, self._quantile)
        self.thresholds[row] = tau * self._factor

    def end_fit(self) -> None:
        """All rows are partitioned; entries can be appended."""
        assert self.statistics.counts.all(), "fit_row() comes first, for every row"
        self.entries.length, self._fit_tokens = self._fit_tokens, 0
        self._scan.begin(self.statistics.counts)

    # One decode step --------------------------------------------------------------------------

    def append(self, keys: Tensor) -> Int64Array:
        """Take in each row's next entries.

        Args:
            keys: [rows, tokens, dim]

        Returns:
            The cluster of each; -1 - c where it was buffered for cluster c. [rows, tokens]

        Raises:
            CacheStateError: there is no room, or a key is not finite.
        """
        assert self.length > 0, "fit() comes first"
        first, end = self.length, self.length + keys.shape[1]
        room = self.entries.cluster_of.shape[1]
        if end > room:
            raise CacheStateError(
                f"the clusters have room for {room} tokens, not {end}; give a larger max_tokens"
            )
        wide = keys.detach().float().cpu()
        for number in range(end - first):
            self._step.take(wide[:, number])
            if self.update == "local":
                self._wait(wide[:, number])
        return self.entries.cluster_of[:, first:end].astype(np.int64)

    def _wait(self, keys: Tensor) -> None:
        """Keep the keys of an entry until there are enough for clusters of their own ("local")."""
        self._new_keys[:, self._num_new] = keys.numpy()
        self._num_new += 1
        if self._num_new == self._recluster_tokens:
            self._cluster_new()

    def adapt(self, in_memory: NDArray[np.bool_], load: Load) -> Adaptation:
        """The rest of a decode step: split what is due, then load and split what is overfull.

        Args:
            in_memory: clusters that this step retrieved. [rows, num_clusters or more]
            load: called once for each cluster that is split, just before.
        """
        splits = [self.split(*at, *load(*at)) for at in self.due(in_memory)]
        loaded = self.overfull()
        splits += [self.split(*at, *load(*at)) for at in loaded]
        self.num_loaded += len(loaded)
        return Adaptation(splits, loaded)

    def due(self, in_memory: NDArray[np.bool_]) -> list[tuple[int, int]]:
        """Row and cluster of the flagged clusters that are in memory, to be split now.

        Args:
            in_memory: [rows, num_clusters or more]
        """
        if self.entries.num_buffered == 0 or self.update == "local":
            return []
        return [at for at in self.entries.flagged() if in_memory[at]]

    def overfull(self) -> list[tuple[int, int]]:
        """Row and cluster of what must be loaded and split, the fullest buffers first, until fewer
        than `buffer_entries` are buffered in all; to be asked when what was due has been split."""
        if self.entries.num_buffered < self._buffer_entries or self.update == "local":
            return []
        return self.entries.fullest(self._buffer_entries)

    def split(self, row: int, cluster: int, keys: Tensor, positions: Int64Array) -> Split:
        """Make two clusters of one, its buffer included; where that cannot be, one whole one.

        Args:
            keys, positions: of all its entries (see `Load`). [entries, dim] and [entries]

        Raises:
            CacheStateError: these are not the cluster's entries.
        """
        assert self.update == "adaptive"
        self._check_entries(row, cluster, positions)
        child = self.statistics.first_free(row)
        oldest = int(positions.argmin())
        moves = self._step.split(row, cluster, child, keys.detach().float().cpu(), oldest)
        self.entries.empty_buffer(row, cluster)
        owners = self.entries.cluster_of[row]
        owners[positions] = cluster
        if moves is None:
            self.unsplit += 1
            return Split(row, cluster, -1, np.zeros(len(positions), dtype=np.bool_))
        owners[positions[moves]] = child
        self.statistics.count_new(row, child)
        self.num_splits += 1
        return Split(row, cluster, child, moves)

    def _check_entries(self, row: int, cluster: int, positions: Int64Array) -> None:
        buffered = self.entries.buffer_counts[row, cluster]
        held = int(self.statistics.sizes[row, cluster] + buffered)
        if not self.entries.is_all(row, cluster, positions, held):
            raise CacheStateError(
                f"cluster {cluster} of row {row} has {held} entries, and what was loaded is not "
                "those; the cache's files do not agree with its index"
            )

    def _cluster_new(self) -> None:
        """Make clusters of the entries that waited ("local"); where numbers run out, they stay."""
        wanted = self._recluster_tokens // self._tokens_per_cluster
        first = self.length - self._num_new
        for row, points in enumerate(self._new_keys):
            keys = torch.from_numpy(points)
            labels = clustered_labels(keys, wanted, self._seed)
            free = self.statistics.free_numbers(row)
            owners = self.entries.cluster_of[row, first : self.length]
            if len(free) > labels.max():
                taken = self.statistics.add_clusters(row, keys, labels, free)
                owners[:] = taken[labels]
                self._scan.update(taken + row * self._max_clusters)
                continue
            owners[:] = ~owners
            for cluster, key in zip(owners, points, strict=True):
                place = np.array([row * self._max_clusters + int(cluster)])
                squares = self.statistics.distances(place, key[None])
                self.statistics.take_unmoved(place, squares)
            self.unsplit += 1
        self.entries.empty_buffers()
        self._num_new = 0

    # Looking up -------------------------------------------------------------------------------

    @property
    def representatives(self) -> Tensor:
        """The centroids, a view; those of empty clusters mean nothing.
        float32 [rows, num_clusters, dim]"""
        return torch.from_numpy(self.statistics.centroids[:, : self.num_clusters])

    def entry_counts(self) -> NDArray[np.int32]:
        """Entries of each cluster, members and buffered; 0 where it is empty.
        [rows, num_clusters]"""
        used = self.num_clusters
        waiting = self.entries.buffer_counts[:, :used]
        counts: NDArray[np.int32] = self.statistics.sizes[:, :used] + waiting
        return counts

    def members(self, row: int, cluster: int) -> Int64Array:
        """Positions of a cluster's members, ascending. [members]"""
        return self.entries.members(row, cluster)

    def buffered(self, row: int, cluster: int) -> Int64Array:
        """Positions of the entries that wait for a cluster's split, ascending. [buffered]"""
        return self.entries.buffered(row, cluster)

    # Changes of shape -------------------------------------------------------------------------

    def crop(self, length: int, load: Load | None = None) -> None:
        """Forget the entries at and after `length`.

        Args:
            load: gives the entries that stay, for each cluster that lost a member and kept one;
                statistics are computed anew from them. Without it those clusters keep their
                centroid and variance.

        Raises:
            CacheStateError: what was loaded is not what stays.
        """
        assert 0 <= length <= self.length
        if length == 0:
            return self.reset()
        self._num_new = max(0, self._num_new - (self.length - length))
        for row, cluster in self.entries.crop(length):
            self._forget_members(row, cluster, load)
        for row in range(len(self.thresholds)):
            self.statistics.recount(row)
        return None

    def _forget_members(self, row: int, cluster: int, load: Load | None) -> None:
        """Bring a cluster up to date that has lost members."""
        self.statistics.lose(row, cluster, len(self.members(row, cluster)))
        if self.statistics.sizes[row, cluster] == 0:
            return self._scan.remove(row, cluster)
        if load is None:
            return None
        keys, positions = load(row, cluster)
        self._check_entries(row, cluster, positions)
        stays = self.entries.cluster_of[row, positions] == cluster
        points: NDArray[np.float64] = keys.detach().double().cpu().numpy()[stays]
        self.statistics.set(row, cluster, points, moves=self.update == "adaptive")
        return self._scan.update(np.array([row * self._max_clusters + cluster]))

    def reset(self) -> None:
        """Forget everything; `fit` comes next."""
        self.entries.reset()
        self._num_new = self._fit_tokens = 0
        self.statistics.reset()
        self.num_splits, self.num_loaded, self.unsplit = 0, 0, 0

    def take_rows_from(self, other: "AdaptiveClusters", rows: Tensor) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""
        at = rows.cpu().numpy()
        self.statistics.take_rows_from(other.statistics, at)
        self._scan.take_rows_from(other._scan, at)
        self.entries.take_rows_from(other.entries, at)
        for name in ("thresholds", "_new_keys"):
            getattr(self, name)[:] = getattr(other, name)[at]
        self._num_new = other._num_new
        self.num_splits, self.num_loaded = other.num_splits, other.num_loaded
        self.unsplit = other.unsplit
