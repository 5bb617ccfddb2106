"""ClusterStatistics: size, centroid and spread of clusters, in constant time for each new entry."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]
IntArray: TypeAlias = NDArray[np.signedinteger]

LANES = 8
"""Sums side by side."""
BLOCK_ENTRIES = 256
"""Keys in float64 at a time."""


class Grown(NamedTuple):
    """What clusters would be with one entry more each."""

    gaps: Float32Array
    """The entry minus the present centroid. [entries, dim]"""
    sizes: Float32Array
    """[entries]"""
    deviations: Float32Array
    """Sum of squared distances to the new centroid. [entries]"""

    @property
    def variances(self) -> Float32Array:
        """[entries]"""
        found: Float32Array = self.deviations / self.sizes
        return found

    def some(self, which: NDArray[np.bool_]) -> "Grown":
        """Some of the entries."""
        return Grown(self.gaps[which], self.sizes[which], self.deviations[which])


class ClusterStatistics:
    """Size, centroid and sum of squared deviations of every cluster of every row, in float32.

    Source: DynaKV, section 4.2 ("quickly computed from the centroid, the variance, and the new
    entry"): Welford's update, here with the sum of squared deviations in place of the variance.

    The variance of a cluster is the mean squared distance of its entries to its centroid: the sum
    over the components, divided by the size (not by the size less one).
    """

    def __init__(
        self, rows: int, capacity: int, dim: int, centroids: Float32Array | None = None
    ) -> None:
        """Allocate.

        Args:
            centroids: memory of the caller's, which holds them when they are wanted.
                [rows, capacity, dim]
        """
        self.sizes = np.zeros((rows, capacity), dtype=np.int32)
        """[rows, capacity]"""
        if centroids is None:
            centroids = np.zeros((rows, capacity, dim), dtype=np.float32)
        self.centroids = centroids
        """[rows, capacity, dim]"""
        self._flat = self.centroids.reshape(-1, dim)
        self.deviations = np.zeros((rows, capacity), dtype=np.float32)
        """Sum of squared distances to the centroid. [rows, capacity]"""
        self.counts = np.zeros(rows, dtype=np.int64)
        """Numbers that are or were in use: those from here on have no cluster. [rows]"""
        self.free = np.full(rows, capacity, dtype=np.int64)
        """Numbers without a cluster. [rows]"""

    @staticmethod
    def num_bytes(rows: int, capacity: int, dim: int, *, centroids: bool = True) -> int:
        """Bytes of the statistics, for the ledger, with the centroids or without."""
        return rows * (capacity * (4 * dim * centroids + 8) + 16)

    @property
    def num_clusters(self) -> int:
        """Clusters of the row that has most, numbers of empty ones included."""
        return int(self.counts.max())

    def variances(self, row: int | slice = slice(None)) -> Float32Array:
        """Mean squared distance to the centroid; 0 where a cluster is empty.

        Args:
            row: one row; None: all of them.

        Returns:
            [rows, capacity], or [capacity] of one row.
        """
        sizes = np.maximum(self.sizes[row], 1).astype(np.float32)
        found: Float32Array = self.deviations[row] / sizes
        return found

    def free_numbers(self, row: int) -> Int64Array:
        """Numbers of a row without a cluster, ascending. [free]"""
        capacity, count = self.sizes.shape[1], int(self.counts[row])
        if self.free[row] == capacity - count:
            return np.arange(count, capacity)
        return np.flatnonzero(self.sizes[row] == 0)

    def first_free(self, row: int) -> int:
        """The lowest number of a row without a cluster; -1 where all are in use."""
        capacity, count = self.sizes.shape[1], int(self.counts[row])
        if self.free[row] == 0:
            return -1
        if self.free[row] == capacity - count:
            return count
        return int((self.sizes[row, :count] == 0).argmax())

    def count_new(self, row: int, cluster: int) -> None:
        """A free number has become a cluster."""
        self.counts[row] = max(int(self.counts[row]), cluster + 1)
        self.free[row] -= 1

    def recount(self, row: int) -> None:
        """Clusters of a row have come or gone."""
        live = np.flatnonzero(self.sizes[row])
        self.counts[row] = live[-1] + 1 if len(live) else 0
        self.free[row] = self.sizes.shape[1] - len(live)

    def add_clusters(
        self, row: int, keys: Tensor, labels: IntArray, numbers: Int64Array
    ) -> Int64Array:
        """Make clusters of some keys.

        Args:
            keys: any float dtype. [entries, dim]
            labels: from 0 on without a gap. [entries]
            numbers: free ones, at least as many as there are labels.

        Returns:
            The numbers that were taken, by label.
        """
        taken = numbers[: int(labels.max()) + 1]
        sizes, means, deviations = grouped_statistics(keys, labels, len(taken))
        self.sizes[row, taken] = sizes
        self.centroids[row, taken] = means
        self.deviations[row, taken] = deviations
        self.recount(row)
        return taken

    def grown(self, places: Int64Array, keys: Float32Array, squares: Float64Array) -> Grown:
        """What clusters would be with one key more; nothing is changed.

        Args:
            places: of the clusters: row times capacity plus number. [entries]
            keys: [entries, dim]
            squares: squared distances of the keys to the centroids. [entries]
        """
        before = self.sizes.take(places)
        after = before.astype(np.float32) + np.float32(1.0)
        deviations = self.deviations.take(places) + squares * (before / after.astype(np.float64))
        gaps = keys - self._flat.take(places, axis=0)
        return Grown(gaps, after, deviations.astype(np.float32))

    def take(self, places: Int64Array, grown: Grown) -> None:
        """Let clusters grow as was asked; none of them twice.

        Args:
            places: [entries]
        """
        self._flat[places] += grown.gaps / grown.sizes[:, None]
        self.deviations.put(places, grown.deviations)
        self.sizes.put(places, grown.sizes)

    def take_unmoved(self, places: Int64Array, squares: Float64Array) -> None:
        """Let clusters grow by one key each and leave their centroids where they are.

        The variance is then about that point, and not about the mean. Arguments as in `grown`.
        """
        self.deviations.put(places, self.deviations.take(places) + squares)
        self.sizes.put(places, self.sizes.take(places) + 1)

    def distances(self, places: Int64Array, keys: Float32Array) -> Float64Array:
        """Squared distances of keys to centroids. Arguments as in `grown`. [entries]"""
        return squared_distances(keys, self._flat.take(places, axis=0))

    def set(self, row: int, cluster: int, keys: Float64Array, *, moves: bool = True) -> None:
        """Compute a cluster's statistics anew from all its keys.

        Args:
            keys: one or more. [entries, dim]
            moves: otherwise the centroid stays where it is.
        """
        gaps, own = padded(keys), self.centroids[row, cluster]
        centre = np.add.reduce(gaps, axis=0) / len(keys) if moves else padded(own[None])[0]
        gaps -= centre
        gaps *= gaps
        self.sizes[row, cluster] = len(keys)
        own[:] = centre[: len(own)]
        self.deviations[row, cluster] = lane_sums(np.add.reduce(gaps, axis=0, keepdims=True))[0]

    def lose(self, row: int, cluster: int, left: int) -> None:
        """A cluster keeps so many of its entries; centroid and variance stay as they are."""
        self.deviations[row, cluster] *= left / max(1, int(self.sizes[row, cluster]))
        self.sizes[row, cluster] = left

    def reset(self) -> None:
        """Forget all clusters."""
        self.sizes[:] = 0
        self.deviations[:] = 0.0
        self.counts[:] = 0
        self.free[:] = self.sizes.shape[1]

    def take_rows_from(self, other: "ClusterStatistics", rows: Int64Array) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""
        self.sizes[:] = other.sizes[rows]
        self.centroids[:] = other.centroids[rows]
        self.deviations[:] = other.deviations[rows]
        self.counts[:] = other.counts[rows]
        self.free[:] = other.free[rows]


def squared_distances(keys: Float32Array, centroids: Float32Array) -> Float64Array:
    """Squared distance of each key to its centroid, in float64, as the kernels add it up.

    Args:
        keys, centroids: [entries, dim] each

    Returns:
        [entries]
    """
    gaps = padded(keys.astype(np.float64))
    gaps -= padded(centroids)
    gaps *= gaps
    return lane_sums(gaps)


def padded(vectors: NDArray[np.floating]) -> Float64Array:
    """Vectors with zeros behind, so that `lane_sums` can take them. [entries, dim]"""
    entries, dim = vectors.shape
    out = np.zeros((entries, -(-dim // LANES) * LANES))
    out[:, :dim] = vectors
    return out


def lane_sums(products: Float64Array) -> Float64Array:
    """Sums over the components: eight go side by side, and then become one by halves.

    Args:
        products: [entries, a multiple of 8]

    Returns:
        [entries]
    """
    sums: Float64Array = np.add.reduce(products.reshape(len(products), -1, LANES), axis=1)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def grouped_statistics(
    keys: Tensor, labels: IntArray, clusters: int
) -> tuple[Int64Array, Float64Array, Float64Array]:
    """Sizes, means and sums of squared deviations from the means, added up in float64.

    Args:
        keys: any float dtype. [entries, dim]
        labels: cluster of each entry, less than `clusters`. [entries]

    Returns:
        [clusters], [clusters, dim] and [clusters]; zeros where a cluster has no entry.
    """
    sizes = np.zeros(clusters, dtype=np.int64)
    means = np.zeros((clusters, keys.shape[1]))
    for wide, part in _blocks(keys, labels):
        counts = np.bincount(part, minlength=clusters)
        filled = counts.nonzero()[0]
        starts = np.cumsum(counts[filled]) - counts[filled]
        ordered = wide.take(part.argsort(kind="stable"), axis=0)
        means[filled] += np.add.reduceat(ordered, starts, axis=0)
        sizes += counts
    means /= np.maximum(sizes, 1)[:, None]
    deviations = np.zeros(clusters)
    for wide, part in _blocks(keys, labels):
        wide -= means.take(part, axis=0)
        deviations += np.bincount(part, np.einsum("ij,ij->i", wide, wide), clusters)
    return sizes, means, deviations


def grouped_bytes(clusters: int, dim: int) -> int:
    """Temporaries of `grouped_statistics`, what it returns included, for the ledger."""
    return 8 * clusters * (dim + 5) + 32 * (dim + 2) * BLOCK_ENTRIES


def _blocks(keys: Tensor, labels: IntArray) -> Iterator[tuple[Float64Array, Int64Array]]:
    """Keys in float64, and their labels, in short blocks."""
    for first in range(0, len(keys), BLOCK_ENTRIES):
        part = slice(first, first + BLOCK_ENTRIES)
        wide = keys[part].detach().cpu().to(torch.float64, copy=True)
        yield wide.numpy(), labels[part].astype(np.int64)
