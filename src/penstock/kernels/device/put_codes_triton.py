"""A unit's codes in Triton: one launch turns, projects and quantises its keys, and stores them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device.block_queries_triton import turned_back

_COLUMNS = 2
"""Columns of one program, and as many of the high nibbles."""


def put_codes_triton(
    keys: Tensor, unit: Tensor, codes: Tensor, encoder: Tensor, per_step: Tensor, *, bits: int,
    fine: int, turn: tuple[Tensor, Tensor, int, bool] | None,
) -> None:  # fmt: skip
    """`LowRankIndex.put` in Triton: a program has some columns of one row's unit.

    Args:
        keys: post-RoPE. [batch, group_tokens, kv_heads, head_dim]
        unit: int64 [1]
        codes: as in `group_products`. [batch, blocks, group_tokens, units, width]
        encoder: [kv_heads * head_dim, rank]
        per_step: float32, on the components. [rank]
        bits: 16, 8 or 4.
        fine: second columns, the last ones; of 4 bits.
        turn: table and row turn as in `block_queries_triton`, units that have one row of the table,
            and whether pairs are neighbours; None: keys are not turned.
    """
    batch, tokens, kv_heads, dim = keys.shape
    _, _, _, units, width = codes.shape
    rank = encoder.shape[1]
    assert codes.stride()[2:] == (units * width, width, 1), "a block lies as one"
    assert fine == 0 or bits == 4, (fine, bits)
    table, row_turn, per_turn, interleaved = turn or (per_step, per_step, 1, False)
    pairs = 0 if turn is None else table.shape[1] // 2
    _put[(triton.cdiv(width, _COLUMNS), batch)](
        keys.contiguous(), unit, codes, encoder, per_step, table, row_turn, codes.stride(0),
        codes.stride(1), units, rank, KV_HEADS=kv_heads, DIM=dim, PAIRS=pairs,
        LEFT=dim - 2 * pairs, TOKENS=tokens, TOKENS_WIDE=triton.next_power_of_2(tokens),
        PAIRS_WIDE=max(1, triton.next_power_of_2(pairs)),
        LEFT_WIDE=max(1, triton.next_power_of_2(dim - 2 * pairs)), WIDTH=width, BITS=bits,
        FINE=fine, PER_TURN=per_turn, INTERLEAVED=interleaved, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _products(vectors, rows, column, asked):
    """Keys of each token times rows of the encoder, not yet added. [tokens, rows, columns]"""
    weight = tl.load(rows[:, None] + column[None, :], mask=asked, other=0.0).to(tl.float32)
    return vectors[:, :, None] * weight[None, :, :]


@triton.jit
def _components(
    keys, encoder, table, row_turn, row, unit, column, rank,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, LEFT: tl.constexpr,
    TOKENS: tl.constexpr, TOKENS_WIDE: tl.constexpr, PAIRS_WIDE: tl.constexpr,
    LEFT_WIDE: tl.constexpr, PER_TURN: tl.constexpr, INTERLEAVED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of a unit's turned and projected keys. [tokens, columns]"""
    APART: tl.constexpr = 2 if INTERLEAVED else 1
    SECOND: tl.constexpr = 1 if INTERLEAVED else PAIRS
    token, pair = tl.arange(0, TOKENS_WIDE), tl.arange(0, PAIRS_WIDE)
    still = tl.arange(0, LEFT_WIDE)
    seen = (token < TOKENS)[:, None] & (pair < PAIRS)[None, :]
    real = column < rank
    turning = tl.zeros([TOKENS_WIDE, PAIRS_WIDE, COLUMNS], tl.float32)
    staying = tl.zeros([TOKENS_WIDE, LEFT_WIDE, COLUMNS], tl.float32)
    for head in tl.range(0, KV_HEADS, loop_unroll_factor=4):
        own = keys + ((row * TOKENS + token[:, None]) * KV_HEADS + head) * DIM
        rows = encoder + head * DIM * rank
        if PAIRS:
            one = tl.load(own + pair[None, :] * APART, mask=seen, other=0.0).to(tl.float32)
            two = tl.load(own + pair[None, :] * APART + SECOND, mask=seen, other=0.0)
            own_turn = row_turn + row * (2 * PAIRS) + pair[None, :]
            inside = (pair < PAIRS)[None, :]
            one, two = turned_back(one, two.to(tl.float32), own_turn, inside, PAIRS)
            angle = table + (unit // PER_TURN) * (2 * PAIRS) + pair[None, :]
            one, two = turned_back(one, two, angle, inside, PAIRS)
            asked = (pair < PAIRS)[:, None] & real[None, :]
            turning += _products(one, rows + pair * APART * rank, column, asked)
            turning += _products(two, rows + (pair * APART + SECOND) * rank, column, asked)
        if LEFT:
            there = (token < TOKENS)[:, None] & (still < LEFT)[None, :]
            rest = tl.load(own + 2 * PAIRS + still[None, :], mask=there, other=0.0)
            asked = (still < LEFT)[:, None] & real[None, :]
            at = rows + (2 * PAIRS + still) * rank
            staying += _products(rest.to(tl.float32), at, column, asked)
    return tl.sum(turning, axis=1) + tl.sum(staying, axis=1)


@triton.jit
def _nibbles(found, per_step, column, rank, FINE: tl.constexpr):
    """Codes of 4 bits; of a second column, of what the first one leaves."""
    scale = tl.load(per_step + column, mask=column < rank, other=0.0)
    steps = found * scale[None, :]
    coarse = tl.minimum(tl.maximum(tl.floor(steps), -8.0), 7.0)
    left = (steps - coarse - 0.5) * 16.0
    second = tl.minimum(tl.maximum(tl.floor(left), -8.0), 7.0)
    is_second = (column >= rank - FINE) & (column < rank)
    level = tl.where(is_second[None, :], second, coarse)
    return (level + 8.0).to(tl.uint8)


@triton.jit
def _put(
    keys, unit_at, codes, encoder, per_step, table, row_turn, codes_row, codes_block, units, rank,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, LEFT: tl.constexpr,
    TOKENS: tl.constexpr, TOKENS_WIDE: tl.constexpr, PAIRS_WIDE: tl.constexpr,
    LEFT_WIDE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, FINE: tl.constexpr,
    PER_TURN: tl.constexpr, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one row's unit."""
    row, unit = tl.program_id(1).to(tl.int64), tl.load(unit_at)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS_WIDE)
    found = _components(
        keys, encoder, table, row_turn, row, unit, column, rank,
        KV_HEADS, DIM, PAIRS, LEFT, TOKENS, TOKENS_WIDE, PAIRS_WIDE, LEFT_WIDE, PER_TURN,
        INTERLEAVED, COLUMNS,
    )  # fmt: skip
    line = token[:, None] * units + unit % units
    to = codes + row * codes_row + (unit // units) * codes_block + line * WIDTH + column[None, :]
    inside = (token < TOKENS)[:, None] & (column < WIDTH)[None, :]
    if BITS == 4:
        low = _nibbles(found, per_step, column, rank, FINE)
        found = _components(
            keys, encoder, table, row_turn, row, unit, column + WIDTH, rank,
            KV_HEADS, DIM, PAIRS, LEFT, TOKENS, TOKENS_WIDE, PAIRS_WIDE, LEFT_WIDE, PER_TURN,
            INTERLEAVED, COLUMNS,
        )  # fmt: skip
        high = _nibbles(found, per_step, column + WIDTH, rank, FINE)
        tl.store(to, low | (high << 4), mask=inside)
    else:
        scale = tl.load(per_step + column, mask=column < rank, other=0.0)
        steps = found * scale[None, :]
        if BITS == 8:
            steps = tl.minimum(tl.maximum(tl.floor(steps + 0.5), -127.0), 127.0)
        tl.store(to, steps.to(codes.dtype.element_ty), mask=inside)
