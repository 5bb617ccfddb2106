"""ProjectedKeysIndex: a few components of each head's keys, in a basis of each row's own."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.engine.key_index import KeyIndex

COPY_TOKENS = 4096
"""Tokens copied at a time when rows change places."""
_AT_ONCE = {True: 1 << 17, False: 1 << 22}
"""Components that are made float32 at a time for a score; on a CPU, or on a device that has a
launch to pay for each time."""


class ProjectedKeysIndex(KeyIndex):
    """Scores a token by q P (k P)^T, P being a few orthonormal columns per row and KV head.

    Query heads that share a KV head, and all KV heads of a row, add their raw logits. The sum
    over heads is one product of the token's codes, all heads side by side, with one vector.

    Codes are of keys less the sample's mean: q P (mean P)^T is the same for every token of a head,
    so that no ranking changes, and what is rounded to 16 bits is smaller. They are allocated by
    `fit`, when the runtime has given the prompt's queries back.

    Codes are kept in 16 bits; products and sums are float32. Sums of 16 bits are the same number
    for tokens whose logits are not (2,200 numbers for 32K tokens), and which of those is taken a
    device decides as it likes.
    """

    def __init__(
        self, shape: KVShape, *, batch: int, max_tokens: int, group_tokens: int, dims: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Remember sizes.

        Args:
            shape: of a row; one KV head in it for selection per head.
            max_tokens: whole groups.
            dims: components kept of each KV head's key, at most `shape.head_dim`.
        """
        assert 1 <= dims <= shape.head_dim, dims
        self._shape, self._batch, self._dims = shape, batch, dims
        self._max_tokens, self._group_tokens = max_tokens, group_tokens
        self._device = device
        self._basis: Tensor | None = None
        self._centre = self._codes = torch.empty(0)

    @staticmethod
    def _code_dtype(shape: KVShape) -> torch.dtype:
        return torch.bfloat16 if shape.dtype == torch.float32 else shape.dtype

    @classmethod
    def num_bytes(cls, shape: KVShape, *, batch: int, max_tokens: int, dims: int) -> int:
        """Bytes of one layer's codes, bases and centres, for the ledger."""
        width = shape.num_kv_heads * dims
        codes = max_tokens * width * cls._code_dtype(shape).itemsize
        return batch * (codes + shape.head_dim * width * shape.dtype.itemsize + 4 * width)

    @classmethod
    def scratch_bytes(
        cls, shape: KVShape, *, batch: int, max_tokens: int, dims: int, on_cpu: bool
    ) -> int:
        """Temporaries of one call of `score`, or of `fit` where that is more."""
        width = shape.num_kv_heads * dims
        part = min(max_tokens, _part_tokens(batch * width, on_cpu=on_cpu))
        score = 4 * batch * (2 * max_tokens + part * width)
        return max(score, 24 * batch * shape.num_kv_heads * shape.head_dim**2)

    # Basis ------------------------------------------------------------------------------------

    @property
    @override
    def ready(self) -> bool:
        """Whether there is a basis."""
        return self._basis is not None

    @abstractmethod
    def make_basis(self, sample: Tensor) -> Tensor:
        """Choose each head's columns.

        Args:
            sample: keys, float32. [rows, kv_heads, tokens, head_dim]

        Returns:
            float32, orthonormal columns. [rows, kv_heads, head_dim, dims]
        """

    @override
    def fit(self, sample: Tensor, positions: Tensor) -> None:
        """Positions do not matter."""
        by_head = sample.transpose(1, 2).float()
        basis = self.make_basis(by_head)
        centre = torch.matmul(by_head.mean(dim=2, keepdim=True), basis)
        self._use(basis.to(self._shape.dtype).contiguous(), centre.flatten(1).unsqueeze(1))

    refits: ClassVar[bool] = True

    @override
    def forget_fit(self) -> None:
        self._basis = None

    def _use(self, basis: Tensor, centre: Tensor) -> None:
        self._basis, self._centre = basis, centre
        if self._codes.numel() == 0:
            size = (self._batch, self._max_tokens, self._shape.num_kv_heads * self._dims)
            dtype = self._code_dtype(self._shape)
            self._codes = torch.zeros(size, dtype=dtype, device=self._device)

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, ProjectedKeysIndex)
        if other._basis is None:
            self._basis = None
            return
        self._use(other._basis[rows], other._centre[rows])
        for start in range(0, self._max_tokens, COPY_TOKENS):
            part = slice(start, start + COPY_TOKENS)
            self._codes[:, part] = other._codes[:, part][rows]

    # Keys and scores --------------------------------------------------------------------------

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        assert self._basis is not None, "fit() comes first"
        components = torch.matmul(keys.transpose(1, 2), self._basis)
        joint = components.transpose(1, 2).flatten(2)
        self._codes[:, first_token : first_token + keys.shape[1]] = joint.float() - self._centre

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """A group's score is its best token's."""
        assert self._basis is not None, "fit() comes first"
        shape, group_tokens = self._shape, self._group_tokens
        grouped = query.view(query.shape[0], shape.num_kv_heads, -1, shape.head_dim)
        together = grouped.float().sum(dim=2, keepdim=True)
        low = torch.matmul(together, self._basis.float()).flatten(1).unsqueeze(2)
        logits = self._products(low, num_units * group_tokens)
        if group_tokens > 1:
            logits = logits.view(len(logits), num_units, group_tokens).amax(dim=2)
        return logits

    def _products(self, low: Tensor, num_tokens: int) -> Tensor:
        """Codes times a vector of each row, [rows, width, 1]. float32 [rows, num_tokens]"""
        rows, width, _ = low.shape
        part = _part_tokens(rows * width, on_cpu=low.device.type == "cpu")
        wide = torch.empty(rows, min(part, num_tokens), width, device=low.device)
        logits = torch.empty(rows, num_tokens, 1, device=low.device)
        for start in range(0, num_tokens, part):
            codes = self._codes[:, start : min(start + part, num_tokens)]
            size = codes.shape[1]
            wide[:, :size] = codes
            logits[:, start : start + size] = torch.matmul(wide[:, :size], low)
        return logits.squeeze(2)


