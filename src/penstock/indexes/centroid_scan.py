"""CentroidScan: the nearest centroid of a new key, exactly, from an 8-bit copy of the centroids."""

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import CacheStateError
from penstock.kernels.native.compiled import address, kernel

Float32Array = NDArray[np.float32]
Int64Array = NDArray[np.int64]

LANES = 64
"""Codes that the kernel takes at a time."""
ROUNDING = np.float32(1e-5)
"""Share of the lengths of two vectors that their float32 product may be wrong by; ample."""
SMALLEST = np.float32(1e-30)


class CentroidScan:
    """Finds the nearest of many centroids of each row while it reads a quarter of their bytes.

    One product of the key with an 8-bit copy of the centroids gives every distance up to a known
    error (Cauchy-Schwarz: length of the key times length of what rounding took away). Those that
    can still be the nearest are measured with the float32 centroids, so that the answer is
    theirs. Without the compiled kernel the product is with the float32 centroids themselves.

    The copy is of the centroids about an origin and in units of each component's range, both taken
    once (`begin`): keys share a large mean, and few components are much wider than the rest.
    """

    def __init__(self, centroids: Float32Array) -> None:
        """Allocate; nothing is found before `begin`.

        Args:
            centroids: read again in each call, never written. [rows, capacity, dim]
        """
        rows, capacity, dim = centroids.shape
        self._centroids = centroids
        self._flat = centroids.reshape(-1, dim)
        self._first_places = np.arange(rows) * capacity
        self._origin = np.zeros((rows, dim), dtype=np.float32)
        self._ranges = np.ones((rows, dim), dtype=np.float32)
        self._half_squares = np.full((rows, capacity), np.inf, dtype=np.float32)
        self._largest = np.zeros(rows, dtype=np.float32)
        self._scores = np.zeros((rows, capacity), dtype=np.float32)
        self._compiled = kernel("int8_linear")
        if self._compiled is not None:
            width = _width(dim)
            self._codes = np.zeros((rows, capacity, width), dtype=np.int8)
            self._flat_codes = self._codes.reshape(-1, width)
            self._steps = np.zeros((rows, capacity), dtype=np.float32)
            self._errors = np.zeros(rows, dtype=np.float32)
            self._query = np.zeros((rows, width), dtype=np.float32)

    @staticmethod
    def num_bytes(rows: int, capacity: int, dim: int) -> int:
        """Bytes of the copy and of what is computed with it, for the ledger."""
        held = rows * (8 * dim + capacity * 8 + 4)
        if kernel("int8_linear") is None:
            return held
        return held + rows * (capacity * (_width(dim) + 4) + 4 + 4 * _width(dim))

    def begin(self, counts: Int64Array) -> None:
        """Take origin and ranges from the first `counts[row]` centroids, and copy those."""
        self._half_squares[:] = np.inf
        self._largest[:] = 0.0
        if self._compiled is not None:
            self._errors[:] = 0.0
        for row, count in enumerate(counts.tolist()):
            first = self._centroids[row, :count]
            self._origin[row] = first.mean(axis=0)
            np.abs(first - self._origin[row]).max(axis=0, out=self._ranges[row])
            # A component that no centroid differs in yet may have any range but a tiny one.
            spread, offset = self._ranges[row].max(), np.abs(self._origin[row]).max()
            floor = max(1e-3 * float(spread), 1e-5 * float(offset)) or 1.0
            np.maximum(self._ranges[row], floor, out=self._ranges[row])
            self.update(self._first_places[row] + np.arange(count))

    def update(self, places: Int64Array) -> None:
        """Some centroids have changed.

        Args:
            places: row times capacity plus number. [any]
        """
        rows = places // self._half_squares.shape[1]
        part = self._flat.take(places, axis=0)
        part -= self._origin.take(rows, axis=0)
        halves = np.einsum("ij,ij->i", part, part) * np.float32(0.5)
        self._half_squares.put(places, halves)
        np.maximum.at(self._largest, rows, halves)
        if self._compiled is None:
            return
        part /= self._ranges.take(rows, axis=0)
        steps = np.abs(part).max(axis=1) / np.float32(127.0) + SMALLEST
        codes = np.rint(part / steps[:, None])
        self._flat_codes[places, : part.shape[1]] = codes
        self._steps.put(places, steps)
        lengths = _lengths(part)
        codes *= steps[:, None]
        part -= codes
        np.maximum.at(self._errors, rows, _lengths(part) + ROUNDING * lengths)

    def remove(self, place: int) -> None:
        """A cluster is empty: nothing is nearest to it until it is updated again."""
        self._half_squares.put(place, np.inf)

    def nearest(self, keys: Float32Array, used: int) -> Int64Array:
        """The centroid nearest to each row's key; of equals, the one with the lowest number.

        Args:
            keys: one a row. [rows, dim]
            used: clusters to look at, from the first on; the row has one that is not empty.

        Returns:
            [rows]

        Raises:
            CacheStateError: a key is not finite.
        """
        scores, margins = self._products(keys - self._origin, used)
        scores -= self._half_squares[:, :used]
        least = scores.max(axis=1) - margins
        if not np.isfinite(least).all():
            raise CacheStateError(
                "a key of the cache is not finite; the model's computation went wrong"
            )
        rows, clusters = np.divmod(np.flatnonzero(scores >= least[:, None]), used)
        if len(rows) == len(keys):
            return clusters
        gaps = keys.take(rows, axis=0)
        gaps -= self._flat.take(self._first_places.take(rows) + clusters, axis=0)
        order = np.lexsort((np.einsum("ij,ij->i", gaps, gaps), rows))
        first = order[np.searchsorted(rows, np.arange(len(keys)))]
        return clusters.take(first)

    def _products(self, moved: Float32Array, used: int) -> tuple[Float32Array, Float32Array]:
        """Products of keys with centroids, each row up to a constant, and twice their error.

        Args:
            moved: keys about the origin. [rows, dim]

        Returns:
            [rows, used] and [rows]
        """
        slack = 4 * ROUNDING * self._largest
        if self._compiled is None:
            # The origin's own product is the same for all centroids of a row.
            scores = np.matmul(self._centroids[:, :used], moved[:, :, None])[:, :, 0]
            reach = np.sqrt(2 * self._largest) + _lengths(self._origin)
            return scores, 2 * ROUNDING * _lengths(moved) * reach + slack
        rows, capacity, width = self._codes.shape
        query, out = self._query, self._scores[:, :used]
        np.multiply(moved, self._ranges, out=query[:, : moved.shape[1]])
        asked, codes = address(query), address(self._codes)
        steps, found = address(self._steps), address(self._scores)
        for row in range(rows):
            at = row * capacity
            self._compiled(
                asked + row * 4 * width, codes + at * width, steps + 4 * at, 1, width, used,
                found + 4 * at,
            )  # fmt: skip
        return out, 2 * self._errors * _lengths(query) + slack

    def take_rows_from(self, other: "CentroidScan", rows: Int64Array) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""
        names = ["_origin", "_ranges", "_half_squares", "_largest"]
        if self._compiled is not None:
            names += ["_codes", "_steps", "_errors"]
        for name in names:
            getattr(self, name)[:] = getattr(other, name)[rows]


def _width(dim: int) -> int:
    return -(-dim // LANES) * LANES


def _lengths(vectors: Float32Array) -> Float32Array:
    lengths: Float32Array = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    return lengths
