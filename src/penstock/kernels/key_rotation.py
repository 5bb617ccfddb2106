"""KeyRotation: how a model turns keys by their positions; KeyTurns: turning them back by blocks."""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton
from penstock.kernels.query_steps import turn_query

BLOCK_TOKENS = 64
"""Tokens of a block, unless said otherwise."""
TILE_BLOCKS = 8
"""Blocks whose queries compiled kernels make together; `TILE` of native/block_queries.h."""
MOST_OFF = 0.05
"""Radians that a pair may be off at the ends of a tile; 8 bits round a cosine by 0.004."""


class _Turns(ctypes.Structure):
    """`penstock_turns` of native/steps.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "fast", "fast_sums", "slow", "slow_sums", "order",
        )),
        *((name, ctypes.c_int64) for name in (
            "fast_width", "slow_width", "groups", "pairs", "fast_pairs", "interleaved",
        )),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """A layer's rotary embedding: pairs of components that turn by an angle a token.

    Source: RoFormer (arXiv 2104.09864), section 3.2.2. Scaled kinds whose frequencies do not change
    with the length (linear, yarn, llama3) are of this form too.
    """

    frequencies: Tensor
    """Radians a token of each pair, float64 in host memory. [pairs]"""
    interleaved: bool = False
    """Whether pair i is components 2 i and 2 i + 1, and not i and i + pairs."""

    def agrees_with(self, other: "KeyRotation") -> bool:
        """Whether both turn keys alike."""
        same = self.interleaved == other.interleaved
        return same and torch.equal(self.frequencies, other.frequencies)

    @property
    def pairs(self) -> int:
        """Pairs of components; the first `2 * pairs` of a head's turn."""
        return len(self.frequencies)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Vectors turned as the model turns those of `positions`.

        Args:
            x: [..., head_dim]
            positions: may be negative; its shape must broadcast against x's without the last.
        """
        angles = positions.double().cpu()[..., None] * self.frequencies
        cos, sin = (part.float().to(x.device) for part in (angles.cos(), angles.sin()))
        return turned_back(x, cos, -sin, interleaved=self.interleaved)

    def turns(self, block_tokens: int, num_blocks: int, device: torch.device) -> "KeyTurns":
        """The table of so many blocks; layers that have one rotation have one table."""
        key = (block_tokens, num_blocks, device)
        if key not in self._tables:
            self._tables[key] = KeyTurns(self, *key)
        return self._tables[key]

    @cached_property
    def _tables(self) -> "dict[tuple[int, int, torch.device], KeyTurns]":
        return {}


class KeyTurns:
    """What turns keys at position n to n mod `block_tokens`, and queries as far, block by block.

    A block's keys and its query turn by the same angle, so that their products stay as they are:
    a rotation that is not the model's makes keys harder to compress, and no score wrong.
    """

    def __init__(
        self, rotation: KeyRotation, block_tokens: int, num_blocks: int, device: torch.device
    ) -> None:
        """Make the table.

        Args:
            num_blocks: of the longest sequence.
        """
        self.rotation, self.block_tokens = rotation, block_tokens
        starts = torch.arange(num_blocks, dtype=torch.float64) * block_tokens
        angles = starts[:, None] * rotation.frequencies
        self.table = torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device)
        """Cosines, then sines, of the blocks' starts. float32 [blocks, 2 * pairs]"""
        self._made: tuple[tuple[int, torch.dtype], tuple[Tensor, Tensor]] | None = None

    @staticmethod
    def num_bytes(head_dim: int, num_blocks: int) -> int:
        """Most bytes of a table and its 8-bit form, for the ledger."""
        return num_blocks * (5 * head_dim + 16)

    def compiled(self, head_dim: int, group_tokens: int) -> "CompiledTurns":
        """The table as compiled kernels have it, in 8 bits; one for all layers."""
        key = (head_dim, group_tokens)
        if key not in self._compiled:
            self._compiled[key] = CompiledTurns(self, *key)
        return self._compiled[key]

    @cached_property
    def _compiled(self) -> "dict[tuple[int, int], CompiledTurns]":
        return {}

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return len(self.table)

    def keys(self, keys: Tensor, first_token: int | Tensor) -> Tensor:
        """Keys turned back by the starts of their blocks.

        Args:
            keys: post-RoPE. [batch, tokens, kv_heads, head_dim]
            first_token: place of the first of them, which follow each other; or int64 places of
                each, on the keys' device. [tokens]
        """
        places = first_token
        if isinstance(places, int):
            if keys.device.type == "cpu" and self._is_whole(keys.shape[3]):
                cos, sin = self._turn_of(places, keys.shape[1], keys.dtype)
                if len(cos) > 1:
                    cos, sin = cos.repeat(len(keys), 1), sin.repeat(len(keys), 1)
                return turn_query(keys.flatten(0, 1), cos, sin).view(keys.shape)
            if places % self.block_tokens == keys.shape[1] % self.block_tokens == 0:
                return self._whole_blocks(keys, places // self.block_tokens)
            places = torch.arange(places, places + keys.shape[1], device=keys.device)
        cos, sin = self._of(places)
        return turned_back(keys, cos, sin, interleaved=self.rotation.interleaved)

    def _whole_blocks(self, keys: Tensor, first: int) -> Tensor:
        """`keys` from the start of a block to the end of another; no place is looked up."""
        by_block = keys.view(len(keys), -1, self.block_tokens, *keys.shape[2:])
        table = self.table[first : first + by_block.shape[1], None, None].to(keys.device)
        cos, sin = table.chunk(2, dim=-1)
        return turned_back(by_block, cos, sin, interleaved=self.rotation.interleaved).flatten(1, 2)

    def _is_whole(self, head_dim: int) -> bool:
        """Whether all of a head turns, by halves, as `turn_query` does it."""
        return not self.rotation.interleaved and 2 * self.rotation.pairs == head_dim

    def _turn_of(self, first: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What turns tokens back, as `turn_query` takes it. Each [1 where all are of one block, or
        tokens, head_dim]"""
        block = first // self.block_tokens
        alone = (first + count - 1) // self.block_tokens == block
        made, key = self._made, (block, dtype)
        if alone and made is not None and made[0] == key:
            return made[1]  # all layers of a step ask for the same
        places = torch.arange(first, first + (1 if alone else count))
        cos, sin = self.table[places // self.block_tokens].to(dtype).chunk(2, dim=1)
        turn = torch.cat([cos, cos], dim=1), -torch.cat([sin, sin], dim=1)
        if alone:
            self._made = key, turn
        return turn

    def from_start(self, x: Tensor, row_turn: Tensor | None) -> Tensor:
        """Keys or queries as if each row's text began at the first position.

        Args:
            x: [batch, ..., head_dim]
            row_turn: as in `queries`; None: they are so.
        """
        if row_turn is None:
            return x
        turn = row_turn[: len(x)].view(len(x), *[1] * (x.dim() - 2), -1)
        cos, sin = turn.chunk(2, dim=-1)
        return turned_back(x, cos, sin, interleaved=self.rotation.interleaved)

    def keys_of(self, turned: Tensor) -> Tensor:
        """What `keys` gave these for, of a sequence's first tokens."""
        cos, sin = self._of(torch.arange(turned.shape[1], device=turned.device))
        return turned_back(turned, cos, -sin, interleaved=self.rotation.interleaved)

    def _of(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the blocks of some places. Each [places, 1, pairs]"""
        blocks = torch.div(places, self.block_tokens, rounding_mode="floor")
        cos, sin = self.table.to(places.device)[blocks, None].chunk(2, dim=-1)
        return cos, sin

    def queries(
        self, query: Tensor, basis: Tensor, kv_heads: int, factor: Tensor, first: int, end: int,
        row_turn: Tensor | None = None, *, rounded: bool = False,
    ) -> Tensor:  # fmt: skip
        """Low-rank queries of blocks [first, end): turned back by each one's start, then projected.

        Args:
            query: post-RoPE. [batch, heads, head_dim]
            basis: [kv_heads * head_dim, rank]
            factor: float32, on the components. [rank]
            row_turn: what turns each row's query back first, as in `table`. [batch, 2 * pairs]
            rounded: Triton may round what it returns to bfloat16, which loses less than codes do.

        Returns:
            [batch, end - first, heads, rank]; float32, or bfloat16 where `rounded`
        """
        batch, _, dim = query.shape
        if uses_triton(query) and row_turn is not None:
            from penstock.kernels.device.block_queries_triton import block_queries_triton

            return block_queries_triton(
                query, basis, factor, self.table[first:end], row_turn,
                interleaved=self.rotation.interleaved,
                dtype=torch.bfloat16 if rounded else torch.float32,
            )  # fmt: skip
        query = self.from_start(query, row_turn)
        cos, sin = self.table[first:end, None].chunk(2, dim=-1)
        inter = self.rotation.interleaved
        turned = turned_back(query.float().unsqueeze(1), cos, sin, interleaved=inter)
        grouped = turned.view(batch, end - first, kv_heads, -1, dim).transpose(1, 2)
        rows = basis.view(kv_heads, dim, -1)
        products = torch.matmul(grouped.flatten(2, 3).to(basis.dtype), rows).float().mul_(factor)
        parts = products.view(batch, kv_heads, end - first, -1, len(factor))
        return parts.transpose(1, 2).flatten(2, 3)


class CompiledTurns:
    """Cosines and sines in 8 bits, which lose a selection nothing that its codes have.

    Pairs that turn little from one end of a tile of blocks to the other have those of its middle.
    """

    def __init__(self, turns: KeyTurns, head_dim: int, group_tokens: int) -> None:
        rotation = turns.rotation
        span = turns.block_tokens * (TILE_BLOCKS - 1)
        is_slow = rotation.frequencies.abs() * span / 2 <= MOST_OFF
        order = torch.cat([(~is_slow).nonzero(), is_slow.nonzero()]).flatten()
        fast = len(order) - int(is_slow.sum())
        self._order = order.to(torch.int32)
        self._fast = _in_8_bits(turns.table, order[:fast], still=False)
        starts = torch.arange(-(-turns.num_blocks // TILE_BLOCKS), dtype=torch.float64)
        middles = starts * (TILE_BLOCKS * turns.block_tokens) + span / 2
        angles = middles[:, None] * rotation.frequencies
        middle = torch.cat([angles.cos(), angles.sin()], dim=1)
        self._slow = _in_8_bits(middle, order[fast:], still=head_dim > 2 * rotation.pairs)
        self._sums = [part.sum(dim=1, dtype=torch.int32) for part in (self._fast, self._slow)]
        self.width = self._fast.shape[1] + self._slow.shape[1]
        self._turns = _Turns(
            fast=self._fast.data_ptr(), fast_sums=self._sums[0].data_ptr(),
            slow=self._slow.data_ptr(), slow_sums=self._sums[1].data_ptr(),
            order=self._order.data_ptr(), fast_width=self._fast.shape[1],
            slow_width=self._slow.shape[1], groups=turns.block_tokens // group_tokens,
            pairs=rotation.pairs, fast_pairs=fast, interleaved=rotation.interleaved,
        )  # fmt: skip
        self.address = ctypes.addressof(self._turns)

    def scratch_bytes(self, rank: int) -> int:
        """What a compiled kernel makes of 16 heads' queries."""
        return turned_scratch_bytes(self.width, rank)


def _in_8_bits(table: Tensor, pairs: Tensor, *, still: bool) -> Tensor:
    """Cosines, then sines of some pairs, then ones for what does not turn, to a multiple of 4."""
    levels = table.cpu().view(len(table), 2, -1)[:, :, pairs].flatten(1) * 127
    parts = [levels, torch.full((len(table), int(still)), 127.0)]
    width = 2 * len(pairs) + still
    parts.append(torch.zeros(len(table), -width % 4))
    return torch.cat(parts, dim=1).round().to(torch.int8)


def turned_scratch_bytes(width: int, rank: int) -> int:
    """The same for a row of the table that is so wide."""
    return 16 * (-(-rank // 16) * 16) * (width + 4)


def turned_back(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Vectors turned against the sense of the rotary embedding.

    Args:
        x: [..., head_dim]
        cos, sin: float32, of the first components' pairs; the others stay. [..., pairs]
    """
    pairs = cos.shape[-1]
    turning = x[..., : 2 * pairs].float()
    if interleaved:
        one, two = turning[..., 0::2], turning[..., 1::2]
    else:
        one, two = turning.chunk(2, dim=-1)
    parts = (one * cos + two * sin, two * cos - one * sin)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    if 2 * pairs == x.shape[-1]:
        return turned.to(x.dtype)
    rest = x[..., 2 * pairs :].expand(*turned.shape[:-1], -1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