class PrincipalKeysIndex(ProjectedKeysIndex):
    """The first principal components of each head's post-rotary keys.

    Source: Loki (arXiv 2406.02542), sections 3 and 4: keys lie near a subspace of few dimensions,
    and products within it rank tokens.

    Differences: the original fits its bases offline on calibration text, one per head for all
    prompts; here each row is fitted to a sample of its own prompt.
    """

    @override
    def make_basis(self, sample: Tensor) -> Tensor:
        """Strongest eigenvectors of the covariance."""
        off = sample - sample.mean(dim=2, keepdim=True)
        return _eigenvectors(torch.matmul(off.transpose(2, 3), off))[..., : self._dims]


class SkewedKeysIndex(ProjectedKeysIndex):
    """Those columns of skewed keys where queries and keys are largest.

    Source: InfiniGen (Lee et al., OSDI 2024), sections 4.2 and 4.3: queries and keys are turned by
    the right singular vectors of the queries, which moves their weight into few columns without
    changing a product; of each head, the columns with the largest sum of magnitudes are kept.

    Differences: the original finds its rotation offline on calibration text; here the prompt's
    newest queries give it, per row, and a sample of its keys stands in for all of them (means
    instead of sums, since the two differ in number). Query heads that share a KV head share a
    rotation and columns (the original is for MHA). Without queries, keys give the rotation.
    """

    num_prompt_queries: ClassVar[int] = 64

    @property
    @override
    def wanted_queries(self) -> int:
        """None once there is a basis."""
        return 0 if self.ready else self.num_prompt_queries

    _seen: tuple[Tensor, Tensor] | None = None
    """Rotation, and mean magnitude of the queries' columns after it."""

    @override
    def see_queries(self, queries: Tensor) -> None:
        rows, kv_heads = queries.shape[0], self._shape.num_kv_heads
        by_head = queries.float().reshape(rows, kv_heads, -1, self._shape.head_dim)
        rotation = _eigenvectors(torch.matmul(by_head.transpose(2, 3), by_head))
        self._seen = rotation, torch.matmul(by_head, rotation).abs().mean(dim=2)

    @override
    def make_basis(self, sample: Tensor) -> Tensor:
        if self._seen is None:
            rotation = _eigenvectors(torch.matmul(sample.transpose(2, 3), sample))
            magnitude = torch.zeros_like(rotation[:, :, 0])
        else:
            (rotation, magnitude), self._seen = self._seen, None
        magnitude = magnitude + torch.matmul(sample, rotation).abs().mean(dim=2)
        columns = magnitude.topk(self._dims, dim=2).indices
        return rotation.gather(3, columns.unsqueeze(2).expand(-1, -1, rotation.shape[2], -1))


def _part_tokens(token_components: int, *, on_cpu: bool) -> int:
    return max(1, _AT_ONCE[on_cpu] // token_components)


def _eigenvectors(gram: Tensor) -> Tensor:
    """Eigenvectors of symmetric matrices as columns, strongest first. float32 [..., n, n]"""
    _, vectors = torch.linalg.eigh(gram.double())
    strongest_first: Tensor = vectors.flip(-1).float()
    return strongest_first
