"""pool_attention() in Triton: flash-decoding over the places of a pool."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.slot_codes import coded_token_bytes

_PROGRAMS = 264
"""Programs to run at least: two on each of the 132 multiprocessors of an H100 or H200."""
_BLOCK = 32
"""Places that a program reads at a time."""
_LOG2_E = 1.4426950408889634
_OF_A_PLAN = ["coded_places", "places", "coded_splits", "splits"]
"""Sizes that differ from cache to cache: kernels of each would be compiled for seconds."""


@triton.jit
def _weigh(
    query, key, value, shown, scale, best, total, part, PRECISION: tl.constexpr, WIDEN: tl.constexpr
):
    """Add some places to a softmax, whose greatest logit, sum and weighted values go in and out."""
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
    return new_best, total, part


@triton.jit
def _numbers(codes_ptr, scales_ptr, first, scale, loaded, inside, dim, DTYPE: tl.constexpr):
    """Keys or values of tokens in 8 bits, see `kernels.slot_codes`; `first` and `scale` say where
    their codes and scales lie, in bytes and in pairs of them."""
    codes = tl.load(codes_ptr + first[:, None] + dim[None, :], mask=loaded, other=0)
    bits = tl.load(scales_ptr + scale, mask=inside, other=0).to(tl.int32) << 16
    scales = bits.to(tl.float32, bitcast=True)
    return (codes.to(tl.float32) * scales[:, None]).to(DTYPE)


@triton.jit(do_not_specialize=_OF_A_PLAN)
def _attend(
    query_ptr, codes_ptr, scales_ptr, tokens_ptr, mask_ptr, parts_ptr, maxima_ptr, sums_ptr,
    query_row, query_head, codes_row, tokens_row, mask_row, coded_places, places, scale,
    coded_splits, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_WIDE: tl.constexpr,
    DIM: tl.constexpr, DIM_WIDE: tl.constexpr, CODED_BLOCKS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The first `coded_splits` programs of a KV head have places in 8 bits, the others the rest."""
    row, kv_head = tl.program_id(0).to(tl.int64) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    head, dim = tl.arange(0, HEADS_WIDE), tl.arange(0, DIM_WIDE)
    real = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    first_head = kv_head * HEADS
    query_ptr += row * query_row + (first_head + head)[:, None] * query_head + dim[None, :]
    query = tl.load(query_ptr, mask=real, other=0.0).to(tokens_ptr.dtype.element_ty)
    if WIDEN:
        query = query.to(tl.float32)

    mask_ptr += row * mask_row
    best = tl.full((HEADS_WIDE,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS_WIDE,), tl.float32)
    part = tl.zeros((HEADS_WIDE, DIM_WIDE), tl.float32)
    if split < coded_splits:
        for block in range(CODED_BLOCKS):
            place = (split * CODED_BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
            inside = place < coded_places
            loaded = inside[:, None] & (dim < DIM)[None, :]
            there = row * codes_row + place.to(tl.int64) * (2 * KV_HEADS * (DIM + 2))
            scales = there // 2 + KV_HEADS * DIM + kv_head
            there += kv_head * DIM
            shown = tl.load(mask_ptr + place, mask=inside, other=-float("inf"))
            key = _numbers(
                codes_ptr, scales_ptr, there, scales, loaded, inside, dim,
                tokens_ptr.dtype.element_ty,
            )  # fmt: skip
            value = _numbers(
                codes_ptr, scales_ptr, there + KV_HEADS * DIM, scales + KV_HEADS, loaded, inside,
                dim, tokens_ptr.dtype.element_ty,
            )  # fmt: skip
            best, total, part = _weigh(
                query, key, value, shown, scale, best, total, part, PRECISION, WIDEN
            )
    else:
        first = (split - coded_splits).to(tl.int64) * (SPLIT_BLOCKS * BLOCK)
        # 2**31 numbers are a million tokens
        numbers_ptr = tokens_ptr + row * tokens_row + first * (2 * KV_HEADS * DIM)
        numbers_ptr += kv_head * DIM
        shown_ptr = mask_ptr + coded_places + first
        for block in range(SPLIT_BLOCKS):
            place = block * BLOCK + tl.arange(0, BLOCK)
            inside = place < places - first
            loaded = inside[:, None] & (dim < DIM)[None, :]
            there = numbers_ptr + place[:, None] * (2 * KV_HEADS * DIM) + dim[None, :]
            key = tl.load(there, mask=loaded, other=0.0)
            shown = tl.load(shown_ptr + place, mask=inside, other=-float("inf"))
            value = tl.load(there + KV_HEADS * DIM, mask=loaded, other=0.0)
            best, total, part = _weigh(
                query, key, value, shown, scale, best, total, part, PRECISION, WIDEN
            )

    out_row = (row * KV_HEADS * HEADS + first_head + head) * splits + split
    tl.store(parts_ptr + out_row[:, None] * DIM + dim[None, :], part, mask=real)
    tl.store(maxima_ptr + out_row, best, mask=head < HEADS)
    tl.store(sums_ptr + out_row, total, mask=head < HEADS)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    parts_ptr, maxima_ptr, sums_ptr, out_ptr, lse_ptr, splits,
    DIM: tl.constexpr, DIM_WIDE: tl.constexpr, SPLITS_WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS_WIDE), tl.arange(0, DIM_WIDE)
    real = split < splits
    maxima = tl.load(maxima_ptr + row * splits + split, mask=real, other=-float("inf"))
    sums = tl.load(sums_ptr + row * splits + split, mask=real, other=0.0)
    best = tl.max(maxima, 0)
    weights = tl.exp2(maxima - tl.where(best == -float("inf"), 0.0, best))
    total = tl.sum(weights * sums, 0)
    parts = tl.load(
        parts_ptr + (row * splits + split)[:, None] * DIM + dim[None, :],
        mask=real[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    divisor = tl.where(total == 0.0, 1.0, total)
    out = tl.sum(parts * weights[:, None], 0) / divisor
    tl.store(out_ptr + row * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)
    lse = tl.where(total == 0.0, -float("inf"), (best + tl.log2(divisor)) * 0.6931471805599453)
    tl.store(lse_ptr + row, lse)


def pool_attention_triton(
    query: Tensor, tokens: Tensor, mask: Tensor, scaling: float, out: Tensor,
    codes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write `out`; returns the log-sum-exp, float32 [rows, heads]. See `pool_attention`."""
    rows, num_heads, dim = query.shape
    places, kv_heads = tokens.shape[1], tokens.shape[3]
    heads = num_heads // kv_heads
    assert tokens.is_contiguous()
    assert out.is_contiguous()
    assert query.stride(2) == mask.stride(1) == 1
    coded_places = coded_blocks = coded_splits = 0
    coded = tokens.view(torch.uint8)  # which no program reads then
    if codes is not None:
        assert codes.is_contiguous()
        assert codes.shape[2] == coded_token_bytes(kv_heads, dim)
        coded, coded_places = codes, codes.shape[1]
        coded_blocks, coded_splits = _split(coded_places, rows * kv_heads)
    assert mask.shape[1] >= coded_places + places
    split_blocks, splits = _split(places, rows * kv_heads)
    splits += coded_splits
    parts = torch.empty(rows, num_heads, splits, dim, device=query.device)
    maxima, sums = torch.empty(2, rows, num_heads, splits, device=query.device).unbind()
    lse = torch.empty(rows, num_heads, device=query.device)
    wide = max(16, triton.next_power_of_2(dim))
    _attend[(rows * kv_heads, splits)](
        query, coded.view(torch.int8), coded.view(torch.int16), tokens, mask, parts, maxima, sums,
        query.stride(0), query.stride(1), coded.stride(0), tokens.stride(0), mask.stride(0),
        coded_places, places, scaling * _LOG2_E, coded_splits, splits,
        HEADS=heads, KV_HEADS=kv_heads, HEADS_WIDE=max(16, triton.next_power_of_2(heads)),
        DIM=dim, DIM_WIDE=wide, CODED_BLOCKS=coded_blocks, SPLIT_BLOCKS=split_blocks, BLOCK=_BLOCK,
        PRECISION="ieee" if tokens.dtype == torch.float32 else "tf32",
        # The interpreter multiplies bfloat16 as if it were whole numbers.
        WIDEN=tokens.dtype == torch.bfloat16 and not tokens.is_cuda,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _combine[(rows * num_heads,)](
        parts, maxima, sums, out, lse, splits,
        DIM=dim, DIM_WIDE=wide, SPLITS_WIDE=triton.next_power_of_2(splits),
        num_warps=4,
    )  # fmt: skip
    return lse


def _split(places: int, problems: int) -> tuple[int, int]:
    """Blocks of each program and programs of each problem, so that the device has enough to do.

    Blocks are a power of two, since a kernel is compiled for each of their numbers.
    """
    blocks = -(-places // _BLOCK)
    wanted = min(blocks, -(-_PROGRAMS // problems))
    blocks_each: int = triton.next_power_of_2(-(-blocks // wanted))
    return blocks_each, -(-blocks // blocks_each)
