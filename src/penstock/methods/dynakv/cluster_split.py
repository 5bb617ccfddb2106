"""two_means(): the entries of one cluster in two parts, by k-means with k = 2 (DynaKV)."""

import math

import numpy as np
from numpy.typing import NDArray

from penstock.methods.dynakv.cluster_statistics import lane_sums, padded

POWER_STEPS = 2
MOST_ITERATIONS = 20
TINY = 1e-150


def two_means(keys: NDArray[np.float64]) -> NDArray[np.bool_] | None:
    """Split points in two; neither part is empty.

    Begins with the half-spaces across the direction of largest spread (a few power iterations) and
    goes on by Lloyd's rule until nothing changes. Nothing is drawn: equal points, equal parts. The
    compiled kernel (`cluster_split.c`) adds in the same order.

    About the mean of all, the means of the two parts are `sum / size` and `-sum / rest`, one line
    through the origin: an iteration is one product that adds a part up, and one that compares.

    Args:
        keys: [points, dim]

    Returns:
        Which points are in the second part [points], or None where all points are equal.
    """
    points = padded(keys)
    points -= np.add.reduce(points, axis=0) / len(keys)
    direction = points[lane_sums(points * points).argmax()]
    for _ in range(POWER_STEPS):
        length = max(math.sqrt(_square(direction)), TINY)
        along = lane_sums(points * (direction / length))
        direction = np.add.reduce(points * along[:, None], axis=0)
    along = lane_sums(points * direction)
    second: NDArray[np.bool_] | None = along > 0.0
    assert second is not None
    if not 0 < np.count_nonzero(second) < len(second):
        second = _by_first_difference(keys)
        if second is None:
            return None
    for _ in range(MOST_ITERATIONS):
        size = int(np.count_nonzero(second))
        total = np.add.reduce(points[second], axis=0)
        along = lane_sums(points * total)
        between = 0.5 * _square(total) * (1.0 / size - 1.0 / (len(second) - size))
        moved = along > between
        count = np.count_nonzero(moved)
        # The mean of either part lies on its own side; only rounding can empty one.
        if count in (0, len(moved)) or not np.count_nonzero(moved != second):
            break
        second = moved
    return second


def _square(vector: NDArray[np.float64]) -> float:
    return float(lane_sums((vector * vector)[None])[0])


def _by_first_difference(keys: NDArray[np.float64]) -> NDArray[np.bool_] | None:
    """Points that differ by rounding alone: by the first component that differs at all."""
    different = np.flatnonzero((keys != keys[0]).any(axis=0))
    if not len(different):
        return None
    column = keys[:, different[0]]
    parts: NDArray[np.bool_] = column > column.min()
    return parts
