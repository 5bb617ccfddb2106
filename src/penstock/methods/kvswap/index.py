"""LowRankIndex: joint-head keys projected to a few dimensions (KVSwap 3.2, Eq. 1)."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LayerAdapter, fit_layer
from penstock.engine.key_index import KeyIndex
from penstock.engine.key_scale import key_scale, mean_squares
from penstock.kernels.device.available import uses_triton
from penstock.kernels.device.group_shares import group_shares
from penstock.kernels.group_products import group_products
from penstock.kernels.group_scores import (
    compiled_scratch_bytes,
    group_scores,
    hide_before,
    is_compiled,
    scores_of_shares,
)
from penstock.kernels.group_selection import GroupSelection
from penstock.kernels.key_rotation import (
    BLOCK_TOKENS,
    KeyRotation,
    KeyTurns,
    turned_scratch_bytes,
)
from penstock.kernels.low_rank import project_keys, project_queries, store_codes
from penstock.methods.kvswap.stored_index import PLAIN, TURNED, VALUE_SUM, stored_fault

HeadReduction = Literal["norm", "softmax", "sum"]

PIECES = 8
"""In how many pieces those are scored whose keys are turned, in torch: each part's codes are
converted, and its queries made."""
BLOCK_GROUPS = 256
"""Groups of one block of codes; scores are computed by whole blocks."""
FINE_PART = 16
"""Of columns of 4 bits, one in so many is the second of one of the strongest components."""
FINE_STEPS = 16
"""Steps of a second column in one of the first."""
CHUNK_TOKENS = 32_768
"""Tokens scored at a time unless said otherwise; bounds the scratch memory of `score`."""


class LowRankIndex(KeyIndex):
    """Scores tokens by q A (K A)^T per head and groups by their best token.

    Source: KVSwap, sections 3.2 and 3.3, Eq. 1. K is flattened over its KV heads and projected by
    one basis A; a query head is projected by the rows of A that belong to its KV head.

    Differences, all measured (docs/methods/kvswap.md): keys are turned back to their offset in a
    block of tokens before they are projected, and queries by the start of each block (keys of one
    space need fewer components than keys that turn with every token; the paper's are those
    post-RoPE: `rotation` None), and scaled so that components that queries see come first
    (`key_scale`); each head's scores go through a softmax, because raw logits let the loudest head
    decide (the paper does not say; its artifact adds raw logits: `head_reduction="sum"`), and a
    group has the norm of its heads' shares; for that, ReduceMax over a group comes before the heads
    become one instead of after it, which makes the softmax `group_tokens` times smaller; components
    may be stored in 8 or 4 bits (the paper stores 16). With a rotation and 4 bits, the strongest
    components have two columns, which are 8 bits of one: `rank` counts columns.

    Codes of a block lie as [group_tokens, BLOCK_GROUPS, width]: the first tokens of its groups,
    then the second ones, ..., so that the maximum over a group is over whole planes.
    """

    _basis: Tensor
    """For queries. [kv_heads * head_dim, rank]"""
    _encoder: Tensor
    """For keys; the same where keys are not scaled. [kv_heads * head_dim, rank]"""
    _step: Tensor
    _per_step: Tensor
    _scaled_step: Tensor
    _scale: Tensor | None = None
    """See `LayerAdapter.scale`. float32 [kv_heads * head_dim]"""
    _fine = 0
    """Second columns, the last ones."""
    num_prompt_queries: ClassVar[int] = 8

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
        rotation: KeyRotation | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        """Allocate the index.

        Args:
            rank: columns of components per token, at most `shape.joint_dim`.
            bits: 16 (the model's dtype), 8 or 4 bits per component.
            head_reduction: "norm" or sum ("softmax") of the heads' shares, or "sum" of raw logits.
            scaling: factor on logits, where there is a softmax.
            adapter: basis to use, of keys by blocks of `block_tokens` or as they are; None: `fit`.
            chunk_tokens: tokens scored at a time.
            rotation: of the model's keys; None: they are kept as the model has them.
            block_tokens: of a block; about so many where groups do not divide it.
        """
        assert bits in (16, 8, 4), bits
        self._shape = shape
        self._group_tokens = group_tokens
        self._rank, self._bits = rank, bits
        self._head_reduction = head_reduction
        self._squares = head_reduction == "norm"
        self._scaling = scaling
        self._device = device
        self._chunk_blocks = max(1, chunk_tokens // (BLOCK_GROUPS * group_tokens))
        self._ready = self._fitted = False
        self._selection: GroupSelection | None = None
        self._start: Tensor | None = None
        """First unit of each row, where one has padding before it. int64 [rows]"""
        self._turns: KeyTurns | None = None
        self._row_turn: Tensor | None = None
        """What turns back the keys of rows that begin later, as cosines and sines.
        float32 [batch, 2 * pairs]"""
        self._block_tokens = block_tokens
        width, dtype = self._storage(shape, rank, bits)
        blocks = -(-max_units // BLOCK_GROUPS)
        if rotation is not None:
            groups = turned_groups(group_tokens, block_tokens)
            count = blocks * BLOCK_GROUPS // groups
            self._turns = rotation.turns(groups * group_tokens, count, device)
            self._row_turn = self._turns.table[:1].repeat(batch, 1)
        self._own_turns = self._turns
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
        cls, shape: KVShape, *, batch: int, max_units: int, group_tokens: int, rank: int, bits: int,
        turned: bool = False,
    ) -> int:  # fmt: skip
        """Bytes of one layer's codes and basis, for the ledger.

        Args:
            turned: whether there is a rotation.
        """
        width, dtype = cls._storage(shape, rank, bits)
        groups = -(-max_units // BLOCK_GROUPS) * BLOCK_GROUPS
        matrix = shape.joint_dim * rank * shape.dtype.itemsize
        basis = matrix + 12 * rank
        if turned:
            queries = cls.num_prompt_queries * shape.num_query_heads * shape.dtype.itemsize
            basis += matrix + 4 * shape.joint_dim + batch * shape.head_dim * (4 + queries)
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
        turned: bool = False,
        block_tokens: int = BLOCK_TOKENS,
        on_gpu: bool = False,
    ) -> int:
        """Temporaries of one call of `score`, for the ledger.

        Args:
            on_gpu: nothing is unpacked, and turned queries are not written.
        """
        heads = shape.num_query_heads
        groups = -(-max_units // BLOCK_GROUPS) * BLOCK_GROUPS
        blocks = max(1, chunk_tokens // (BLOCK_GROUPS * group_tokens))
        tokens = min(blocks * BLOCK_GROUPS, groups) * group_tokens
        unpacked = 2 * rank if bits == 4 and not on_gpu else 0
        plain = batch * groups * 4 * heads + tokens * (4 * heads + unpacked)
        if turned:
            span = turned_groups(group_tokens, block_tokens) * group_tokens
            piece = min(tokens, max(span, tokens // PIECES))
            if on_gpu:
                plain += batch * 4 * heads * rank * -(-tokens // span)
            else:
                queries = 4 * heads * (3 * shape.head_dim + rank) * -(-piece // span)
                plain += batch * (queries + 5 * rank * piece)
        compiled = compiled_scratch_bytes(groups, rank)
        if turned:
            compiled += turned_scratch_bytes(shape.head_dim, rank)
        return 8 * batch * groups + max(plain, compiled)

    @staticmethod
    def table_bytes(shape: KVShape, *, max_units: int, group_tokens: int, block_tokens: int) -> int:
        """Bytes of the table that all layers of a rotation have together, for the ledger."""
        blocks = -(-max_units // BLOCK_GROUPS)
        count = blocks * BLOCK_GROUPS // turned_groups(group_tokens, block_tokens)
        return KeyTurns.num_bytes(shape.head_dim, count)

    @property
    def rank(self) -> int:
        """Columns of components per token."""
        return self._rank

    @override
    def see_start(self, first_unit: NDArray[np.int64]) -> None:
        """Padding has no share of a softmax, and does not turn keys: an adapter's basis is of keys
        whose blocks begin with the text."""
        if self._start is None and not first_unit.any():
            return
        start = torch.from_numpy(first_unit).to(self._device)
        self._start = start if first_unit.any() else None
        if self._turns is not None and self._row_turn is not None:
            rotation = self._turns.rotation
            places = torch.from_numpy(first_unit).double()[:, None] * self._group_tokens
            angles = places * rotation.frequencies
            self._row_turn.copy_(torch.cat([angles.cos(), -angles.sin()], dim=1))

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
        turned, block_tokens = self._turned(sample, positions.to(sample.device)), 0
        if self._turns is not None:
            block_tokens = self._block_tokens
        flat = turned.flatten(0, 1).flatten(1)
        layer = fit_layer(flat, self._rank, block_tokens, self._scale)
        self._use(layer, again=self._fitted)
        self._fitted = True

    @property
    @override
    def wanted_queries(self) -> int:
        return 0 if self.ready or self._turns is None else self.num_prompt_queries

    @override
    def see_queries(self, queries: Tensor) -> None:
        """For a basis that is still to be fitted."""
        if self._turns is not None and not self._ready:
            squares = mean_squares(queries, self._shape.num_kv_heads)
            self._scale = key_scale(squares, self._turns.rotation).to(self._device)

    refits: ClassVar[bool] = True

    @override
    def forget_fit(self) -> None:
        """A basis of an adapter or a document stays."""
        if self._fitted:
            self._ready = False

    def _use(self, adapter: LayerAdapter, *, again: bool = False) -> None:
        if not adapter.block_tokens:
            self._turns = None
        assert adapter.block_tokens in (0, self._block_tokens), adapter.block_tokens
        turned = self._turns is not None and self._bits == 4
        fine = self._rank // FINE_PART if turned else 0
        layer = adapter.truncated(self._rank - fine)
        step = torch.ones_like(layer.peak)
        if self._bits != 16:
            step = layer.peak.clamp_min(1e-12) / (2 ** (self._bits - 1) - 0.5)
        basis = torch.cat([layer.basis, layer.basis[:, :fine]], dim=1)
        step = torch.cat([step, step[:fine] / FINE_STEPS])
        self._take_basis(basis, step, layer.scale, fine, again=again)

    def _take_basis(
        self, basis: Tensor, step: Tensor, scale: Tensor | None, fine: int, *, again: bool = False
    ) -> None:  # fmt: skip
        # The quantisation step is folded into the queries; the scale of keys into both matrices.
        dtype = self._shape.dtype
        step = step.float().to(self._device)
        per_step = step.reciprocal()
        per_step[len(step) - fine :] /= FINE_STEPS
        if self._turns is None:
            scale, basis = None, basis.to(self._device, dtype)
            encoder = basis
        else:
            if scale is None:
                scale = torch.ones(len(basis))
            scale = scale.to(self._device)
            basis = (basis.to(self._device).float() / scale[:, None]).to(dtype)
            encoder = (basis.float() * scale.square()[:, None]).to(dtype)
        made = [basis, encoder, step, per_step, step * self._scaling]
        if again:  # a CUDA graph may have the places of the former ones
            former = [
                self._basis, self._encoder, self._step, self._per_step, self._scaled_step
            ]  # fmt: skip
            made = [old.copy_(new) for old, new in zip(former, made, strict=True)]
        self._basis, self._encoder, self._step, self._per_step, self._scaled_step = made
        self._scale, self._fine, self._ready = scale, fine, True
        self._selection = None

    @override
    def state(self, num_units: int) -> dict[str, Tensor] | None:
        """Codes of whole blocks, and the basis that they are made with; with a rotation the tokens
        of a block, the scale of keys and the number of second columns too."""
        if not self._ready:
            return None
        blocks = -(-num_units // BLOCK_GROUPS)
        codes = self._codes[0, :blocks].contiguous()
        state = {"codes": codes, "basis": self._basis, "step": self._step}
        if self._turns is not None:
            assert self._scale is not None
            state["basis"] = self._basis.float() * self._scale[:, None]
            state["scale"] = self._scale
            state["block_tokens"] = torch.tensor([self._turns.block_tokens])
            state["fine"] = torch.tensor([self._fine])
        return state

    @override
    def load_state(self, state: Mapping[str, Tensor], num_units: int) -> None:
        turned = "block_tokens" in state
        if state.keys() - {VALUE_SUM} - (TURNED if turned else set()) != PLAIN:
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
        block_tokens = None if self._turns is None else self._turns.block_tokens
        fault = stored_fault(state, block_tokens, self._rank // 2 if self._bits == 4 else 0)
        if fault:
            raise ConfigError(f"a stored index cannot be used: {fault}")
        if not turned:  # of keys as the model has them, as all were once
            self._turns = None
        self._codes[:, : len(codes)] = codes.to(self._device)
        fine = int(state["fine"]) if "fine" in state else 0
        self._take_basis(basis, step, state.get("scale"), fine)

    # Keys -------------------------------------------------------------------------------------

    def _turned(self, keys: Tensor, first_token: int | Tensor) -> Tensor:
        """Keys as the basis knows them; `first_token` as `KeyTurns.keys` has it."""
        if self._turns is None:
            return keys
        if self._start is not None or isinstance(first_token, Tensor):
            keys = self._from_start(keys)
        return self._turns.keys(keys, first_token)

    def _from_start(self, x: Tensor) -> Tensor:
        """Keys or queries as if each row's text began at the first position."""
        return x if self._turns is None else self._turns.from_start(x, self._turn_of(x))

    def _turn_of(self, x: Tensor) -> Tensor | None:
        """What turns rows that begin later; None where none does."""
        if self._start is None and self._device.type == "cpu":
            return None  # a CUDA graph has no such choice: another row may begin elsewhere
        assert self._row_turn is not None
        return self._row_turn[: len(x)]

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        group_tokens = self._group_tokens
        components = self._components(self._turned(keys, first_token))
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
        if uses_triton(keys):
            self._put_in_triton(keys, unit)
            return
        group_tokens = self._group_tokens
        places = unit * group_tokens + torch.arange(group_tokens, device=unit.device)
        codes = self._encode(self._components(self._turned(keys, places)))
        block = torch.div(unit, BLOCK_GROUPS, rounding_mode="floor")
        # The two numbers stand together in front: [1, batch, group_tokens, width].
        self._codes.transpose(1, 3)[:, unit % BLOCK_GROUPS, :, block] = codes.unsqueeze(0)

    def _put_in_triton(self, keys: Tensor, unit: Tensor) -> None:
        from penstock.kernels.device.put_codes_triton import put_codes_triton

        turn = None
        if self._turns is not None:
            assert self._row_turn is not None
            per_turn = self._turns.block_tokens // self._group_tokens
            turn = (
                self._turns.table, self._row_turn, per_turn, self._turns.rotation.interleaved,
            )  # fmt: skip
        put_codes_triton(
            keys, unit, self._codes, self._encoder, self._per_step, bits=self._bits,
            fine=self._fine, turn=turn,
        )  # fmt: skip

    def _components(self, turned: Tensor) -> Tensor:
        """Columns of turned keys in units of the quantisation step, float32, last axis `rank`."""
        components = project_keys(turned, self._encoder, self._per_step)
        if self._fine:
            coarse = components[..., : self._fine]
            left = coarse - coarse.floor().clamp_(-8, 7).add_(0.5)
            components[..., -self._fine :] = left.mul_(FINE_STEPS)
        return components

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
            self._encoder, self._fine = other._encoder, other._fine
            self._fitted = other._fitted
            self._scaled_step, self._per_step = other._scaled_step, other._per_step
            self._selection = None
            self._turns = None if other._turns is None else self._own_turns
        self._scale = other._scale
        self._start = None if other._start is None else other._start[rows]
        if self._row_turn is not None and other._row_turn is not None:
            self._row_turn.copy_(other._row_turn[rows])
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
            low_rank = self._low_rank(grouped.sum(dim=2), self._step)
            return self._group_logits(low_rank, num_units)[:, :num_units, 0]
        blocks = -(-num_units // BLOCK_GROUPS)
        codes = self._codes[:, :blocks]
        if self._turns is None and (blocks <= self._chunk_blocks or is_compiled(codes, self._bits)):
            per_head = project_queries(query, self._basis, shape.num_kv_heads, self._scaled_step)
            given = codes, per_head, self._bits, num_units, self._start
            return group_scores(*given, squares=self._squares)
        selection = self._selection_of_codes() if self._turns is not None else None
        if selection is not None and selection.is_compiled:
            return selection.scores(self._from_start(query), num_units, self._start)
        logits = self._group_logits(self._low_rank(query, self._scaled_step), num_units)
        return scores_of_shares(logits, num_units, self._start, squares=self._squares)

    def _low_rank(self, query: Tensor, factor: Tensor) -> Callable[[int, int], Tensor]:
        """Low-rank queries of groups [first, end), as `group_products` takes them."""
        together = self._head_reduction == "sum"
        kv_heads = self._shape.num_kv_heads
        if self._turns is None:
            one = project_queries(query, self._basis, kv_heads, factor)
            one = one.sum(dim=1, keepdim=True) if together else one
            return lambda first, end: one
        turns, turn = self._turns, self._turn_of(query)
        rounded = self._bits != 16 and not together
        groups = turns.block_tokens // self._group_tokens

        def of(first: int, end: int) -> Tensor:
            blocks = (first // groups, end // groups)
            each = turns.queries(
                query, self._basis, kv_heads, factor, *blocks, turn, rounded=rounded
            )
            return each.sum(dim=2, keepdim=True) if together else each

        return of

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
        selection = self._selection_of_codes()
        return selection if selection.is_compiled else None

    def _selection_of_codes(self) -> GroupSelection:
        if self._selection is None:
            shape = self._shape
            self._selection = GroupSelection(
                self._codes, self._basis, self._scaled_step, self._bits,
                shape.num_query_heads, shape.num_kv_heads, self._turns, squares=self._squares,
            )  # fmt: skip
        return self._selection

    @override
    def score_before(self, query: Tensor, num_units: int, end: Tensor, first: Tensor) -> Tensor:
        """Units that are not there have no share of a softmax."""
        if self._head_reduction == "sum":
            return self.score(query, num_units)
        low_rank = self._low_rank(query, self._scaled_step)
        logits = self._group_logits(low_rank, num_units)[:, :num_units]
        hide_before(first, logits)
        return group_shares(logits, end, squares=self._squares)

    def unit_logits(self, query: Tensor, num_units: int) -> Tensor:
        """Each unit's largest logit per head; of padding it means nothing.

        Args:
            query: as for `score`. [batch, num_heads, head_dim]

        Returns:
            float32 [batch, num_units, num_heads]
        """
        assert self._head_reduction != "sum", "logits per head"
        selection = self._selection_of_codes() if self._turns is not None else None
        if selection is not None and selection.is_compiled:
            return selection.logits(self._from_start(query), num_units)
        low_rank = self._low_rank(query, self._scaled_step)
        return self._group_logits(low_rank, num_units)[:, :num_units]

    def _group_logits(self, low_rank: Callable[[int, int], Tensor], num_units: int) -> Tensor:
        """Each group's largest logit per head.

        Args:
            low_rank: low-rank queries of groups [first, end), each of whole blocks of codes, or of
                whole blocks of keys within one.

        Returns:
            float32 [batch, groups of whole blocks, heads]
        """
        groups = -(-num_units // BLOCK_GROUPS) * BLOCK_GROUPS
        step = min(groups, self._chunk_blocks * BLOCK_GROUPS)
        if self._turns is not None and self._device.type == "cpu":
            # A power of two below a block of codes, so that no piece is in two.
            least = self._turns.block_tokens // self._group_tokens
            step = max(least, step // PIECES)
            step = step // BLOCK_GROUPS * BLOCK_GROUPS or 2 ** (step.bit_length() - 1)
        logits: Tensor | None = None
        for first in range(0, groups, step):
            end = min(first + step, groups)
            part = group_products(self._codes_of(first, end), low_rank(first, end), self._bits)
            if step == groups:
                return part
            if logits is None:
                logits = part.new_empty(len(part), groups, part.shape[2])
            logits[:, first:end] = part
        assert logits is not None
        return logits

    def _codes_of(self, first: int, end: int) -> Tensor:
        """Codes of groups [first, end), as `group_products` has them."""
        block, place = divmod(first, BLOCK_GROUPS)
        if place == 0 and end % BLOCK_GROUPS == 0:
            return self._codes[:, block : end // BLOCK_GROUPS]
        return self._codes[:, block : block + 1, :, place : place + end - first]


def turned_groups(group_tokens: int, block_tokens: int) -> int:
    """Groups that one query serves: a power of two, about `block_tokens` of tokens, 4 or more."""
    fitting = max(4, min(BLOCK_GROUPS, block_tokens // group_tokens))
    return int(2 ** (fitting.bit_length() - 1))
