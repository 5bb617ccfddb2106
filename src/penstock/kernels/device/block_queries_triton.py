"""Low-rank queries of all blocks in Triton: one launch turns and projects them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
"""Queries of one program, turned back by several blocks."""


def block_queries_triton(
    query: Tensor, basis: Tensor, factor: Tensor, table: Tensor, row_turn: Tensor, *,
    interleaved: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`KeyTurns.queries` in Triton: a program has some blocks of one KV head.

    Args:
        query: post-RoPE. [batch, heads, head_dim]
        basis: [kv_heads * head_dim, rank]
        factor: float32, on the components. [rank]
        table: cosines, then sines, of the blocks. float32 [blocks, 2 * pairs]
        row_turn: the same of each row, which turns its query first. float32 [batch, 2 * pairs]
        dtype: of what is returned.

    Returns:
        [batch, blocks, heads, rank]
    """
    batch, heads, dim = query.shape
    blocks, pairs, rank = len(table), table.shape[1] // 2, basis.shape[1]
    assert row_turn.shape == (batch, 2 * pairs), row_turn.shape
    kv_heads = basis.shape[0] // dim
    wide = triton.next_power_of_2(heads // kv_heads)
    at_once = max(1, _ROWS // wide)
    out = torch.empty(batch, blocks, heads, rank, dtype=dtype, device=query.device)
    _turned_and_projected[(triton.cdiv(blocks, at_once), kv_heads, batch)](
        query.contiguous(), basis, factor, table.contiguous(), row_turn.contiguous(), out, blocks,
        rank, DIM=dim, PAIRS=pairs, LEFT=dim - 2 * pairs, SHARE=heads // kv_heads, SHARE_WIDE=wide,
        ROWS=max(16, at_once * wide), RANK_WIDE=_wide(rank), INTERLEAVED=interleaved,
        PAIRS_WIDE=_wide(pairs), LEFT_WIDE=_wide(dim - 2 * pairs),
        WHOLE=basis.dtype == torch.float32 or not basis.is_cuda, num_warps=4,
    )  # fmt: skip
    return out


def _wide(size: int) -> int:
    """A side of a product."""
    wide: int = max(16, triton.next_power_of_2(size))
    return wide


@triton.jit
def turned_back(one, two, turn, seen, PAIRS: tl.constexpr):
    """Both halves of vectors, turned against the rotary embedding; see `key_rotation.turned_back`.

    `turn` points to the cosines of each pair, with the sines behind them.
    """
    cos = tl.load(turn, mask=seen, other=0.0)
    sin = tl.load(turn + PAIRS, mask=seen, other=0.0)
    return one * cos + two * sin, two * cos - one * sin


@triton.jit
def _multiplied(left, right, WHOLE: tl.constexpr):
    """In the basis's dtype, or in float32: the interpreter knows no products of bfloat16."""
    if WHOLE:
        return tl.dot(left, right.to(tl.float32), input_precision="tf32x3")
    return tl.dot(left.to(right.dtype), right)


@triton.jit(do_not_specialize=["blocks"])
def _turned_and_projected(
    query, basis, factor, table, row_turn, out, blocks, rank,
    DIM: tl.constexpr, PAIRS: tl.constexpr, LEFT: tl.constexpr, SHARE: tl.constexpr,
    SHARE_WIDE: tl.constexpr, ROWS: tl.constexpr, RANK_WIDE: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAIRS_WIDE: tl.constexpr, LEFT_WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Queries of one KV head, as keys of some blocks meet them, times its rows of the basis."""
    APART: tl.constexpr = 2 if INTERLEAVED else 1
    SECOND: tl.constexpr = 1 if INTERLEAVED else PAIRS
    kv_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    number = tl.arange(0, ROWS)
    block = tl.program_id(0) * (ROWS // SHARE_WIDE) + number // SHARE_WIDE
    member = number % SHARE_WIDE
    real = (block < blocks) & (member < SHARE)
    pair, component = tl.arange(0, PAIRS_WIDE), tl.arange(0, RANK_WIDE)
    turning = real[:, None] & (pair < PAIRS)[None, :]
    own = query + ((row * kv_heads + kv_head) * SHARE + member) * DIM
    place = own[:, None] + pair[None, :] * APART
    one = tl.load(place, mask=turning, other=0.0).to(tl.float32)
    two = tl.load(place + SECOND, mask=turning, other=0.0).to(tl.float32)
    own_turn = row_turn + row * (2 * PAIRS) + pair[None, :]
    one, two = turned_back(one, two, own_turn, (pair < PAIRS)[None, :], PAIRS)
    angle = table + block[:, None] * (2 * PAIRS) + pair[None, :]
    one, two = turned_back(one, two, angle, turning, PAIRS)
    rows = basis + kv_head * DIM * rank
    asked = (pair < PAIRS)[:, None] & (component < rank)[None, :]
    at = rows + pair[:, None] * APART * rank + component[None, :]
    found = _multiplied(one, tl.load(at, mask=asked, other=0.0), WHOLE)
    found += _multiplied(two, tl.load(at + SECOND * rank, mask=asked, other=0.0), WHOLE)
    if LEFT:
        still = tl.arange(0, LEFT_WIDE)
        there = real[:, None] & (still < LEFT)[None, :]
        rest = tl.load(own[:, None] + 2 * PAIRS + still[None, :], mask=there, other=0.0)
        kept = (still < LEFT)[:, None] & (component < rank)[None, :]
        at = rows + (2 * PAIRS + still[:, None]) * rank + component[None, :]
        found += _multiplied(rest.to(tl.float32), tl.load(at, mask=kept, other=0.0), WHOLE)
    scale = tl.load(factor + component, mask=component < rank, other=0.0)
    head = (row * blocks + block) * (kv_heads * SHARE) + kv_head * SHARE + member
    to = out + head[:, None] * rank + component[None, :]
    shown = real[:, None] & (component < rank)[None, :]
    tl.store(to, (found * scale[None, :]).to(out.dtype.element_ty), mask=shown)
