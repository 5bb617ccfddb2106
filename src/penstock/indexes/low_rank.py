"""LowRankIndex: joint-head keys projected to a few dimensions (KVSwap 3.2, Eq. 1)."""

from typing import Literal

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.indexes.adapter import LayerAdapter, fit_layer
from penstock.indexes.base import KeyIndex

HeadReduction = Literal["sum", "softmax"]

# Half-width of the code range in standard deviations of a component: close to the optimum of a
# uniform quantiser on normal data for 4 bits, wide enough to clip nothing that matters for 8.
_CLIP = {8: 4.5, 4: 2.6}


class LowRankIndex(KeyIndex):
    """Scores tokens by q A (K A)^T and groups by their best token.

    Source: KVSwap, sections 3.2 and 3.3, Eq. 1. K is flattened over its KV heads and projected by
    one basis A; a query head is projected by the rows of A that belong to its KV head.

    Differences: components may be stored in 8 or 4 bits (steps of their standard deviation, folded
    into the query, so that scoring costs nothing more); the paper stores 16 bits.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        batch: int,
        max_groups: int,
        group_tokens: int,
        rank: int,
        bits: int,
        head_reduction: HeadReduction,
        scaling: float,
        adapter: LayerAdapter | None,
        device: torch.device,
    ) -> None:
        """Allocate the index.

        Args:
            rank: components per token, at most `shape.joint_dim`.
            bits: 16 (the model's dtype), 8 or 4 bits per component.
            head_reduction: "sum" adds raw logits over heads, which is one low-rank query per
                sequence; "softmax" normalises each head over all tokens before adding.
            scaling: factor on logits, for "softmax".
            adapter: basis to use; None to `fit` one first.
        """
        assert bits in (16, 8, 4), bits
        self._shape = shape
        self._group_tokens = group_tokens
        self._rank, self._bits = rank, bits
        self._head_reduction = head_reduction
        self._scaling = scaling
        self._device = device
        self._adapter: LayerAdapter | None = None
        width, dtype = self._storage(shape, rank, bits)
        self._codes = torch.zeros(
            batch, max_groups * group_tokens, width, dtype=dtype, device=device
        )
        self._ones = torch.ones(0, dtype=torch.bfloat16, device=device)
        if adapter is not None:
            self._use(adapter)

    @staticmethod
    def _storage(shape: KVShape, rank: int, bits: int) -> tuple[int, torch.dtype]:
        if bits == 16:
            return rank, torch.bfloat16 if shape.dtype == torch.float32 else shape.dtype
        return (rank, torch.int8) if bits == 8 else ((rank + 1) // 2, torch.uint8)

    @classmethod
    def num_bytes(cls, shape: KVShape, *, batch: int, tokens: int, rank: int, bits: int) -> int:
        """Bytes of one layer's codes, for the ledger."""
        width, dtype = cls._storage(shape, rank, bits)
        return batch * tokens * width * dtype.itemsize

    # Basis ------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether there is a basis."""
        return self._adapter is not None

    def fit(self, sample: Tensor) -> None:
        """Make the basis from a sample of the prompt's own keys (when no adapter is at hand).

        Differences: the paper fits offline on calibration text.
        """
        flat = sample.flatten(1).float()
        self._use(fit_layer(flat.T @ flat / len(flat), flat.mean(dim=0), self._rank))

    def _use(self, adapter: LayerAdapter) -> None:
        layer = adapter.truncated(self._rank)
        self._adapter = layer
        step = torch.ones_like(layer.std)
        if self._bits != 16:
            step = layer.std * _CLIP[self._bits] / (2 ** (self._bits - 1) - 0.5)
        dtype = self._shape.dtype
        self._encode_basis = (layer.basis / step).to(self._device, dtype)
        self._offset = (layer.mean / step).to(self._device)
        # [kv_heads, head_dim, rank], the step folded in: logits come out in the query's units.
        self._query_basis = (
            (layer.basis * step).view(self._shape.num_kv_heads, -1, layer.rank).to(self._device)
        )

    # Keys -------------------------------------------------------------------------------------

    def append(self, keys: Tensor, first_token: int) -> None:
        """See `KeyIndex.append`."""
        components = keys.flatten(2) @ self._encode_basis
        end = first_token + keys.shape[1]
        target = self._codes[:, first_token:end]
        if self._bits == 16:
            target.copy_(components)
            return
        centred = components.float() - self._offset
        if self._bits == 8:
            target.copy_(centred.round_().clamp_(-127, 127))
            return
        # Levels at half-integers: 16 of them, symmetric around the mean.
        codes = centred.floor_().clamp_(-8, 7).add_(8).to(torch.uint8)
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1), value=8)
        half = codes.shape[-1] // 2
        target.copy_(codes[..., :half] | (codes[..., half:] << 4))

    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        """See `KeyIndex.take_rows_from`."""
        assert isinstance(other, LowRankIndex)
        if other._adapter is not None:
            self._use(other._adapter)
        step = 4096
        for start in range(0, self._codes.shape[1], step):
            self._codes[:, start : start + step] = other._codes[:, start : start + step][rows]

    # Scores -----------------------------------------------------------------------------------

    def score(self, query: Tensor, num_units: int) -> Tensor:
        """See `KeyIndex.score`; ReduceMax over each group (KVSwap 3.3)."""
        shape = self._shape
        batch = query.shape[0]
        grouped = query.view(batch, shape.num_kv_heads, -1, shape.head_dim).float()
        tokens = num_units * self._group_tokens
        if self._head_reduction == "sum":
            joint = grouped.sum(dim=2).flatten(1)
            low_rank = (joint @ self._query_basis.flatten(0, 1)).unsqueeze(1)
            scores = self._logits(low_rank, tokens).squeeze(1)
        else:
            per_head = torch.einsum("bkgd,kdr->bkgr", grouped, self._query_basis).flatten(1, 2)
            logits = self._logits(per_head * self._scaling, tokens)
            scores = torch.softmax(logits.float(), dim=-1).sum(dim=1)
        return scores.view(batch, num_units, self._group_tokens).amax(dim=-1)

    def _logits(self, low_rank: Tensor, tokens: int) -> Tensor:
        """Products of low-rank queries [batch, heads, rank] with the codes of `tokens` tokens.

        Returns:
            [batch, heads, tokens]
        """
        codes = self._codes[:, :tokens]
        batch, heads, _ = low_rank.shape
        if self._bits == 8 and batch * heads == 1 and codes.device.type == "cpu":
            if len(self._ones) < tokens:
                self._ones = torch.ones(self._codes.shape[1], dtype=torch.bfloat16)
            products: Tensor = torch._weight_int8pack_mm(
                low_rank[0].to(torch.bfloat16), codes[0], self._ones[:tokens]
            )
            return products.unsqueeze(0)
        dtype = self._codes.dtype if self._bits == 16 else torch.bfloat16
        if self._bits == 4:
            low, high = (codes & 15).to(dtype), (codes >> 4).to(dtype)
            half = codes.shape[-1]
            query = low_rank.to(dtype)
            padded = torch.nn.functional.pad(query, (0, 2 * half - query.shape[-1]))
            first = torch.matmul(padded[..., :half], low.transpose(1, 2))
            return first + torch.matmul(padded[..., half:], high.transpose(1, 2))
        if batch == 1:
            return torch.nn.functional.linear(
                low_rank[0].to(dtype), codes[0].to(dtype)
            ).unsqueeze(0)
        return torch.matmul(low_rank.to(dtype), codes.to(dtype).transpose(1, 2))
