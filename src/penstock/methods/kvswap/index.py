"""LowRankIndex: joint-head keys projected to a few dimensions (KVSwap 3.2, Eq. 1)."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LayerAdapter, basis_fault, fit_layer
from penstock.engine.key_index import KeyIndex
from penstock.kernels.device.group_shares import group_shares
from penstock.kernels.group_products import group_products
from penstock.kernels.group_scores import (
    compiled_scratch_bytes,
    group_scores,
    hide_before,
    is_compiled,
    sum_of_softmaxes,
)
from penstock.kernels.group_selection import GroupSelection
from penstock.kernels.low_rank import project_keys, project_queries, store_codes

HeadReduction = Literal["sum", "softmax"]

BLOCK_GROUPS = 256
"""Groups of one block of codes; scores are computed by whole blocks."""
CHUNK_TOKENS = 32_768
"""Tokens scored at a time unless said otherwise; bounds the scratch memory of `score`."""


class LowRankIndex(KeyIndex):
    """Scores tokens by q A (K A)^T per head and groups by their best token.

    Source: KVSwap, sections 3.2 and 3.3, Eq. 1. K is flattened over its KV heads and projected by
    one basis A; a query head is projected by the rows of A that belong to its KV head.

    Differences, all measured (docs/methods/kvswap.md): each head's scores go through a softmax
    before they are added, because raw logits let the loudest head decide (the paper does not say;
    its artifact adds raw logits: `head_reduction="sum"`); for that, ReduceMax over a group comes
    before the sum over heads instead of after it, which makes the softmax `group_tokens` times
    smaller; components may be stored in 8 or 4 bits (the paper stores 16).

    Codes of a block lie as [group_tokens, BLOCK_GROUPS, width]: the first tokens of its groups,
    then the second ones, ..., so that the maximum over a group is over whole planes.
    """

    _basis: Tensor
    _step: Tensor
    _per_step: Tensor
    _scaled_step: Tensor

    def __init__(
        self,
        shape: KVShape,
        *,
        batch: int,
        max_units: int,
        group_tokens: int,
        rank: int,
        bits: int,
        head_reduction: HeadReduction,
        scaling: float,
        adapter: LayerAdapter | None,
        device: torch.device,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """Allocate the index.

        Args:
            rank: components per token, at most `shape.joint_dim`.
            bits: 16 (the model's dtype), 8 or 4 bits per component.
            head_reduction: "softmax" per head before the sum over heads, or "sum" of raw logits.
            scaling: factor on logits, for "softmax".
            adapter: basis to use; None to `fit` one first.
            chunk_tokens: tokens scored at a time.
        """
        assert bits in (16, 8, 4), bits
        self._shape = shape
        self._group_tokens = group_tokens
        self._rank, self._bits = rank, bits
        self._head_reduction = head_reduction
        self._scaling = scaling
        self._device = device
        self._chunk_blocks = max(1, chunk_tokens // (BLOCK_GROUPS * group_tokens))
        self._ready = self._fitted = False
        self._selection: GroupSelection | None = None
        self._start: Tensor | None = None
        """First unit of each row, where one has padding before it. int64 [rows]"""
        width, dtype = self._storage(shape, rank, bits)
        blocks = -(-max_units // BLOCK_GROUPS)
        self._codes = torch.zeros(
            batch, blocks, group_tokens, BLOCK_GROUPS, width, dtype=dtype, device=device
        )
        if adapter is not None:
            self._use(adapter)

    @staticmethod
    def _storage(shape: KVShape, rank: int, bits: int) -> tuple[int, torch.dtype]:
        if bits == 16:
            return rank, torch.bfloat16 if shape.dtype == torch.float32 else shape.dtype
        return (rank, torch.int8) if bits == 8 else ((rank + 1) // 2, torch.uint8)

    @classmethod
    def num_bytes(
        cls, shape: KVShape, *, batch: int, max_units: int, group_tokens: int, rank: int, bits: int
    ) -> int:
        """Bytes of one layer's codes and basis, for the ledger."""
        width, dtype = cls._storage(shape, rank, bits)
        groups = -(-max_units // BLOCK_GROUPS) * BLOCK_GROUPS
        basis = shape.joint_dim * rank * shape.dtype.itemsize + 12 * rank
        return batch * groups * group_tokens * width * dtype.itemsize + basis

    @classmethod
    def scratch_bytes(
        cls,
        shape: KVShape,
        *,
        batch: int,
        max_units: int,
        group_tokens: int,
        rank: int,
        bits: int,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> int:
        """Temporaries of one call of `score`, for the ledger."""
        heads = shape.num_query_heads
        groups = -(-max_units // BLOCK_GROUPS) * BLOCK_GROUPS
        blocks = max(1, chunk_tokens // (BLOCK_GROUPS * group_tokens))
        tokens = min(blocks * BLOCK_GROUPS, groups) * group_tokens
        unpacked = 2 * rank if bits == 4 else 0
        plain = batch * groups * 4 * heads + tokens * (4 * heads + unpacked)
        return 8 * batch * groups + max(plain, compiled_scratch_bytes(groups, rank))

    @property
    def rank(self) -> int:
        """Components per token."""
        return self._rank

    @override
    def see_start(self, first_unit: NDArray[np.int64]) -> None:
        """Padding has no share of a softmax."""
        start = torch.from_numpy(first_unit).to(self._device)
        self._start = start if first_unit.any() else None

    # Basis ------------------------------------------------------------------------------------

    @property
    @override
    def ready(self) -> bool:
        """Whether there is a basis."""
        return self._ready

    @override
    def fit(self, sample: Tensor, positions: Tensor) -> None:
        """Make the basis from a sample of the prompt's own keys (when no adapter is at hand).

        Differences: the paper fits offline on calibration text.
        """
        self._use(fit_layer(sample.flatten(0, 1).flatten(1), self._rank), again=self._fitted)
        self._fitted = True

    refits: ClassVar[bool] = True

    @override
    def forget_fit(self) -> None:
        """A basis of an adapter or a document stays."""
        if self._fitted:
            self._ready = False

    def _use(self, adapter: LayerAdapter, *, again: bool = False) -> None:
        layer = adapter.truncated(self._rank)
        step = torch.ones_like(layer.peak)
        if self._bits != 16:
            step = layer.peak.clamp_min(1e-12) / (2 ** (self._bits - 1) - 0.5)
        self._take_basis(layer.basis, step, again=again)

    def _take_basis(self, basis: Tensor, step: Tensor, *, again: bool = False) -> None:
        # One matrix serves keys and queries; the quantisation step is folded into the queries.
        basis, step = basis.to(self._device, self._shape.dtype), step.float().to(self._device)
        made = [basis, step, step.reciprocal(), step * self._scaling]
        if again:  # a CUDA graph may have the places of the former ones
            former = [self._basis, self._step, self._per_step, self._scaled_step]
            made = [old.copy_(new) for old, new in zip(former, made, strict=True)]
        self._basis, self._step, self._per_step, self._scaled_step = made
        self._ready = True
        self._selection = None

    @override
    def state(self, num_units: int) -> dict[str, Tensor] | None:
        """Codes of whole blocks, and the basis that they are made with."""
        blocks = -(-num_units // BLOCK_GROUPS)
        codes = self._codes[0, :blocks].contiguous()
        return {"codes": codes, "basis": self._basis, "step": self._step} if self._ready else None

    @override
    def load_state(self, state: Mapping[str, Tensor], num_units: int) -> None:
        if state.keys() != {"codes", "basis", "step"}:
            raise ConfigError(f"a stored index of {sorted(state)} is another kind of index")
        codes, basis, step = state["codes"], state["basis"], state["step"]
        blocks, size = -(-num_units // BLOCK_GROUPS), (self._shape.joint_dim, self._rank)
        if codes.dtype != self._codes.dtype or codes.shape[1:] != self._codes.shape[2:]:
            raise ConfigError(f"codes {list(codes.shape)} are not this index's: other rank or bits")
        if tuple(basis.shape) != size or not blocks <= len(codes) <= self._codes.shape[1]:
            raise ConfigError(
                f"a stored index has codes {list(codes.shape)} and a basis {list(basis.shape)}, "
                f"but {num_units} units want {blocks} blocks and a basis {list(size)}"
            )
        if not basis.is_floating_point():
            raise ConfigError(f"a stored index cannot have a basis in {basis.dtype}")
        fault = basis_fault(basis.float(), step) or _codes_fault(codes)
        if fault is None and not bool(step.reciprocal().isfinite().all()):
            fault = "a step is too small"
        if fault:
            raise ConfigError(f"a stored index cannot be used: {fault}")
        self._codes[:, : len(codes)] = codes.to(self._device)
        self._take_basis(basis, step)

    # Keys -------------------------------------------------------------------------------------

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        group_tokens = self._group_tokens
        components = project_keys(keys, self._basis, self._per_step)
        if store_codes(components, self._codes, self._bits, first_token // group_tokens):
            return
        codes = self._encode(components)
        first, count = first_token // group_tokens, keys.shape[1] // group_tokens
        codes = codes.view(codes.shape[0], count, group_tokens, -1)
        done = 0
        while done < count:
            block, place = divmod(first + done, BLOCK_GROUPS)
            size = min(count - done, BLOCK_GROUPS - place)
            part = codes[:, done : done + size].transpose(1, 2)
            self._codes[:, block, :, place : place + size] = part
            done += size

    @override
    def put(self, keys: Tensor, unit: Tensor) -> None:
        codes = self._encode(project_keys(keys, self._basis, self._per_step))
        block = torch.div(unit, BLOCK_GROUPS, rounding_mode="floor")
        # The two numbers stand together in front: [1, batch, group_tokens, width].
        self._codes.transpose(1, 3)[:, unit % BLOCK_GROUPS, :, block] = codes.unsqueeze(0)

    def _encode(self, components: Tensor) -> Tensor:
        """Components in units of the quantisation step to stored codes, last axis packed."""
        if self._bits == 16:
            return components.to(self._codes.dtype)
        if self._bits == 8:
            return components.round_().clamp_(-127, 127).to(torch.int8)
        # Levels at half-integers: 16 of them, symmetric around zero.
        codes = components.floor_().clamp_(-8, 7).add_(8).to(torch.uint8)
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1), value=8)
        half = codes.shape[-1] // 2
        return codes[..., :half] | (codes[..., half:] << 4)

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, LowRankIndex)
        if other._ready:
            self._basis, self._step, self._ready = other._basis, other._step, True
            self._fitted = other._fitted
            self._scaled_step, self._per_step = other._scaled_step, other._per_step
            self._selection = None
        self._start = None if other._start is None else other._start[rows]
        for block in range(self._codes.shape[1]):
            self._codes[:, block] = other._codes[:, block][rows]

    # Scores -----------------------------------------------------------------------------------

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """ReduceMax over each group (KVSwap 3.3)."""
        shape = self._shape
        batch = query.shape[0]
        if self._head_reduction == "sum":
            grouped = query.view(batch, shape.num_kv_heads, -1, shape.head_dim)
            joint = grouped.sum(dim=2).flatten(1)
            low_rank = (joint @ self._basis).float() * self._step
            return self._group_logits(low_rank.unsqueeze(1), num_units)[:, :num_units, 0]
        per_head = project_queries(query, self._basis, shape.num_kv_heads, self._scaled_step)
        blocks = -(-num_units // BLOCK_GROUPS)
        codes = self._codes[:, :blocks]
        if blocks <= self._chunk_blocks or is_compiled(codes, self._bits):
            return group_scores(codes, per_head, self._bits, num_units, self._start)
        return sum_of_softmaxes(self._group_logits(per_head, num_units), num_units, self._start)

    @override
    def best_units(
        self, query: Tensor, first: int, num_units: int, wanted: int
    ) -> NDArray[np.int64] | None:
        selection = self.selection()
        return None if selection is None else selection.best(query, first, num_units, wanted)

    @override
    def selection(self) -> GroupSelection | None:
        if self._head_reduction == "sum" or self._start is not None:
            return None
        if self._selection is None:
            shape = self._shape
            self._selection = GroupSelection(
                self._codes, self._basis, self._scaled_step, self._bits,
                shape.num_query_heads, shape.num_kv_heads,
            )  # fmt: skip
        return self._selection if self._selection.is_compiled else None

    @override
    def score_before(self, query: Tensor, num_units: int, end: Tensor, first: Tensor) -> Tensor:
        """Units that are not there have no share of a softmax."""
        if self._head_reduction == "sum":
            return self.score(query, num_units)
        kv_heads = self._shape.num_kv_heads
        per_head = project_queries(query, self._basis, kv_heads, self._scaled_step)
        logits = self._group_logits(per_head, num_units)[:, :num_units]
        hide_before(first, logits)
        return group_shares(logits, end)

    def regrouped_scores(self, query: Tensor, num_groups: int, units_per_group: int) -> Tensor:
        """Scores as an index of larger groups, with the same codes, would give.

        Args:
            query: as for `score`. [batch, num_heads, head_dim]
            num_groups: groups of `units_per_group` units each, the first ones.

        Returns:
            float32 [batch, num_groups]
        """
        assert self._head_reduction == "softmax", "shares of a softmax over groups"
        kv_heads, units = self._shape.num_kv_heads, num_groups * units_per_group
        per_head = project_queries(query, self._basis, kv_heads, self._scaled_step)
        logits = self._group_logits(per_head, units)[:, :units]
        best = logits.reshape(-1, num_groups, units_per_group, logits.shape[2]).amax(2)
        return sum_of_softmaxes(best, num_groups)

    def _group_logits(self, low_rank: Tensor, num_units: int) -> Tensor:
        """Each group's largest logit per head.

        Args:
            low_rank: low-rank queries, float32. [batch, heads, rank]

        Returns:
            float32 [batch, groups of whole blocks, heads]
        """
        blocks, step = -(-num_units // BLOCK_GROUPS), self._chunk_blocks
        if blocks <= step:
            return group_products(self._codes[:, :blocks], low_rank, self._bits)
        batch, heads, _ = low_rank.shape
        logits = torch.empty(batch, blocks * BLOCK_GROUPS, heads, device=low_rank.device)
        for start in range(0, blocks, step):
            end = min(start + step, blocks)
            part = group_products(self._codes[:, start:end], low_rank, self._bits)
            logits[:, start * BLOCK_GROUPS : end * BLOCK_GROUPS] = part
        return logits


def _codes_fault(codes: Tensor) -> str | None:
    """What is wrong with stored codes; integers mean something whatever they are."""
    if codes.is_floating_point() and not bool(codes.isfinite().all()):
        return "its components are not finite"
    return None
