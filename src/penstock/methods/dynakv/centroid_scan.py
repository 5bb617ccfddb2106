"""CentroidScan: the nearest centroid of a new key, exactly, from an 8-bit copy of the centroids."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import CacheStateError
from penstock.kernels.native.compiled import address, kernel
from penstock.methods.dynakv.cluster_statistics import squared_distances

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]

LANES = 16
"""Components, and clusters in a block, that the kernel takes at a time; two blocks at once."""
BLOCK_CENTROIDS = 256
"""Centroids that are copied at a time."""
ROUNDING = np.float32(1e-5)
"""Share of the lengths of two vectors that their float32 product may be wrong by; ample."""


class CentroidScan:
    """Finds the nearest of many centroids of each row while it reads a quarter of their bytes.

    Products of a 16-bit copy of the key with an 8-bit copy of the centroids give every distance up
    to a known error (Cauchy-Schwarz: length of the one times length of what rounding took from the
    other). Those that can still be the nearest are measured with the centroids, in float64, so
    that the answer is theirs. Without the compiled kernel (`clusters.c`) the products are those of
    the float32 centroids; the answer is the same, bit for bit.

    The copy is of the centroids about an origin and in units of each component's range, both taken
    once (`begin`): keys share a large mean, and few components are much wider than the rest.
    """

    def __init__(self, centroids: Float32Array, *, copies: bool = True) -> None:
        """Allocate; nothing is found before `begin`.

        Args:
            centroids: read again in each call, never written. [rows, capacity, dim]
            copies: keep the 8-bit copy; without it, the products are those of the centroids.
        """
        rows, capacity, dim = centroids.shape
        self._centroids = centroids
        self._flat = centroids.reshape(-1, dim)
        self._first_places = np.arange(rows) * capacity
        self._origin = np.zeros((rows, dim), dtype=np.float32)
        self._ranges = np.ones((rows, dim), dtype=np.float32)
        padded = _up(capacity, 2 * LANES)
        self._half_squares = np.full((rows, padded), np.inf, dtype=np.float32)
        self._largest = np.zeros(rows, dtype=np.float32)
        self._copy = kernel("copy_centroids") if copies else None
        self.is_compiled = self._copy is not None
        self.table = np.zeros(0, dtype=np.int64)
        """What the kernels take as `struct scan`."""
        if self.is_compiled:
            self._begin_copy(_up(dim, LANES), padded)

    def _begin_copy(self, width: int, padded: int) -> None:
        rows, capacity, dim = self._centroids.shape
        self._codes = np.zeros((rows, padded * width), dtype=np.uint8)
        self._query = np.zeros((rows, 2 * width), dtype=np.int8)
        self._steps = np.zeros((rows, padded), dtype=np.float32)
        self._scores = np.zeros((rows, padded), dtype=np.float32)
        self._errors = np.zeros(rows, dtype=np.float32)
        self._reach = np.zeros(rows, dtype=np.float32)
        arrays: tuple[NDArray[Any], ...] = (
            self._centroids, self._origin, self._ranges, self._half_squares, self._steps,
            self._scores, self._largest, self._errors, self._reach, self._codes, self._query,
        )  # fmt: skip
        sizes = (rows, capacity, dim, width, padded // LANES)
        self.table = np.array([*sizes, *(address(array) for array in arrays)])

    @staticmethod
    def num_bytes(rows: int, capacity: int, dim: int, *, copies: bool = True) -> int:
        """Bytes of the copy and of what is computed with it, for the ledger."""
        padded, width = _up(capacity, 2 * LANES), _up(dim, LANES)
        held = rows * (8 * dim + 4 * padded + 4)
        if not copies or kernel("copy_centroids") is None:
            return held
        return held + rows * (padded * (width + 8) + 2 * width + 8)

    def begin(self, counts: Int64Array) -> None:
        """Take origin and ranges from the first `counts[row]` centroids, and copy those."""
        self._half_squares[:] = np.inf
        self._largest[:] = 0.0
        if self.is_compiled:
            self._errors[:] = self._reach[:] = 0.0
        for row, count in enumerate(counts.tolist()):
            first = self._centroids[row, :count]
            self._origin[row] = first.mean(axis=0)
            np.subtract(first.max(axis=0), self._origin[row], out=self._ranges[row])
            below = self._origin[row] - first.min(axis=0)
            np.maximum(self._ranges[row], below, out=self._ranges[row])
            # A component that no centroid differs in yet may have any range but a tiny one.
            spread, offset = self._ranges[row].max(), np.abs(self._origin[row]).max()
            floor = max(1e-3 * float(spread), 1e-5 * float(offset)) or 1.0
            np.maximum(self._ranges[row], floor, out=self._ranges[row])
            for at in range(0, count, BLOCK_CENTROIDS):
                numbers = np.arange(at, min(count, at + BLOCK_CENTROIDS))
                self.update(self._first_places[row] + numbers)

    def update(self, places: Int64Array) -> None:
        """Some centroids have changed.

        Args:
            places: row times capacity plus number. [any]
        """
        if self._copy is not None:
            self._copy(address(self.table), address(places), len(places))
            return
        rows, clusters = np.divmod(places, self._centroids.shape[1])
        part = self._flat.take(places, axis=0)
        part -= self._origin.take(rows, axis=0)
        halves = np.einsum("ij,ij->i", part, part) * np.float32(0.5)
        self._half_squares[rows, clusters] = halves
        np.maximum.at(self._largest, rows, halves)

    def remove(self, row: int, cluster: int) -> None:
        """A cluster is empty: nothing is nearest to it until it is updated again."""
        self._half_squares[row, cluster] = np.inf

    def nearest(self, keys: Float32Array, used: int) -> tuple[Int64Array, Float64Array]:
        """The centroid nearest to each row's key; of equals, the one with the lowest number.

        Args:
            keys: one a row. [rows, dim]
            used: clusters to look at, from the first on; the row has one that is not empty.

        Returns:
            The centroids' numbers, and their `squared_distances`. [rows] each

        Raises:
            CacheStateError: a key is not finite.
        """
        if not self.is_compiled:
            return self.nearest_twin(keys, used)
        find = kernel("nearest_centroids")
        assert find is not None
        keys = np.ascontiguousarray(keys)
        chosen, squares = np.empty(len(keys), dtype=np.int64), np.empty(len(keys))
        find(
            address(self.table), address(keys), keys.shape[1], used, address(chosen),
            address(squares),
        )  # fmt: skip
        if chosen.min() < 0:
            raise not_finite()
        return chosen, squares

    def nearest_twin(
        self, keys: Float32Array, used: int
    ) -> tuple[Int64Array, Float64Array]:  # fmt: skip
        """The meaning of `nearest` in plain numpy."""
        moved = keys - self._origin
        if not np.isfinite(moved).all():
            raise not_finite()
        # The origin's own product is the same for all centroids of a row.
        scores = np.matmul(self._centroids[:, :used], moved[:, :, None])[:, :, 0]
        scores -= self._half_squares[:, :used]
        reach = np.sqrt(2 * self._largest) + _lengths(self._origin)
        margins = 2 * ROUNDING * _lengths(moved) * reach + 4 * ROUNDING * self._largest
        least = scores.max(axis=1) - margins
        rows, clusters = np.divmod(np.flatnonzero(scores >= least[:, None]), used)
        candidates = self._flat.take(self._first_places.take(rows) + clusters, axis=0)
        squares = squared_distances(keys.take(rows, axis=0), candidates)
        order = np.lexsort((squares, rows))
        first = order[np.searchsorted(rows, np.arange(len(keys)))]
        return clusters.take(first), squares.take(first)

    def take_rows_from(self, other: "CentroidScan", rows: Int64Array) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""
        names = ["_origin", "_ranges", "_half_squares", "_largest"]
        if self.is_compiled:
            names += ["_codes", "_steps", "_errors", "_reach"]
        for name in names:
            getattr(self, name)[:] = getattr(other, name)[rows]


def not_finite() -> CacheStateError:
    """The error for a key that has no nearest centroid."""
    return CacheStateError("a key of the cache is not finite; the model's computation went wrong")


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _lengths(vectors: Float32Array) -> Float32Array:
    lengths: Float32Array = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    return lengths
