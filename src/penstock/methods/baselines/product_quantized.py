"""ProductQuantizedIndex: keys in one byte per part, centroids by k-means (PQCache)."""

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.engine.key_index import KeyIndex
from penstock.kernels.kmeans import chunk_elements, chunk_tokens, kmeans, kmeans_bytes, nearest
from penstock.methods.baselines.prompt_sample import PromptSample

ITERATIONS = 10


class ProductQuantizedIndex(KeyIndex):
    """Scores tokens by the products of the query with the centroids that stand for a key's parts.

    Source: PQCache (arXiv 2407.12820), section 3: a key is cut into `subvectors` parts, each part
    has 2^bits centroids from k-means on the prompt's keys, and a key is stored as the numbers of
    its nearest ones. A step multiplies the query with the centroids once; a token's score is then
    a sum of `subvectors` looked-up numbers. Keys of new tokens take existing centroids.

    Differences: k-means runs on evenly spaced keys of the prompt (`PromptSample`), not on all, and
    for a fixed number of iterations (the original adapts it to the time that prefill takes); query
    heads that share the KV head add their logits.

    One KV head a row. The index of a new sequence (first token 0) is made anew from its prompt.
    """

    looks_first: ClassVar[bool] = True

    def __init__(
        self, shape: KVShape, *, batch: int, max_units: int, group_tokens: int, subvectors: int,
        bits: int, device: torch.device, seed: int = 0,
    ) -> None:  # fmt: skip
        """Allocate codes and centroids.

        Args:
            subvectors: parts of a key, a divisor of head_dim.
            bits: at most 8; a code takes a byte whatever they are.
        """
        assert shape.num_kv_heads == 1, "one KV head a row"
        assert shape.head_dim % subvectors == 0
        assert 1 <= bits <= 8
        self._group_tokens = group_tokens
        self._max_tokens = max_units * group_tokens
        self._seed = seed
        self._chunk = chunk_tokens(max_units * group_tokens)
        self._elements = chunk_elements(batch * max_units * group_tokens)
        self._codes = torch.zeros(
            batch, subvectors, self._max_tokens, dtype=torch.uint8, device=device
        )
        self._centroids = torch.zeros(
            batch, subvectors, 1 << bits, shape.head_dim // subvectors, dtype=shape.dtype,
            device=device,
        )  # fmt: skip
        self._sample: PromptSample | None = None
        self._ready = False

    @staticmethod
    def num_bytes(
        shape: KVShape, *, batch: int, max_units: int, group_tokens: int, subvectors: int,
        bits: int,
    ) -> int:  # fmt: skip
        """Bytes of one layer's codes and centroids, for the ledger."""
        codes = subvectors * max_units * group_tokens
        return batch * (codes + (1 << bits) * shape.head_dim * shape.dtype.itemsize)

    @staticmethod
    def scratch_bytes(
        shape: KVShape, *, batch: int, max_units: int, group_tokens: int, subvectors: int,
        bits: int,
    ) -> int:  # fmt: skip
        """Temporaries, for the ledger: the sample and k-means, or those of one `score`."""
        tokens = max_units * group_tokens
        chunk = chunk_tokens(tokens)
        means = kmeans_bytes(
            batch * subvectors, 1 << bits, shape.head_dim // subvectors,
            chunk_elements(batch * tokens),
        )  # fmt: skip
        sample = PromptSample.num_bytes(batch, tokens, shape.head_dim, shape.dtype)
        fitting = means + max(sample, 8 * batch * subvectors * chunk)
        table = 4 * batch * (1 << bits) * (shape.head_dim + subvectors)
        scoring = table + batch * (12 * min(tokens, 4 * chunk) + 4 * tokens)
        return max(fitting, scoring)

    # Keys -------------------------------------------------------------------------------------

    @property
    @override
    def ready(self) -> bool:
        """Whether there are centroids, or a sample to make them from."""
        return self._ready

    @override
    def fit(self, sample: Tensor, positions: Tensor) -> None:
        """What `look` sees is a larger sample, so this one is not used."""
        rows, _, _, head_dim = sample.shape
        self._sample = PromptSample(rows, self._max_tokens, head_dim, self._centroids)
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
            self._make_centroids(self._sample)
            self._sample = None
        elif first_token == 0:
            self._ready = False
            return
        for start in range(0, keys.shape[1], self._chunk):
            parts = self._parts(keys[:, start : start + self._chunk, 0])
            first = first_token + start
            self._codes[:, :, first : first + parts.shape[2]] = nearest(
                parts, self._centroids, cosine=False, elements=self._elements
            )

    def _make_centroids(self, sample: PromptSample) -> None:
        parts, clusters = self._parts(sample.keys), self._centroids.shape[2]
        self._centroids.copy_(
            kmeans(
                parts,
                clusters,
                iterations=ITERATIONS,
                cosine=False,
                seed=self._seed,
                elements=self._elements,
            )
        )

    def _parts(self, keys: Tensor) -> Tensor:
        """[rows, tokens, head_dim] to [rows, subvectors, tokens, part], without a copy."""
        return keys.view(*keys.shape[:2], self._centroids.shape[1], -1).transpose(1, 2)

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, ProductQuantizedIndex)
        assert other._sample is None, "not between look() and append()"
        self._ready, self._sample = other._ready, None
        self._centroids.copy_(other._centroids[rows])
        for part in range(self._codes.shape[1]):
            self._codes[:, part] = other._codes[:, part][rows]

    # Scores -----------------------------------------------------------------------------------

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """A unit is as important as its best token."""
        rows, tokens = query.shape[0], num_units * self._group_tokens
        subvectors, part = self._centroids.shape[1], self._centroids.shape[3]
        joint = query.float().sum(dim=1).view(rows, subvectors, part, 1)
        table = torch.matmul(self._centroids.float(), joint).squeeze(-1)
        scores = table.new_zeros(rows, tokens)
        step = 4 * self._chunk
        for start in range(0, tokens, step):
            end = min(tokens, start + step)
            for i in range(subvectors):
                codes = self._codes[:, i, start:end].long()
                scores[:, start:end] += table[:, i].gather(1, codes)
        if self._group_tokens == 1:
            return scores
        return scores.view(rows, num_units, self._group_tokens).amax(dim=2)
