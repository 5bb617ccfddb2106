"""Triton forms of find_boundaries() and grow_units(): one short launch each."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device.boundaries import Leaving, UnitSpread, UnitState


def find_boundaries(
    query: Tensor, previous: Tensor, known: Tensor, last: Tensor, due_rows: Tensor,
    boundary: Tensor, position: Tensor, *, tau: float, stride: int, every: bool,
    rows_per_sequence: int, counters: Tensor, leaving: Leaving | None = None,
    only_first: bool = False,
) -> None:  # fmt: skip
    """`boundaries.find_boundaries` in Triton: one program a sequence, all its heads in one tile."""
    rows, heads, dim = query.shape
    together = triton.next_power_of_2(rows_per_sequence * heads)
    # Where nothing leaves, these are not looked at.
    unit_of, sizes, start = due_rows, due_rows, due_rows
    left, first, end, budget, tokens, capacity = position, due_rows, position, 0, 0, 0
    if leaving is not None:
        unit_of, sizes, start = leaving.unit_of, leaving.state.sizes, leaving.state.start
        left, first, end, budget = leaving.position, leaving.first, leaving.end, leaving.budget
        tokens, capacity = unit_of.shape[1], leaving.state.capacity
    _find_boundaries[(rows // rows_per_sequence,)](
        query, previous, known, last, due_rows, boundary, position, counters, tau, stride,
        query.stride(0), query.stride(1), unit_of, sizes, start, left, first, end, budget, tokens,
        capacity, ROWS=rows_per_sequence,
        PADDED_ROWS=triton.next_power_of_2(rows_per_sequence), HEADS=heads, TOGETHER=together,
        DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), BY_STRIDE=stride > 0, EVERY=every,
        ONLY_FIRST=only_first, LEAVES=leaving is not None,
        num_warps=8 if together * dim >= 4096 else 4,
    )  # fmt: skip


@triton.jit
def _find_boundaries(
    query, previous, known, last, due_rows, boundary, position, counters, tau, stride,
    query_row, query_head, unit_of, sizes, start, left, first, end, budget, tokens, capacity,
    ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BY_STRIDE: tl.constexpr, EVERY: tl.constexpr,
    ONLY_FIRST: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """One sequence; nothing is stored before all threads have loaded."""
    sequence = tl.program_id(0)
    head, lane = tl.arange(0, TOGETHER), tl.arange(0, PADDED_DIM)
    inside = (head < ROWS * HEADS)[:, None] & (lane < DIM)[None, :]
    row = (sequence * ROWS + head // HEADS).to(tl.int64)
    at = row * query_row + (head % HEADS) * query_head
    new = tl.load(query + at[:, None] + lane[None, :], mask=inside, other=0.0)
    kept = previous + (sequence * ROWS * HEADS + head)[:, None] * DIM + lane[None, :]
    here = tl.load(position)
    before = tl.load(last + sequence)
    first_step = tl.load(known + sequence) == 0
    cut = first_step
    counter = counters + sequence * 3
    steps, cuts, retrievals = tl.load(counter), tl.load(counter + 1), tl.load(counter + 2)
    if BY_STRIDE:
        cut = cut | (here - before >= stride)
    else:
        asked = new.to(tl.float32)
        old = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
        length = tl.maximum(tl.sqrt(tl.sum(asked * asked, axis=1)), 1e-8)
        old_length = tl.maximum(tl.sqrt(tl.sum(old * old, axis=1)), 1e-8)
        cosine = tl.sum(asked * old, axis=1) / (length * old_length)
        cut = cut | (tl.sum(cosine, axis=0) / (ROWS * HEADS) < tau)
    due = cut
    if ONLY_FIRST:
        due = first_step
    if EVERY:
        due = cut | True
    own = tl.arange(0, PADDED_ROWS)
    retrieves = tl.broadcast_to(due, [PADDED_ROWS])
    at_row = sequence * ROWS + own
    at_size, size, leaves = at_row.to(tl.int64), at_row, own < 0
    if LEAVES:
        gone = tl.load(left)
        begin = tl.load(start + at_row, mask=own < ROWS, other=0)
        leaves = (own < ROWS) & (gone >= 0) & (gone >= begin)
        unit = tl.load(unit_of + at_size * tokens + gone, mask=leaves, other=-1).to(tl.int64)
        leaves = leaves & (unit >= 0)
        at_size = at_size * capacity + unit
        size = tl.load(sizes + at_size, mask=leaves, other=0) + 1
        begin = tl.load(first + at_row, mask=own < ROWS, other=0)
        retrieves = retrieves | (tl.load(end) - begin <= budget)
    tl.debug_barrier()
    tl.store(kept, new, mask=inside)
    tl.store(boundary + sequence, cut)
    tl.store(last + sequence, tl.where(cut, here, before))
    tl.store(known + sequence, True)
    tl.store(due_rows + at_row, retrieves, mask=own < ROWS)
    if LEAVES:
        tl.store(sizes + at_size, size, mask=leaves)
    tl.store(counter, steps + 1)
    tl.store(counter + 1, cuts + cut.to(tl.int64))
    tl.store(counter + 2, retrievals + due.to(tl.int64))


def grow_units(
    keys: Tensor, boundary: Tensor, means: Tensor, open_sum: Tensor, state: UnitState,
    unit_of: Tensor, position: Tensor, rows_per_sequence: int, spread: UnitSpread | None = None,
) -> None:  # fmt: skip
    """`boundaries.grow_units` in Triton: one program a row."""
    rows, dim = keys.shape
    # Without a spread, these are not looked at.
    halves, open_square = (
        (open_sum, open_sum) if spread is None else (spread.halves, spread.open_square)
    )
    _grow_units[(rows,)](
        keys, boundary, means, open_sum, state.count, state.open_tokens, state.first, state.sizes,
        state.start, unit_of, position, halves, open_square, keys.stride(0), means.stride(0),
        state.capacity, unit_of.shape[1], ROWS=rows_per_sequence, DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim), SPREAD=spread is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _grow_units(
    keys, boundary, means, open_sum, count, open_tokens, first, sizes, start, unit_of,
    position, halves, open_square, keys_row, means_row, capacity, tokens,
    ROWS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """One row; nothing is stored before all threads have loaded."""
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    lane = tl.arange(0, PADDED_DIM)
    here = tl.load(position)
    units, length = tl.load(count + row), tl.load(open_tokens + row)
    from_position = tl.maximum(here, tl.load(start + row).to(tl.int64))
    cut = (tl.load(boundary + row // ROWS) != 0) | (length == 0)
    begins = cut & (units < capacity)
    is_open = begins | (length > 0)
    total = tl.load(open_sum + row * DIM + lane, mask=lane < DIM, other=0.0)
    key = tl.load(keys + wide * keys_row + lane, mask=lane < DIM, other=0.0).to(tl.float32)
    total = tl.where(begins, 0.0, total) + tl.where(is_open, key, 0.0)
    length = tl.where(begins, 0, length) + is_open.to(tl.int32)
    units += begins.to(tl.int32)
    unit = tl.maximum(units - 1, 0)
    square = tl.sum(key * key, axis=0)
    if SPREAD:
        before = tl.load(open_square + row)
        square = tl.where(begins, 0.0, before) + tl.where(is_open, square, 0.0)
    tl.debug_barrier()
    tl.store(count + row, units)
    tl.store(open_tokens + row, length)
    tl.store(open_sum + row * DIM + lane, total, mask=lane < DIM)
    wide_mean = total / tl.maximum(length, 1)
    mean = wide_mean.to(means.dtype.element_ty)
    tl.store(means + wide * means_row + unit * DIM + lane, mean, mask=(lane < DIM) & is_open)
    at = wide * capacity + unit
    if SPREAD:
        tl.store(open_square + row, square)
        apart = square / tl.maximum(length, 1) - tl.sum(wide_mean * wide_mean, axis=0)
        tl.store(halves + at, tl.maximum(apart, 0.0) / (2 * DIM), mask=is_open)
    tl.store(first + at, from_position.to(tl.int32), mask=begins)
    tl.store(sizes + at, 0, mask=begins)
    number = tl.where(is_open, unit, -1).to(unit_of.dtype.element_ty)
    tl.store(unit_of + wide * tokens + here, number)
