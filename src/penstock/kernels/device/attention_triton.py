"""pool_attention() in Triton: flash-decoding over the places of a pool."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 264
"""Programs to run at least: two on each of the 132 multiprocessors of an H100 or H200."""
_BLOCK = 32
"""Places that a program reads at a time."""
_LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    query_ptr, tokens_ptr, mask_ptr, parts_ptr, maxima_ptr, sums_ptr,
    query_row, query_head, tokens_row, mask_row, places, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_WIDE: tl.constexpr,
    DIM: tl.constexpr, DIM_WIDE: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    head, dim = tl.arange(0, HEADS_WIDE), tl.arange(0, DIM_WIDE)
    real = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    first_head = kv_head * HEADS
    query_ptr += row * query_row + (first_head + head)[:, None] * query_head + dim[None, :]
    query = tl.load(query_ptr, mask=real, other=0.0).to(tokens_ptr.dtype.element_ty)
    if WIDEN:
        query = query.to(tl.float32)

    first = split.to(tl.int64) * (SPLIT_BLOCKS * BLOCK)  # 2**31 numbers are a million tokens
    tokens_ptr += row * tokens_row + first * (2 * KV_HEADS * DIM) + kv_head * DIM + dim[None, :]
    mask_ptr += row * mask_row + first
    best = tl.full((HEADS_WIDE,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS_WIDE,), tl.float32)
    part = tl.zeros((HEADS_WIDE, DIM_WIDE), tl.float32)
    for block in range(SPLIT_BLOCKS):
        place = block * BLOCK + tl.arange(0, BLOCK)
        inside = place < places - first
        loaded = inside[:, None] & (dim < DIM)[None, :]
        there = tokens_ptr + place[:, None] * (2 * KV_HEADS * DIM)
        key = tl.load(there, mask=loaded, other=0.0)
        shown = tl.load(mask_ptr + place, mask=inside, other=-float("inf"))
        value = tl.load(there + KV_HEADS * DIM, mask=loaded, other=0.0)
        # What no query sees may be anything in memory: not-a-number times zero is not zero.
        visible = shown.to(tl.float32) > -float("inf")
        value = tl.where(visible[:, None], value, 0.0).to(value.dtype)
        weighable = value
        if WIDEN:
            key, weighable = key.to(tl.float32), value.to(tl.float32)
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        logits = tl.where(visible[None, :], logits, -float("inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        safe = tl.where(new_best == -float("inf"), 0.0, new_best)
        weights = tl.exp2(logits - safe[:, None])
        scaled_down = tl.exp2(best - safe)
        total = total * scaled_down + tl.sum(weights, 1)
        part = part * scaled_down[:, None]
        weights = weights.to(value.dtype).to(weighable.dtype)
        part += tl.dot(weights, weighable, input_precision=PRECISION)
        best = new_best

    out_row = (row * KV_HEADS * HEADS + first_head + head) * SPLITS + split
    tl.store(parts_ptr + out_row[:, None] * DIM + dim[None, :], part, mask=real)
    tl.store(maxima_ptr + out_row, best, mask=head < HEADS)
    tl.store(sums_ptr + out_row, total, mask=head < HEADS)


@triton.jit
def _combine(
    parts_ptr, maxima_ptr, sums_ptr, out_ptr, lse_ptr,
    DIM: tl.constexpr, DIM_WIDE: tl.constexpr, SPLITS: tl.constexpr, SPLITS_WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS_WIDE), tl.arange(0, DIM_WIDE)
    real = split < SPLITS
    maxima = tl.load(maxima_ptr + row * SPLITS + split, mask=real, other=-float("inf"))
    sums = tl.load(sums_ptr + row * SPLITS + split, mask=real, other=0.0)
    best = tl.max(maxima, 0)
    weights = tl.exp2(maxima - tl.where(best == -float("inf"), 0.0, best))
    total = tl.sum(weights * sums, 0)
    parts = tl.load(
        parts_ptr + (row * SPLITS + split)[:, None] * DIM + dim[None, :],
        mask=real[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    divisor = tl.where(total == 0.0, 1.0, total)
    out = tl.sum(parts * weights[:, None], 0) / divisor
    tl.store(out_ptr + row * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)
    lse = tl.where(total == 0.0, -float("inf"), (best + tl.log2(divisor)) * 0.6931471805599453)
    tl.store(lse_ptr + row, lse)


def pool_attention_triton(
    query: Tensor, tokens: Tensor, mask: Tensor, scaling: float, out: Tensor
) -> Tensor:
    """Write `out`; returns the log-sum-exp, float32 [rows, heads]. See `pool_attention`."""
    rows, num_heads, dim = query.shape
    places, kv_heads = tokens.shape[1], tokens.shape[3]
    heads = num_heads // kv_heads
    assert tokens.is_contiguous()
    assert out.is_contiguous()
    assert query.stride(2) == mask.stride(1) == 1
    split_blocks, splits = _split(places, rows * kv_heads)
    parts = torch.empty(rows, num_heads, splits, dim, device=query.device)
    maxima, sums = torch.empty(2, rows, num_heads, splits, device=query.device).unbind()
    lse = torch.empty(rows, num_heads, device=query.device)
    wide = max(16, triton.next_power_of_2(dim))
    _attend[(rows * kv_heads, splits)](
        query, tokens, mask, parts, maxima, sums,
        query.stride(0), query.stride(1), tokens.stride(0), mask.stride(0), places,
        scaling * _LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, HEADS_WIDE=max(16, triton.next_power_of_2(heads)),
        DIM=dim, DIM_WIDE=wide, SPLITS=splits, SPLIT_BLOCKS=split_blocks, BLOCK=_BLOCK,
        PRECISION="ieee" if tokens.dtype == torch.float32 else "tf32",
        # The interpreter multiplies bfloat16 as if it were whole numbers.
        WIDEN=tokens.dtype == torch.bfloat16 and not tokens.is_cuda,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _combine[(rows * num_heads,)](
        parts, maxima, sums, out, lse,
        DIM=dim, DIM_WIDE=wide, SPLITS=splits, SPLITS_WIDE=triton.next_power_of_2(splits),
        num_warps=4,
    )  # fmt: skip
    return lse


def _split(places: int, problems: int) -> tuple[int, int]:
    """Blocks of each program and programs of each problem, so that the device has enough to do."""
    blocks = -(-places // _BLOCK)
    wanted = min(blocks, -(-_PROGRAMS // problems))
    blocks_each = -(-blocks // wanted)
    return blocks_each, -(-blocks // blocks_each)
