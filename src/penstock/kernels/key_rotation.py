"""KeyRotation: how a model turns keys by their positions; KeyTurns: turning them back by blocks."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BLOCK_TOKENS = 64
"""Tokens of a block, unless said otherwise."""


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

    @staticmethod
    def num_bytes(head_dim: int, num_blocks: int) -> int:
        """Most bytes of a table and its 8-bit form, for the ledger."""
        return num_blocks * (5 * head_dim + 8)

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
            places = torch.arange(places, places + keys.shape[1], device=keys.device)
        cos, sin = self._of(places)
        return turned_back(keys, cos, sin, interleaved=self.rotation.interleaved)

    def keys_of(self, turned: Tensor) -> Tensor:
        """What `keys` gave these for, of a sequence's first tokens."""
        cos, sin = self._of(torch.arange(turned.shape[1], device=turned.device))
        return turned_back(turned, cos, -sin, interleaved=self.rotation.interleaved)

    def _of(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the blocks of some places. Each [places, 1, pairs]"""
        blocks = torch.div(places, self.block_tokens, rounding_mode="floor")
        cos, sin = self.table.to(places.device)[blocks, None].chunk(2, dim=-1)
        return cos, sin

    def split(self, query: Tensor, basis: Tensor, kv_heads: int, factor: Tensor) -> "SplitQuery":
        """Queries in the form that any block's low-rank query is made of.

        Args:
            query: post-RoPE. [batch, heads, head_dim]
            basis: [kv_heads * head_dim, rank]
            factor: float32, on the components. [rank]
        """
        return SplitQuery(self, query, basis, kv_heads, factor)


class SplitQuery:
    """Low-rank queries of all blocks: turned back by each one's start, then projected.

    What is turned and projected is a sum over pairs of a cosine and a sine, which are the block's,
    times vectors, which are the query's: all blocks are one product.
    """

    def __init__(
        self, turns: KeyTurns, query: Tensor, basis: Tensor, kv_heads: int, factor: Tensor
    ) -> None:
        rotation, rank = turns.rotation, basis.shape[1]
        self._table = turns.table
        self._size = (query.shape[0], query.shape[1], rank)
        batch, heads, dim = query.shape
        rows = basis.view(kv_heads, 1, dim, rank).float() * factor
        one, two, rest = _parts(query.view(batch, kv_heads, -1, dim, 1).float(), rotation, -2)
        row_one, row_two, row_rest = _parts(rows, rotation, -2)
        by_cos = one * row_one + two * row_two
        by_sin = two * row_one - one * row_two
        by_turn = torch.cat([by_cos, by_sin], dim=3)  # [batch, kv_heads, share, 2 * pairs, rank]
        self._by_turn = by_turn.permute(0, 3, 1, 2, 4).reshape(batch, -1, heads * rank)
        self._same = None
        if rest.shape[-2]:
            self._same = (rest * row_rest).sum(-2).view(batch, 1, heads, rank)

    def of(self, first: int, end: int) -> Tensor:
        """Those of blocks [first, end). float32 [batch, end - first, heads, rank]"""
        batch, heads, rank = self._size
        out = torch.matmul(self._table[first:end], self._by_turn).view(batch, -1, heads, rank)
        return out if self._same is None else out.add_(self._same)


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
    rest = x[..., 2 * pairs :].expand(*turned.shape[:-1], -1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _parts(x: Tensor, rotation: KeyRotation, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and second components of the pairs, and those that do not turn; of one dimension."""
    width = 2 * rotation.pairs
    turning, rest = x.narrow(dim, 0, width), x.narrow(dim, width, x.shape[dim] - width)
    if rotation.interleaved:
        one, two = (
            turning.index_select(dim, torch.arange(i, width, 2, device=x.device)) for i in (0, 1)
        )
    else:
        one, two = turning.chunk(2, dim=dim)
    return one, two, rest
