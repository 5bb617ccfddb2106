"""co_retrievals() and pool_order(): clusters retrieved together lie side by side (DynaKV).

Plain functions on the clusters of one row (KV head): `retrieved` → `co_retrievals` →
`pool_order`.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EMPTY = -1
"""In an order: a place that stays free."""
_FEWEST_PAIRS = 1024
"""Looked at before others are thrown out."""


def retrieved(
    queries: Tensor, centroids: Tensor, sizes: Tensor, budget_tokens: int, scaling: float
) -> Tensor:
    """The clusters that each query would take: by falling score until the budget is reached.

    Scores are softmax over clusters per query head, mean over the heads of the row, as the engine
    ranks clusters (`kernels.unit_selection.unit_scores`). A cluster that begins below the budget is
    taken, in the engine perhaps in part. Empty clusters are not.

    Args:
        queries: post-RoPE, of prompt tokens. [samples, heads of the row, head_dim]
        centroids: [clusters, head_dim]
        sizes: tokens of each. int [clusters]
        scaling: of the logits.

    Returns:
        bool [samples, clusters]
    """
    logits = queries.float() @ centroids.float().T * scaling
    logits = logits.masked_fill(sizes == 0, float("-inf"))
    order = logits.softmax(dim=-1).mean(dim=1).argsort(dim=-1, descending=True, stable=True)
    taken = sizes[order]
    wanted = (taken.cumsum(dim=-1) - taken < budget_tokens) & (taken > 0)
    return torch.zeros_like(wanted).scatter_(1, order, wanted)


def co_retrievals(taken: Tensor) -> NDArray[np.int64]:
    """How often each two clusters were retrieved by one query: f of Eq. 8, its diagonal zero.

    Source: DynaKV, section 5.1 (adjacency matrix, once before decoding).

    Differences: f(C_i, C_i) is left at 0: it says nothing of neighbours.

    Args:
        taken: bool [samples, clusters]

    Returns:
        int64 [clusters, clusters], symmetric; add those of several calls.
    """
    counts = (taken.T.float() @ taken.float()).cpu().numpy().round().astype(np.int64)
    np.fill_diagonal(counts, 0)
    return counts


def pool_order(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """An order for dual-head pools, whose places are filled two by two, with EMPTY in it.

    In a pool with room to grow the two clusters do not touch; the upper one of a pool and the
    lower one of the next do. So the strongest pairs are matched first (greedily), and matched
    clusters take places 2i + 1 and 2i + 2; then the pairs are chained greedily, so that
    the clusters of one pool are correlated too, which `gap_bytes` of a `ClusterFile` makes use of
    and which counts when a pool is nearly full.

    Source: DynaKV, section 5.2 ("a dedicated memory pool for each pair of co-retrieved clusters").

    Differences: the strongest link is across the border of two pools, not inside one.

    Args:
        counts: symmetric, not negative. [clusters, clusters]

    Returns:
        int64 [places]: each cluster once; at place 0 the one that has no match, or EMPTY.
    """
    number = len(counts)
    edges = _strongest_first(counts)
    chains = _Chains(number)
    chains.join_all(edges, most_links=1)
    alone = np.flatnonzero(chains.links == 0).tolist()
    for i, j in zip(alone[1::2], alone[2::2], strict=False):  # never retrieved with a free one
        chains.join(i, j)
    if alone and len(alone) % 2 == 0:
        chains.join(alone[0], alone[-1])
        first = EMPTY
    else:
        first = alone[0] if alone else EMPTY
    chains.join_all(edges[(edges != first).all(axis=1)])
    rest = chains.order(c for c in range(number) if c != first)
    return np.concatenate([np.array([first], dtype=np.int64), rest])


def _strongest_first(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs i < j that were retrieved together, the most frequent first. [pairs, 2]"""
    i, j = np.triu(counts, 1).nonzero()
    by_count = np.argsort(-counts[i, j], kind="stable")
    return np.stack([i[by_count], j[by_count]], axis=1)


class _Chains:
    """Clusters in chains, joined end to end."""

    def __init__(self, number: int) -> None:
        self.links = np.zeros(number, dtype=np.int64)
        """How many neighbours each has."""
        self._links: list[list[int]] = [[] for _ in range(number)]
        self._other_end = list(range(number))  # right for ends of chains

    def join_all(self, pairs: NDArray[np.int64], most_links: int = 2) -> None:
        """Link pairs, one after another, where both have fewer links than `most_links`.

        Pairs of which one has no room any more are thrown out now and then, all at once: of
        millions only thousands are looked at.

        Args:
            pairs: [pairs, 2]
        """
        while len(pairs):
            some = max(_FEWEST_PAIRS, len(pairs) // 16)
            for i, j in pairs[:some].tolist():
                if len(self._links[i]) < most_links and len(self._links[j]) < most_links:
                    self.join(i, j)
            pairs = pairs[some:]
            pairs = pairs[(self.links[pairs] < most_links).all(axis=1)]

    def join(self, i: int, j: int) -> None:
        """Link two clusters where both are ends, and not of one chain."""
        links, ends = self._links, self._other_end
        if len(links[i]) == 2 or len(links[j]) == 2 or ends[i] == j:
            return
        links[i].append(j)
        links[j].append(i)
        self.links[[i, j]] += 1
        first, last = ends[i], ends[j]
        ends[first], ends[last] = last, first

    def order(self, clusters: Iterable[int]) -> NDArray[np.int64]:
        """Chain after chain, each from its end that comes first in `clusters` to the other."""
        found: list[int] = []
        seen: set[int] = set()
        for start in clusters:
            if start in seen or len(self._links[start]) == 2:
                continue
            at: int | None = start
            while at is not None:
                found.append(at)
                seen.add(at)
                at = next((other for other in self._links[at] if other not in seen), None)
        return np.array(found, dtype=np.int64)
