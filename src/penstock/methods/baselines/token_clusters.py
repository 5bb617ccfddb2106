"""TokenClustersIndex: keys in clusters by direction, ranked by their centroids (ClusterKV)."""

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.engine.key_index import KeyIndex
from penstock.kernels.kmeans import chunk_elements, chunk_tokens, kmeans, kmeans_bytes, nearest
from penstock.methods.baselines.prompt_sample import PromptSample

ITERATIONS = 10


class TokenClustersIndex(KeyIndex):
    """Ranks tokens by the product of the query with the centroid of their cluster.

    Source: ClusterKV (arXiv 2412.03213): keys are clustered by k-means under the
    cosine, a centroid is the mean of its keys, clusters are taken in descending order of q . mean
    until the budget is full, the last one in part. Tokens generated later are clustered among
    themselves, so many at a time ("local update" in DynaKV, section 2.3).

    Differences: k-means runs on evenly spaced keys of the prompt (`PromptSample`), and all keys
    then take the nearest centroid; until there are `recluster_tokens` new tokens they belong to
    the nearest existing cluster (the original attends to all of them); query heads that share the
    KV head add their logits.

    A score is minus the rank of the token's cluster, less up to a half by position, so that the
    best units are whole clusters and of the last one the earliest tokens. One KV head a row. The
    index of a new sequence (first token 0) is made anew from its prompt.
    """

    looks_first: ClassVar[bool] = True

    def __init__(
        self, shape: KVShape, *, batch: int, max_units: int, group_tokens: int,
        tokens_per_cluster: int, recluster_tokens: int, device: torch.device, seed: int = 0,
    ) -> None:  # fmt: skip
        """Allocate centroids, assignments and the keys of tokens to be clustered.

        Args:
            tokens_per_cluster: of a cluster on average.
            recluster_tokens: new tokens that are clustered together, at least
                `tokens_per_cluster`; 0: they stay in the nearest existing cluster.
        """
        assert shape.num_kv_heads == 1, "one KV head a row"
        assert recluster_tokens == 0 or recluster_tokens >= tokens_per_cluster
        self._group_tokens = group_tokens
        self._tokens_per_cluster = tokens_per_cluster
        self._recluster_tokens = recluster_tokens
        self._seed = seed
        self._chunk = chunk_tokens(max_units * group_tokens)
        self._elements = chunk_elements(batch * max_units * group_tokens)
        tokens = max_units * group_tokens
        clusters, dtype = self._sizes(tokens, tokens_per_cluster)
        size = (batch, clusters, shape.head_dim)
        self._centroids = torch.zeros(size, dtype=shape.dtype, device=device)
        self._cluster_of = torch.zeros(batch, tokens, dtype=dtype, device=device)
        size = (batch, recluster_tokens, shape.head_dim)
        self._new_keys = torch.zeros(size, dtype=shape.dtype, device=device)
        self._sample: PromptSample | None = None
        self._ready = False
        self._used = 0
        self._prompt_end = 0
        self._first_new, self._num_new = 0, 0
        self._runs: list[tuple[int, int]] = []
        """Of new tokens that were clustered together: the first, and the clusters before them."""

    @staticmethod
    def _sizes(tokens: int, tokens_per_cluster: int) -> tuple[int, torch.dtype]:
        """Most clusters, and the dtype of a cluster's number."""
        clusters = tokens // tokens_per_cluster + 1
        for dtype in (torch.uint8, torch.int16):
            if clusters - 1 <= torch.iinfo(dtype).max:
                return clusters, dtype
        return clusters, torch.int32

    @classmethod
    def num_bytes(
        cls, shape: KVShape, *, batch: int, max_units: int, group_tokens: int,
        tokens_per_cluster: int, recluster_tokens: int,
    ) -> int:  # fmt: skip
        """Bytes of one layer's centroids, assignments and new keys, for the ledger."""
        tokens = max_units * group_tokens
        clusters, dtype = cls._sizes(tokens, tokens_per_cluster)
        keys = (clusters + recluster_tokens) * shape.head_dim * shape.dtype.itemsize
        return batch * (keys + tokens * dtype.itemsize)

    @classmethod
    def scratch_bytes(
        cls, shape: KVShape, *, batch: int, max_units: int, group_tokens: int,
        tokens_per_cluster: int, recluster_tokens: int,
    ) -> int:  # fmt: skip
        """Temporaries, for the ledger: the sample and k-means, or those of one `score`."""
        tokens = max_units * group_tokens
        chunk = max(chunk_tokens(tokens), recluster_tokens)
        clusters, _ = cls._sizes(tokens, tokens_per_cluster)
        sample = PromptSample.num_bytes(batch, tokens, shape.head_dim, shape.dtype)
        means = kmeans_bytes(batch, clusters, shape.head_dim, chunk_elements(batch * tokens))
        fitting = means + max(sample, 8 * batch * chunk)
        ranking = 4 * batch * clusters * (shape.head_dim + 8)
        return max(
            fitting, ranking + batch * (12 * min(tokens, 4 * chunk) + 4 * tokens) + 4 * tokens
        )

    # Keys -------------------------------------------------------------------------------------

    @property
    @override
    def ready(self) -> bool:
        """Whether there are clusters, or a sample to make them from."""
        return self._ready

    @override
    def fit(self, sample: Tensor, positions: Tensor) -> None:
        """What `look` sees is a larger sample, so this one is not used."""
        rows, _, _, head_dim = sample.shape
        self._sample = PromptSample(rows, self._cluster_of.shape[1], head_dim, self._centroids)
        self._ready = True

    @override
    def forget_fit(self) -> None:
        self._ready, self._sample = False, None

    @override
    def look(self, keys: Tensor, first_token: int) -> None:
        assert self._sample is not None, "fit() comes first"
        self._sample.take(keys[:, :, 0], first_token)

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        if self._sample is not None:
            self._cluster_prompt(self._sample)
            self._sample = None
        elif first_token == 0:
            self._ready = False
            return
        while self._runs and self._runs[-1][0] >= first_token:  # the cache was cropped
            _, self._used = self._runs.pop()
        for start in range(0, keys.shape[1], self._chunk):
            part = keys[:, start : start + self._chunk, 0]
            first = first_token + start
            self._cluster_of[:, first : first + part.shape[1]] = nearest(
                part, self._centroids[:, : self._used], cosine=True, elements=self._elements
            )
        if self._recluster_tokens:
            skipped = max(0, self._prompt_end - first_token)
            self._take_new(keys[:, skipped:, 0], first_token + skipped)

    def _cluster_prompt(self, sample: PromptSample) -> None:
        clusters = max(1, sample.end // self._tokens_per_cluster)
        self._centroids[:, :clusters] = kmeans(
            sample.keys,
            clusters,
            iterations=ITERATIONS,
            cosine=True,
            seed=self._seed,
            elements=self._elements,
        )
        self._used = clusters
        self._prompt_end = self._first_new = sample.end
        self._num_new = 0
        self._runs = []

    def _take_new(self, keys: Tensor, first_token: int) -> None:
        """Remember keys of generated tokens, and cluster them when there are enough.

        Args:
            keys: [rows, tokens, head_dim]
        """
        kept = first_token - self._first_new
        if 0 <= kept <= self._num_new:
            self._num_new = kept
        else:
            # The cache was cropped to before the keys that wait.
            self._first_new, self._num_new = first_token, 0
        done = 0
        while done < keys.shape[1]:
            size = min(self._recluster_tokens - self._num_new, keys.shape[1] - done)
            end = self._num_new + size
            self._new_keys[:, self._num_new : end] = keys[:, done : done + size]
            self._num_new, done = end, done + size
            if end == self._recluster_tokens:
                self._cluster_new()

    def _cluster_new(self) -> None:
        clusters = self._recluster_tokens // self._tokens_per_cluster
        end = self._used + clusters
        # After crops into such runs there may be no room: then they stay where they are.
        if end <= self._centroids.shape[1]:
            centroids = kmeans(
                self._new_keys,
                clusters,
                iterations=ITERATIONS,
                cosine=True,
                seed=self._seed,
                elements=self._elements,
            )
            self._centroids[:, self._used : end] = centroids
            ids = nearest(self._new_keys, centroids, cosine=True, elements=self._elements).add_(
                self._used
            )
            first = self._first_new
            self._cluster_of[:, first : first + self._recluster_tokens] = ids
            self._runs.append((first, self._used))
            self._used = end
        self._first_new += self._recluster_tokens
        self._num_new = 0

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, TokenClustersIndex)
        assert other._sample is None, "not between look() and append()"
        self._ready, self._sample = other._ready, None
        self._used, self._prompt_end = other._used, other._prompt_end
        self._first_new, self._num_new = other._first_new, other._num_new
        self._runs = list(other._runs)
        self._centroids.copy_(other._centroids[rows])
        self._cluster_of.copy_(other._cluster_of[rows])
        self._new_keys.copy_(other._new_keys[rows])

    # Scores -----------------------------------------------------------------------------------

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """A unit is as important as its best token."""
        rows, tokens = query.shape[0], num_units * self._group_tokens
        joint = query.float().sum(dim=1).unsqueeze(-1)
        logits = torch.matmul(self._centroids[:, : self._used].float(), joint).squeeze(-1)
        order = logits.argsort(dim=1, descending=True, stable=True)
        places = torch.arange(self._used, dtype=torch.float32, device=logits.device)
        minus_rank = torch.empty_like(logits).scatter_(1, order, -places.expand(rows, -1))
        scores = logits.new_empty(rows, tokens)
        step = 4 * self._chunk
        for start in range(0, tokens, step):
            end = min(tokens, start + step)
            scores[:, start:end] = minus_rank.gather(1, self._cluster_of[:, start:end].long())
        scores -= torch.arange(tokens, dtype=torch.float32, device=scores.device) * (0.5 / tokens)
        if self._group_tokens == 1:
            return scores
        return scores.view(rows, num_units, self._group_tokens).amax(dim=2)
