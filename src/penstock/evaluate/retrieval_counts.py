"""RetrievalWatch: at which steps each layer retrieved, counted while a batch is answered."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.cache_adapter import TieredCache

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Segments are counted by length: up to each of these and longer than the one before, then all
longer ones."""

Counts = dict[str, list[Any]]
"""By layer: "steps", "retrievals", "segments" and "segment_tokens". By neighbouring layers: the
steps at which both and at which either had a boundary, "both" and "either". All layers together:
"lengths", the segments by `LENGTHS`. All are whole numbers, but for "retrievals": a step counts by
the share of its heads that retrieve."""


class RetrievalWatch:
    """Observes the layers of one cache whose index says when it retrieves (LouisKV)."""

    def __init__(self, cache: TieredCache) -> None:
        """Begin to observe; the cache must hold tokens, or there is nothing to observe."""
        self._steps: list[list[tuple[NDArray[np.bool_], NDArray[np.float64]]]] = []
        self._positions: list[int] = []
        for layer in cache.tiers.layers:
            index: Any = getattr(layer, "index", None)
            if not hasattr(index, "observer"):
                continue
            steps: list[tuple[NDArray[np.bool_], NDArray[np.float64]]] = []

            def take(
                position: int, boundary: NDArray[np.bool_], retrieves: NDArray[np.float64],
                steps: list[Any] = steps,
            ) -> None:  # fmt: skip
                steps.append((boundary.copy(), retrieves.copy()))
                if steps is self._steps[0]:
                    self._positions.append(position)

            index.observer = take
            self._steps.append(steps)

    def counts(self, steps: Sequence[int], first: int) -> Counts | None:
        """What was seen, or None if no layer told anything.

        Steps that attend to everything, as those of a short past do, tell nothing.

        Args:
            steps: decode steps of each sequence, after which its answer had ended. [sequences]
            first: position of the first decode step's token.
        """
        if not self._steps or not self._steps[0]:
            return None
        # float64 [layers, 2, steps, sequences]
        seen = np.array([np.swapaxes(np.array(layer), 0, 1) for layer in self._steps])
        lived = (np.array(self._positions) - first)[:, None] < np.asarray(steps)
        boundary, retrieves = (seen[:, 0] > 0) & lived, seen[:, 1] * lived
        lengths = [_segment_lengths(layer, lived.sum(axis=0)) for layer in boundary]
        bins = np.zeros(len(LENGTHS) + 1, dtype=np.int64)
        for found in lengths:
            np.add.at(bins, np.searchsorted(LENGTHS, found), 1)
        pairs = list(pairwise(boundary))
        return {
            "steps": [int(lived.sum())] * len(seen),
            "retrievals": retrieves.sum(axis=(1, 2)).tolist(),
            "segments": [len(found) for found in lengths],
            "segment_tokens": [sum(found) for found in lengths],
            "both": [int((a & b).sum()) for a, b in pairs],
            "either": [int((a | b).sum()) for a, b in pairs],
            "lengths": bins.tolist(),
        }


def _segment_lengths(boundary: NDArray[np.bool_], ends: NDArray[np.int64]) -> list[int]:
    """Steps from each boundary to the next one of its sequence, or to the sequence's end.

    Args:
        boundary: [steps, sequences]
        ends: steps of each sequence. [sequences]
    """
    out: list[int] = []
    for column, end in zip(boundary.T, ends.tolist(), strict=True):
        out += np.diff([*column.nonzero()[0].tolist(), end]).tolist()
    return out


def add_counts(first: Counts | None, second: Counts | None) -> Counts | None:
    """Both together."""
    if first is None or second is None:
        return first or second
    return {
        name: [a + b for a, b in zip(values, second[name], strict=True)]
        for name, values in first.items()
    }


def retrieving_share(counts: Counts | None) -> float | None:
    """Steps that retrieved, as a share of all steps of all layers."""
    if counts is None or not sum(counts["steps"]):
        return None
    return sum(counts["retrievals"]) / sum(counts["steps"])
