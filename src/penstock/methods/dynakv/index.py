"""FollowedClusters: ranks the clusters that follow what is decoded, for retrieval (DynaKV)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.engine.key_index import KeyIndex
from penstock.kernels.cluster_selection import Owners, cluster_counts, cluster_tokens
from penstock.methods.dynakv.adaptive_clusters import AdaptiveClusters, UpdateRule

PROMPT_QUERIES = 32
"""Newest queries of the prompt from which co-retrieval is counted."""
SPARE_CLUSTERS = 16
"""Clusters of a row beside three for every two times `tokens_per_cluster` tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSizes:
    """How large one layer's clusters and their tables are, and how they follow."""

    tokens_per_cluster: int
    update: UpdateRule
    buffer_entries: int
    recluster_tokens: int
    threshold_quantile: float
    threshold_factor: float
    on_flash: bool = False
    """Whether the representatives are in memory that layers share, while a layer needs them."""

    def capacity(self, max_tokens: int) -> int:
        """Clusters of a row: splits make them smaller than those of the prompt."""
        if self.tokens_per_cluster == 1:
            return max_tokens
        return 3 * max_tokens // (2 * self.tokens_per_cluster) + SPARE_CLUSTERS


class FollowedClusters(KeyIndex):
    """Clusters of all tokens from `base` on, ranked by their centroids; one KV head a row.

    Source: DynaKV, sections 2.1 and 4 (clusters are retrieved by query and representative, and
    follow the output). The layer feeds it: `begin_fit`, `fit_row` and `end_fit` for the prompt,
    `clusters` itself for what is decoded, because a split needs the entries.

    Differences: clusters are ranked by the softmax over clusters per query head and its mean over
    the heads of the row (the paper does not say how the heads of a group agree). Whole clusters are
    taken as long as they fit the budget of tokens; the first that does not is taken in part, so
    that the budget is met exactly. Such a one does not count as retrieved for a split.
    """

    num_prompt_queries: ClassVar[int] = PROMPT_QUERIES

    def __init__(
        self, shape: KVShape, sizes: ClusterSizes, *, batch: int, max_tokens: int, scaling: float,
        seed: int = 0, centroids: NDArray[np.float32] | None = None,
    ) -> None:  # fmt: skip
        """Allocate; nothing grows later.

        Args:
            shape: of a row.
            batch: rows.
            centroids: memory for the representatives with `sizes.on_flash`; it holds these whenever
                something is selected or taken in. [batch, capacity, head_dim]
        """
        assert shape.num_kv_heads == 1, "one KV head a row"
        self.sizes, self.scaling = sizes, scaling
        self.clusters = AdaptiveClusters(
            rows=batch, dim=shape.head_dim, max_tokens=max_tokens,
            max_clusters=sizes.capacity(max_tokens),
            tokens_per_cluster=sizes.tokens_per_cluster, buffer_entries=sizes.buffer_entries,
            update=sizes.update, recluster_tokens=sizes.recluster_tokens,
            threshold_quantile=sizes.threshold_quantile, threshold_factor=sizes.threshold_factor,
            seed=seed, centroids=centroids,
        )  # fmt: skip
        self.base = 0
        """Cache position of the first token that is in a cluster."""
        self.prompt_queries: Tensor | None = None
        """[rows, heads of a row, at most `num_prompt_queries`, head_dim]"""
        self.whole = np.zeros((batch, sizes.capacity(max_tokens)), dtype=np.bool_)
        """Clusters that the newest selection has all of. [rows, most clusters]"""
        self.labels = np.zeros((batch, 0), dtype=np.int64)
        """Where the tokens of the newest `append` went: see `AdaptiveClusters.append`.
        [rows, tokens]"""
        self._ready = False

    @staticmethod
    def num_bytes(shape: KVShape, sizes: ClusterSizes, *, batch: int, max_tokens: int) -> int:
        """Bytes of one layer's index, for the ledger; without what layers share."""
        queries = batch * shape.num_query_heads * PROMPT_QUERIES * shape.head_dim
        return queries * shape.dtype.itemsize + AdaptiveClusters.num_bytes(
            rows=batch, dim=shape.head_dim, max_tokens=max_tokens,
            max_clusters=sizes.capacity(max_tokens), update=sizes.update,
            recluster_tokens=sizes.recluster_tokens, centroids=not sizes.on_flash,
        )  # fmt: skip

    @staticmethod
    def scratch_bytes(shape: KVShape, sizes: ClusterSizes, *, batch: int, max_tokens: int) -> int:
        """Temporaries of one selection, for the ledger."""
        capacity = sizes.capacity(max_tokens)
        by_cluster = batch * capacity * (8 * shape.num_query_heads + 64)
        return by_cluster + (8 * batch + 24) * max_tokens

    # The prompt -------------------------------------------------------------------------------

    @property
    @override
    def ready(self) -> bool:
        return self._ready

    @override
    def see_queries(self, queries: Tensor) -> None:
        self.prompt_queries = queries

    def forget(self) -> None:
        """Begin anew: everything is clustered when the next step wants it."""
        self._ready = False
        self.whole.fill(False)
        self.clusters.reset()

    def begin_fit(self, base: int, tokens: int) -> None:
        """A prompt's keys come next, row by row: those from position `base` on."""
        self.base = base
        self.clusters.begin_fit(tokens)

    def fit_row(self, row: int, keys: Tensor) -> None:
        """Cluster one row's keys. [tokens, head_dim]"""
        self.clusters.fit_row(row, keys)

    def end_fit(self) -> None:
        """All rows are clustered."""
        self.clusters.end_fit()
        self.prompt_queries = None
        self._ready = True

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        """Splits are the layer's to ask for."""
        assert first_token - self.base == self.clusters.length, "a token is missing"
        self.labels = self.clusters.append(keys[:, :, 0])

    # Retrieval --------------------------------------------------------------------------------

    def retrieve(
        self, query: Tensor, first_unit: NDArray[np.int64], end_unit: int, wanted: int
    ) -> Selection:
        """Tokens of the clusters that rank highest, exactly `wanted` where there are so many.

        Args:
            query: the true query. [rows, heads of a row, head_dim]
            first_unit, end_unit, wanted: see `SelectionPolicy.select`.
        """
        available = end_unit - first_unit
        if (available <= wanted).all():
            self.whole[:, : self.clusters.num_clusters] = True
            ids = np.arange(first_unit.min(), end_unit)
            ids = np.broadcast_to(ids, (len(first_unit), len(ids))).copy()
            return Selection(ids, ids >= first_unit[:, None])
        owners, first, end = self._raw_owners, first_unit - self.base, end_unit - self.base
        sizes = cluster_counts(owners, first, end, self.clusters.num_clusters)
        rank = np.argsort(-self._scores(query, sizes), axis=1)
        ids, valid, whole = cluster_tokens(owners, first, end, rank, sizes, self.base, wanted)
        self.whole.fill(False)
        self.whole[:, : whole.shape[1]] = whole
        return Selection(ids) if valid.all() else Selection(ids, valid)

    def _scores(self, query: Tensor, sizes: NDArray[np.int64]) -> NDArray[np.float32]:
        """Softmax over clusters per query head, mean over the row's heads; minus one where a
        cluster has nothing to offer. As `kernels.unit_selection.unit_scores`, in a few calls."""
        asked = query.detach().float().cpu().numpy() * np.float32(self.scaling)
        centroids = self.clusters.statistics.centroids[:, : sizes.shape[1]]
        logits: NDArray[np.float32] = asked @ centroids.transpose(0, 2, 1)
        empty = sizes == 0
        logits.transpose(0, 2, 1)[empty] = -np.inf
        logits -= np.maximum(logits.max(axis=2, keepdims=True), np.finfo(np.float32).min)
        np.exp(logits, out=logits)
        logits /= logits.sum(axis=2, keepdims=True) + np.finfo(np.float32).tiny
        scores: NDArray[np.float32] = logits.mean(axis=1)
        scores[empty] = -1.0
        return scores

    @property
    def _raw_owners(self) -> Owners:
        """Of all tokens from `base` on, and room for more. [rows, max_tokens]"""
        return self.clusters.entries.cluster_of

    def owners(self) -> NDArray[np.int32]:
        """The cluster of each token from `base` on, as a member or waiting. [rows, tokens]"""
        known = self.clusters.entries.cluster_of[:, : self.clusters.length]
        return np.maximum(known, ~known).astype(np.int32)

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """A token is as important as its cluster."""
        sizes = self.clusters.entry_counts().astype(np.int64)
        scores = torch.from_numpy(self._scores(query, sizes))
        out = scores.new_full((len(scores), num_units), -1.0)
        owners = self.owners()[:, : num_units - self.base].astype(np.int64)
        out[:, self.base :] = scores.gather(1, torch.from_numpy(owners))
        return out.to(query.device)

    @property
    def score_is_replaced(self) -> bool:
        """Whether another score lies over this one (selection streams)."""
        return "score" in vars(self)

    # Changes of shape -------------------------------------------------------------------------

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, FollowedClusters)
        if other.sizes != self.sizes:  # another batch has left less memory for them
            self.forget()
            return
        at = rows.cpu().numpy()
        self._ready, self.base = other._ready, other.base
        self.whole = other.whole[at].copy()
        if other._ready:
            self.clusters.take_rows_from(other.clusters, rows)
        seen = other.prompt_queries
        self.prompt_queries = None if seen is None else seen[rows]
