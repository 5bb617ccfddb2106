"""Triton forms of score_units() and select_tokens(): two launches for scores, one for tokens."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device.units import BLOCK_UNITS, HeadSums, UnitScratch, Upkeep

COMBINED_UNITS = 256
"""Units whose scores one program puts together."""
_PROGRAMS = 528
"""Programs of a launch at most, four on each of the 132 multiprocessors of an H100 or H200. They
take the work of the rows that are due in turns: a few rows fill the device as well as all of them
do, and a step in which none is due costs as little as so many programs."""


def score_units(
    query: Tensor, means: Tensor, sizes: Tensor, count: Tensor, scaling: float,
    due: Tensor | None, out: Tensor, scratch: UnitScratch | None = None,
    spread: Tensor | None = None, sums: HeadSums | None = None,
) -> None:  # fmt: skip
    """`units.score_units` in Triton: logits block by block with each block's softmax, then all
    blocks.

    Products are of the dtype that query and means share, added up in float32; where they differ,
    of float32.
    """
    rows, heads, dim = query.shape
    capacity = sizes.shape[1]
    scratch = scratch or UnitScratch.allocate(rows, heads, capacity, query.device)
    blocks, parts = triton.cdiv(capacity, BLOCK_UNITS), triton.cdiv(capacity, COMBINED_UNITS)
    # The interpreter multiplies bfloat16 as if it were whole numbers.
    interpreted = query.dtype == torch.bfloat16 and not query.is_cuda
    wide, every = triton.next_power_of_2(rows), due is None
    due = count if due is None else due  # where every row is, it is not looked at
    known = (out, out, out) if sums is None else (sums.attended, sums.before, sums.now)
    _logits[(min(rows * blocks, _PROGRAMS),)](
        query, means, means if spread is None else spread, sizes, count, due, scratch.logits,
        scratch.partial[0], scratch.partial[1], scaling, query.stride(0), query.stride(1),
        means.stride(0), rows, capacity, blocks, ROWS=wide,
        HEADS=heads, PADDED_HEADS=max(16, triton.next_power_of_2(heads)), DIM=dim,
        PADDED_DIM=max(16, triton.next_power_of_2(dim)), BLOCK=BLOCK_UNITS,
        WIDEN=interpreted or query.dtype != means.dtype, SPREAD=spread is not None, EVERY=every,
        SHARES=sums is not None,
        num_warps=4,
    )  # fmt: skip
    _combine[(min(rows * parts, _PROGRAMS),)](
        scratch.logits, scratch.partial[0], scratch.partial[1], sizes, count, due, out, *known,
        rows, capacity, blocks, parts, ROWS=wide, HEADS=heads,
        PADDED_BLOCKS=triton.next_power_of_2(blocks), BLOCK=COMBINED_UNITS, EVERY=every,
        SHARES=sums is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _due_so_far(due, rows, ROWS: tl.constexpr, EVERY: tl.constexpr):
    """Of each row, how many are due up to and with it."""
    each = tl.arange(0, ROWS)
    if EVERY:
        return tl.minimum(each + 1, rows)
    flags = tl.load(due + each, mask=each < rows, other=0)
    return tl.cumsum((flags != 0).to(tl.int32), axis=0)


@triton.jit
def _nth_due(so_far, number):
    """The row that is due behind `number` others."""
    return tl.sum((so_far <= number).to(tl.int32), axis=0)


@triton.jit
def _logits(
    query, means, spread, sizes, count, due, logits, largest, total, scaling,
    query_row, query_head, means_row, rows, capacity, blocks, ROWS: tl.constexpr,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, SPREAD: tl.constexpr, EVERY: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """Scaled logits of blocks of units, and each head's maximum and sum over each block."""
    so_far = _due_so_far(due, rows, ROWS, EVERY)
    tiles = tl.max(so_far, axis=0) * blocks
    head, lane = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_DIM)
    tile = tl.program_id(0)
    while tile < tiles:
        row, block = _nth_due(so_far, tile // blocks), tile % blocks
        wide = row.to(tl.int64)
        asked = tl.load(
            query + wide * query_row + head[None, :] * query_head + lane[:, None],
            mask=(head < HEADS)[None, :] & (lane < DIM)[:, None], other=0.0,
        )  # fmt: skip
        if WIDEN:
            asked = asked.to(tl.float32)
        units = block * BLOCK + tl.arange(0, BLOCK)
        size = tl.load(sizes + wide * capacity + units, mask=units < capacity, other=0)
        used = (size > 0) & (units < tl.load(count + row))
        keys = tl.load(
            means + wide * means_row + units[:, None] * DIM + lane[None, :],
            mask=used[:, None] & (lane < DIM)[None, :], other=0.0,
        )  # fmt: skip
        if WIDEN:
            keys = keys.to(tl.float32)
        products = tl.dot(keys, asked, input_precision="ieee")
        products = products * scaling
        if SPREAD:
            half = tl.load(spread + wide * capacity + units, mask=used, other=0.0)
            wide_query = asked.to(tl.float32) * scaling
            products += half[:, None] * tl.sum(wide_query * wide_query, axis=0)[None, :]
        products = tl.where(used[:, None], products, float("-inf"))
        at = (wide * HEADS + head[None, :]) * capacity + units[:, None]
        tl.store(logits + at, products, mask=(head < HEADS)[None, :] & (units < capacity)[:, None])
        maximum = tl.max(products, axis=0)
        shift = tl.where(maximum == float("-inf"), 0.0, maximum)
        each = tl.exp(products - shift[None, :])
        if SHARES:
            each *= tl.maximum(size, 0)[:, None].to(tl.float32)
        share = tl.sum(each, axis=0)
        at_block = (wide * HEADS + head) * blocks + block
        tl.store(largest + at_block, maximum, mask=head < HEADS)
        tl.store(total + at_block, share, mask=head < HEADS)
        tile += tl.num_programs(0)


@triton.jit
def _combine(
    logits, largest, total, sizes, count, due, out, attended, before, now, rows, capacity,
    blocks, parts,
    ROWS: tl.constexpr, HEADS: tl.constexpr, PADDED_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    EVERY: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Scores of units: what their logits are of the softmax over all blocks, head by head, heads
    weighed by what they have on units."""
    so_far = _due_so_far(due, rows, ROWS, EVERY)
    tiles = tl.max(so_far, axis=0) * parts
    at = tl.arange(0, PADDED_BLOCKS)
    tile = tl.program_id(0)
    while tile < tiles:
        row = _nth_due(so_far, tile // parts)
        wide = row.to(tl.int64)
        units = tile % parts * BLOCK + tl.arange(0, BLOCK)
        size = tl.load(sizes + wide * capacity + units, mask=units < capacity, other=0)
        used = (size > 0) & (units < tl.load(count + row))
        score = tl.zeros([BLOCK], dtype=tl.float32)
        for head in range(HEADS):
            line = wide * HEADS + head
            maxima = tl.load(largest + line * blocks + at, mask=at < blocks, other=float("-inf"))
            sums = tl.load(total + line * blocks + at, mask=at < blocks, other=0.0)
            shift = tl.max(maxima, axis=0)
            shift = tl.where(shift == float("-inf"), 0.0, shift)
            whole = tl.sum(sums * tl.exp(maxima - shift), axis=0)
            logit = tl.load(logits + line * capacity + units, mask=used, other=float("-inf"))
            share = tl.exp(logit - shift) / tl.where(whole > 0, whole, 1.0)
            if SHARES:
                rest = tl.load(before + line) - tl.load(attended + line)
                share *= tl.exp(tl.minimum(rest, 0.0))
                if tile % parts == 0:
                    tl.store(now + line, shift + tl.log(whole))
            score += share
        scored = tl.where(used, score / HEADS, -1.0)
        tl.store(out + wide * capacity + units, scored, mask=units < capacity)
        tile += tl.num_programs(0)


def select_tokens(
    scores: Tensor, first: Tensor, sizes: Tensor, count: Tensor, members: Tensor, due: Tensor,
    ids: Tensor, valid: Tensor, scratch: UnitScratch | None = None, upkeep: Upkeep | None = None,
) -> None:  # fmt: skip
    """`units.select_tokens` in Triton: one program a row, bisection over the scores' bits, no
    sort."""
    rows, capacity = scores.shape
    ends = scores.new_empty(rows, capacity, dtype=torch.int32) if scratch is None else scratch.ends
    padded = triton.next_power_of_2(capacity)
    # Without upkeep, these are not looked at.
    current, renewed, lost, before, now = count, count, scores, scores, scores
    lost_mass, keep, heads = 0.0, 1.0, 1
    if upkeep is not None:
        current, renewed, lost = upkeep.current, upkeep.renewed, upkeep.lost
        before, now, heads = upkeep.sums.before, upkeep.sums.now, upkeep.sums.now.shape[1]
        lost_mass, keep = upkeep.lost_mass, upkeep.keep
    _select[(rows,)](
        scores, first, sizes, count, members, due, ids, valid, ends, current, renewed, lost, before,
        now, lost_mass, keep, capacity, members.shape[1], ids.shape[1], HEADS=heads,
        PADDED_HEADS=triton.next_power_of_2(heads), PADDED=padded,
        PADDED_BUDGET=triton.next_power_of_2(ids.shape[1]), STEPS=padded.bit_length() - 1,
        UPKEEP=upkeep is not None, num_warps=16 if padded >= 4096 else 8,
    )  # fmt: skip


@triton.jit
def _select(
    scores, first, sizes, count, members, due, ids, valid, ends, current, renewed, lost, before,
    now, lost_mass, keep, capacity, tokens, budget, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    PADDED: tl.constexpr, PADDED_BUDGET: tl.constexpr, STEPS: tl.constexpr, UPKEEP: tl.constexpr,
):  # fmt: skip
    """Tokens of one row: how many each unit gives, where they go, and which they are."""
    row = tl.program_id(0)
    asked = tl.load(due + row).to(tl.int32)
    if not UPKEEP:  # noqa: SIM102 - decided at compile time
        if asked == 0:
            return
    wide = row.to(tl.int64)
    unit = tl.arange(0, PADDED)
    used = (unit < capacity) & (unit < tl.load(count + row))
    score = tl.load(scores + wide * capacity + unit, mask=used, other=0.0)
    size = tl.maximum(tl.load(sizes + wide * capacity + unit, mask=used, other=0), 0)
    order = score
    has = tl.zeros([PADDED], dtype=tl.int32)
    if UPKEEP:
        has = tl.load(current + wide * capacity + unit, mask=used, other=0)
        order = tl.where(has > 0, score * keep, score)
    # Floats in order as integers: below zero bits are turned round, and there is one zero.
    bits = order.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # The largest threshold at which the units that reach it make up the budget, bit by bit.
    enough = tl.sum(tl.where(rank >= 0, size, 0), axis=0) >= budget
    threshold = tl.where(enough, 0, -2147483648)
    for step in range(31):
        trial = threshold | (1 << (30 - step))
        enough = tl.sum(tl.where(rank >= trial, size, 0), axis=0) >= budget
        threshold = tl.where(enough, trial, threshold)
    whole = tl.where(rank > threshold, size, 0)
    left = budget - tl.sum(whole, axis=0)
    equal = tl.where(rank == threshold, size, 0)
    part = tl.minimum(tl.maximum(left - (tl.cumsum(equal, axis=0) - equal), 0), equal)
    if UPKEEP:
        fresh = whole + part - tl.minimum(has, size)
        gain = tl.sum(score * fresh.to(tl.float32), axis=0)
        gone = tl.load(lost + row) + tl.maximum(gain, 0.0)
        asked = asked | (gone > lost_mass).to(tl.int32)
        head = tl.arange(0, PADDED_HEADS)
        here = tl.load(now + row * HEADS + head, mask=head < HEADS, other=0.0)
        tl.debug_barrier()
        tl.store(before + row * HEADS + head, here, mask=head < HEADS)
        tl.store(lost + row, tl.where(asked != 0, 0.0, gone))
        tl.store(due + row, asked != 0)
        if asked == 0:
            return
        tl.store(current + wide * capacity + unit, whole + part, mask=unit < capacity)
        tl.store(renewed + row, tl.load(renewed + row) + 1)
    end = tl.cumsum(whole + part, axis=0)
    total = tl.max(end, axis=0)
    line = ends + wide * capacity
    tl.store(line + unit, end, mask=unit < capacity)
    tl.debug_barrier()
    # The unit in which the j-th token lies is the first one that ends behind j.
    place = tl.arange(0, PADDED_BUDGET)
    real = place < tl.minimum(total, budget)
    below = tl.zeros([PADDED_BUDGET], dtype=tl.int32)
    for step in range(STEPS):
        trial = below + (1 << (STEPS - 1 - step))
        reached = tl.load(line + trial - 1, mask=real & (trial <= capacity), other=2147483647)
        below = tl.where(reached <= place, trial, below)
    before = tl.load(line + below - 1, mask=real & (below > 0), other=0)
    begin = tl.load(first + wide * capacity + below, mask=real, other=0)
    where = tl.minimum(tl.maximum(begin + place - before, 0), tokens - 1)
    position = tl.load(members + wide * tokens + where, mask=real, other=0).to(tl.int32)
    tl.store(ids + wide * budget + place, position, mask=place < budget)
    tl.store(valid + wide * budget + place, real, mask=place < budget)
