"""shared_ranks(): components of a low-rank index, divided among the layers by what each needs.

KVSwap (section 3.2) gives every layer the same rank. Layers differ: where a head follows a copy
word by word it needs more components than a budget has for all, and others do with a quarter of it
(docs/methods/kvswap.md, measured). The sum over the layers, and with it the bytes, stays the same.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

UNIT = 8
"""Components that a layer's rank grows by."""
UNSEEN = 0.3
"""Nats that any layer is held to cost beside what was measured, halved by every `UNIT` components:
layers make up for one another, so that one with few does no harm alone and several do."""


def shared_ranks(costs: Sequence[Sequence[float]], most: int) -> list[tuple[int, ...]]:
    """Ranks of all layers for every mean from 1 to `most`, with the least sum of costs.

    Args:
        costs: of each layer with `UNIT`, 2 `UNIT`, ... components and all others with everything,
            in nats a token. [layers, most // UNIT]
        most: components that each layer has.

    Returns:
        For each mean, the rank of each layer; they add up to that many times the layers. Below
        `UNIT` all have the same.
    """
    layers, units = len(costs), most // UNIT
    measured = np.asarray(costs, dtype=np.float64).reshape(layers, units)
    takings = _best_takings(measured + UNSEEN * 0.5 ** np.arange(1, units + 1))
    out = []
    for mean in range(1, most + 1):
        total = min(mean * layers // UNIT, layers * units)
        if mean < UNIT:
            out.append((mean,) * layers)
            continue
        ranks = [UNIT * taken for taken in _walk_back(takings, total)]
        left = mean * layers - sum(ranks)
        for i, rank in enumerate(ranks):
            more = min(left, most - rank)
            ranks[i], left = rank + more, left - more
        out.append(tuple(ranks))
    return out


def _best_takings(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Units of layer i when the layers up to i share j units, by dynamic programming.

    Args:
        costs: of each layer with 1, 2, ... units. [layers, units]

    Returns:
        [layers, layers * units + 1]; 0 where j units cannot be shared so.
    """
    layers, units = costs.shape
    best = np.full(layers * units + 1, np.inf)
    best[0] = 0.0
    takings = np.zeros((layers, len(best)), dtype=np.int64)
    for i, cost in enumerate(costs):
        after = np.full_like(best, np.inf)
        for taken in range(1, units + 1):
            with_it = best[: len(best) - taken] + cost[taken - 1]
            better = with_it < after[taken:]
            after[taken:][better] = with_it[better]
            takings[i, taken:][better] = taken
        best = after
    return takings


def _walk_back(takings: NDArray[np.int64], total: int) -> list[int]:
    """The units of each layer that `_best_takings` found best for `total`."""
    out = []
    for row in takings[::-1]:
        out.append(int(row[total]))
        total -= out[-1]
    return out[::-1]
