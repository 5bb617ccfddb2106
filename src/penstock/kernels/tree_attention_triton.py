"""tree_attention() and append_rows() in Triton: flash-decoding over pieces, then a merge."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.tree_work import TreeWork, taken

_LOG2_E = 1.4426950408889634
_TILE_BYTES = 16384
"""Of the keys that a program reads at a time, and as many of the values; float32, which no tensor
core multiplies exactly, is read by 16 tokens so that the tile fits in registers."""
_MERGED = 16
"""Parts that the merge reads at a time."""


@triton.jit(do_not_specialize=["window"])
def _attend(
    query_ptr, slots_ptr, table_ptr, rows_ptr, first_ptr, count_ptr, places_ptr, lengths_ptr,
    sums_ptr, stats_ptr, query_row, query_head, table_row, slot_step, value_step, head_step,
    scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_WIDE: tl.constexpr,
    MOST_ROWS: tl.constexpr, QUERIES_WIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One KV head of one piece of work, with the queries of all of its rows."""
    work, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lane, dim = tl.arange(0, QUERIES_WIDE) // HEADS, tl.arange(0, DIM_WIDE)
    head = kv_head * HEADS + tl.arange(0, QUERIES_WIDE) % HEADS
    row = tl.load(rows_ptr + work * MOST_ROWS + lane, mask=lane < MOST_ROWS, other=-1).to(tl.int64)
    place = tl.load(places_ptr + work * MOST_ROWS + lane, mask=lane < MOST_ROWS, other=-1)
    alive = (row >= 0) & (place >= 0)
    length = tl.load(lengths_ptr + row, mask=alive, other=0)
    earliest = length * 0
    if WINDOWED:
        earliest = tl.maximum(length - window, 0)
    # Positions that any row sees: all of them are written.
    first_block = tl.load(first_ptr + work)
    begin = tl.min(tl.where(alive, earliest, 2147483647), 0)
    begin = tl.maximum(first_block * BLOCK_TOKENS, begin)
    end = (first_block + tl.load(count_ptr + work)) * BLOCK_TOKENS
    end = tl.minimum(end, tl.max(length, 0))
    begin = tl.minimum(begin, end)  # a pipelined loop adds to it before it asks whether to begin

    real = alive[:, None] & (dim < DIM)[None, :]
    query_at = row[:, None] * query_row + head[:, None] * query_head + dim[None, :]
    query = tl.load(query_ptr + query_at, mask=real, other=0.0).to(slots_ptr.dtype.element_ty)
    if WIDEN:
        query = query.to(tl.float32)
    table_ptr += tl.load(rows_ptr + work * MOST_ROWS).to(tl.int64) * table_row
    slots_ptr += kv_head * head_step + dim[None, :]
    best = tl.full((QUERIES_WIDE,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES_WIDE,), tl.float32)
    sums = tl.zeros((QUERIES_WIDE, DIM_WIDE), tl.float32)
    for start in range(begin, end, TOKENS):
        position = start + tl.arange(0, TOKENS)
        inside = position < end
        slot = tl.load(table_ptr + position // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        at = slot * slot_step + position % BLOCK_TOKENS * DIM
        loaded = inside[:, None] & (dim < DIM)[None, :]
        key = tl.load(slots_ptr + at[:, None], mask=loaded, other=0.0)
        value = tl.load(slots_ptr + value_step + at[:, None], mask=loaded, other=0.0)
        weighable = value
        if WIDEN:
            key, weighable = key.to(tl.float32), value.to(tl.float32)
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if CAPPED:
            logits = (2.0 * tl.sigmoid(2.0 * logits) - 1.0) * cap
        seen = position[None, :] < tl.minimum(length, end)[:, None]
        if WINDOWED:
            seen = seen & (position[None, :] >= earliest[:, None])
        logits = tl.where(seen, logits, -float("inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        safe = tl.where(new_best == -float("inf"), 0.0, new_best)
        weights = tl.exp2(logits - safe[:, None])
        scaled_down = tl.exp2(best - safe)
        total = total * scaled_down + tl.sum(weights, 1)
        sums = sums * scaled_down[:, None]
        weights = weights.to(value.dtype).to(weighable.dtype)
        sums += tl.dot(weights, weighable, input_precision=PRECISION)
        best = new_best

    part = place.to(tl.int64) * (KV_HEADS * HEADS) + head
    tl.store(sums_ptr + part[:, None] * DIM + dim[None, :], sums, mask=real)
    tl.store(stats_ptr + 2 * part, best, mask=alive)
    tl.store(stats_ptr + 2 * part + 1, total, mask=alive)


@triton.jit
def _merge(
    sums_ptr, stats_ptr, parts_ptr, out_ptr, lse_ptr,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_WIDE: tl.constexpr,
    MOST_PARTS: tl.constexpr, PARTS_WIDE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The parts of one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, dim = tl.arange(0, PARTS_WIDE), tl.arange(0, DIM_WIDE)
    given = tl.load(parts_ptr + row * MOST_PARTS + part, mask=part < MOST_PARTS, other=-1)
    count = tl.sum((given >= 0).to(tl.int32), 0)
    first = row * MOST_PARTS
    stats = stats_ptr + 2 * ((first + part) * NUM_HEADS + head)
    maxima = tl.load(stats, mask=part < count, other=-float("inf"))
    totals = tl.load(stats + 1, mask=part < count, other=0.0)
    best = tl.max(maxima, 0)
    safe = tl.where(best == -float("inf"), 0.0, best)
    total = tl.sum(tl.exp2(maxima - safe) * totals, 0)
    sums = tl.zeros((AT_ONCE, DIM_WIDE), tl.float32)
    for start in range(0, count, AT_ONCE):
        some = start + tl.arange(0, AT_ONCE)
        at = (first + some) * NUM_HEADS + head
        most = tl.load(stats_ptr + 2 * at, mask=some < count, other=-float("inf"))
        there = sums_ptr + at[:, None] * DIM + dim[None, :]
        loaded = tl.load(there, mask=(some < count)[:, None] & (dim < DIM)[None, :], other=0.0)
        sums += loaded * tl.exp2(most - safe)[:, None]
    divisor = tl.where(total == 0.0, 1.0, total)
    out = tl.sum(sums, 0) / divisor
    at = row * NUM_HEADS + head
    tl.store(out_ptr + at * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)
    lse = tl.where(total == 0.0, -float("inf"), (best + tl.log2(divisor)) * 0.6931471805599453)
    tl.store(lse_ptr + at, lse)


@triton.jit
def _append(
    slots_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr,
    key_row, key_head, value_row, value_head, table_row, slot_step, value_step, head_step,
    DIM: tl.constexpr, DIM_WIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """One KV head of the new token of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    if length > 0:
        position = length - 1
        dim = tl.arange(0, DIM_WIDE)
        key = tl.load(keys_ptr + row * key_row + head * key_head + dim, mask=dim < DIM)
        value = tl.load(values_ptr + row * value_row + head * value_head + dim, mask=dim < DIM)
        slot = tl.load(table_ptr + row * table_row + position // BLOCK_TOKENS).to(tl.int64)
        there = slots_ptr + slot * slot_step + head * head_step
        there += position % BLOCK_TOKENS * DIM + dim
        tl.store(there, key, mask=dim < DIM)
        tl.store(there + value_step, value, mask=dim < DIM)


def tree_attention_triton(
    query: Tensor,
    slots: Tensor,
    work: TreeWork,
    lengths: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    window: int | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One program per piece and KV head, then one per row and head; see `tree_attention`."""
    rows, num_heads, dim = query.shape
    _, _, kv_heads, block_tokens, _ = slots.shape
    heads, (works, most_rows) = num_heads // kv_heads, work.rows.shape
    most_parts = work.parts.shape[1]
    assert query.stride(2) == work.table.stride(1) == 1
    assert slots.stride()[3:] == (dim, 1)
    space = taken(workspace, work, num_heads, dim)
    stats = space[work.parts.numel() * num_heads * dim :]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(rows, num_heads, dtype=torch.float32, device=query.device)
    wide = max(16, triton.next_power_of_2(dim))
    queries = max(16, triton.next_power_of_2(most_rows * heads))
    exact = slots.dtype == torch.float32
    _attend[(works, kv_heads)](
        query, slots, work.table, work.rows, work.first_block, work.num_blocks, work.places,
        lengths, space, stats, query.stride(0), query.stride(1), work.table.stride(0),
        *slots.stride()[:3],
        scaling / softcap if softcap else scaling * _LOG2_E, (softcap or 0.0) * _LOG2_E,
        window or 0,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_WIDE=wide, MOST_ROWS=most_rows,
        QUERIES_WIDE=queries, BLOCK_TOKENS=block_tokens,
        TOKENS=16 if exact else min(64, max(16, _TILE_BYTES // (2 * wide))),
        WINDOWED=window is not None, CAPPED=softcap is not None,
        PRECISION="ieee" if exact else "tf32",
        # The interpreter multiplies bfloat16 as if it were whole numbers.
        WIDEN=slots.dtype == torch.bfloat16 and not slots.is_cuda,
        num_warps=8 if exact or queries > 64 or wide > 128 else 4, num_stages=3,
    )  # fmt: skip
    _merge[(rows, num_heads)](
        space, stats, work.parts, out, lse,
        NUM_HEADS=num_heads, DIM=dim, DIM_WIDE=wide, MOST_PARTS=most_parts,
        PARTS_WIDE=triton.next_power_of_2(most_parts),
        AT_ONCE=min(_MERGED, triton.next_power_of_2(most_parts)), num_warps=4,
    )  # fmt: skip
    return out, lse


def append_rows_triton(
    slots: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor
) -> None:
    """One program per row and KV head; see `append_rows`."""
    rows, kv_heads, dim = keys.shape
    assert keys.stride(2) == values.stride(2) == table.stride(1) == 1
    assert slots.stride()[3:] == (dim, 1)
    _append[(rows, kv_heads)](
        slots, keys, values, table, lengths, *keys.stride()[:2], *values.stride()[:2],
        table.stride(0), *slots.stride()[:3],
        DIM=dim, DIM_WIDE=triton.next_power_of_2(dim), BLOCK_TOKENS=slots.shape[3], num_warps=1,
    )  # fmt: skip
