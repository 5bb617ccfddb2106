"""ClusterStep: a decode step's entries to their clusters, and splits, in compiled code (DynaKV)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.native.compiled import address, kernel
from penstock.methods.dynakv.centroid_scan import CentroidScan, not_finite
from penstock.methods.dynakv.cluster_members import ClusterMembers
from penstock.methods.dynakv.cluster_split import two_means
from penstock.methods.dynakv.cluster_statistics import LANES, ClusterStatistics, Float32Array

BoolArray = NDArray[np.bool_]
UpdateRule: TypeAlias = Literal["adaptive", "static", "local"]
RULES: Mapping[UpdateRule, int] = MappingProxyType({"adaptive": 0, "static": 1, "local": 2})


class ClusterStep:
    """Takes each row's next entry to its nearest cluster, as a member or buffered.

    Source: DynaKV, Algorithm 1 without its splits; `AdaptiveClusters` says how, and what the other
    rules do. The compiled kernel (`clusters.c`) does all of it; without it numpy does, with the
    same results bit for bit.

    All arrays are changed in place, and what they belong to must not replace them.
    """

    def __init__(
        self, statistics: ClusterStatistics, entries: ClusterMembers, scan: CentroidScan,
        thresholds: Float32Array, update: UpdateRule,
    ) -> None:  # fmt: skip
        """Keep what a step changes.

        Args:
            thresholds: read in each step. [rows]
        """
        self._statistics, self._entries, self._scan = statistics, entries, scan
        self._thresholds, self._update = thresholds, update
        rows, capacity, dim = statistics.centroids.shape
        self._shape, self._first_places = (rows, dim), np.arange(rows) * capacity
        self._compiled = kernel("cluster_step") if scan.is_compiled else None
        self._halve = kernel("split_cluster") if scan.is_compiled else None
        arrays: tuple[NDArray[Any], ...] = (
            statistics.sizes, statistics.deviations, statistics.free, thresholds,
            entries.buffer_counts, entries.cluster_of,
        )  # fmt: skip
        owners = entries.cluster_of
        sizes = (RULES[update], owners.shape[1], owners.itemsize)
        self._table = np.array([*sizes, *(address(array) for array in arrays)])
        self._numbers, self._squares = np.zeros(rows, dtype=np.int64), np.zeros(rows)
        self._waiting = np.zeros(1, dtype=np.int64)
        self._inputs = address(scan.table), address(self._table)
        self._outputs = address(self._numbers), address(self._squares), address(self._waiting)

    def take(self, keys: Tensor) -> None:
        """Take in one entry of each row; nothing is changed where that fails.

        Args:
            keys: float32, on the CPU. [rows, dim]

        Raises:
            CacheStateError: a key is not finite.
        """
        if self._compiled is None:
            self.take_twin(keys.numpy())
            return
        assert keys.shape == self._shape
        if keys.stride(1) != 1:
            keys = keys.contiguous()
        entries = self._entries
        used = self._statistics.num_clusters
        self._compiled(
            *self._inputs, keys.data_ptr(), keys.stride(0), used, entries.length, *self._outputs
        )  # fmt: skip
        waiting = int(self._waiting[0])
        if waiting < 0:
            raise not_finite()
        entries.taken(self._numbers, waiting)

    def take_twin(self, keys: Float32Array) -> None:
        """The meaning of `take` in plain numpy. [rows, dim]"""
        statistics, entries = self._statistics, self._entries
        clusters, squares = self._scan.nearest_twin(keys, statistics.num_clusters)
        places = self._first_places + clusters
        joins = np.full(len(places), self._update != "local")
        if self._update == "static":
            statistics.take_unmoved(places, squares)
        elif self._update == "adaptive":
            grown = statistics.grown(places, keys, squares)
            fits = (grown.variances <= self._thresholds) | (statistics.free == 0)
            joins = fits & (entries.buffer_counts.take(places) == 0)
            statistics.take(places[joins], grown.some(joins))
            self._scan.update(places[joins])
        entries.add(clusters, joins)

    def split(
        self, row: int, cluster: int, child: int, keys: Tensor, oldest: int
    ) -> BoolArray | None:
        """Make two clusters of one, the larger part first, and compute both anew.

        Args:
            child: a free number; -1 where there is none, so that the cluster stays whole.
            keys: of all its entries; float32, on the CPU. [entries, dim]
            oldest: which entry keeps the number in parts of one size.

        Returns:
            Which entries are the child's now [entries], or None where the cluster is whole.
        """
        if self._halve is None:
            return self.split_twin(row, cluster, child, keys.numpy(), oldest)
        count, dim = keys.shape
        assert dim == self._shape[1]
        keys = keys.contiguous()
        moves = np.empty(count, dtype=np.bool_)
        scratch = np.empty((count + 1) * (dim + LANES) + count)
        self._halve(
            *self._inputs, keys.data_ptr(), count, oldest, row, cluster, child, address(scratch),
            address(moves), self._outputs[2],
        )  # fmt: skip
        return moves if self._waiting[0] else None

    def split_twin(
        self, row: int, cluster: int, child: int, keys: Float32Array, oldest: int
    ) -> BoolArray | None:
        """The meaning of `split` in plain numpy."""
        points = keys.astype(np.float64)
        places = np.array([cluster, child]) + row * self._statistics.sizes.shape[1]
        moves = two_means(points) if child >= 0 else None
        if moves is None:
            self._statistics.set(row, cluster, points)
            self._scan.update(places[:1])
            return None
        twice = 2 * int(np.count_nonzero(moves))
        if twice > len(moves) or (twice == len(moves) and moves[oldest]):
            moves = ~moves
        self._statistics.set(row, cluster, points[~moves])
        self._statistics.set(row, child, points[moves])
        self._scan.update(places)
        return moves
