"""The Triton form of group_products(): codes are read once, in the order in which they lie."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUPS = 64
"""Groups of one program."""


def group_products(codes: Tensor, queries: Tensor, bits: int) -> Tensor:
    """`group_products.group_products` in Triton; products are of float32, as three of TF32.

    Queries of parts may be bfloat16; codes of up to 8 bits are that without rounding.
    """
    if queries.dim() == 4:
        return _by_part(codes, queries, bits)
    batch, blocks, group_tokens, groups, width = codes.shape
    assert codes.stride()[2:] == (groups * width, width, 1), "a block lies as one"
    heads, rank = queries.shape[1:]
    queries = queries.contiguous()
    out = torch.empty(batch, blocks * groups, heads, device=codes.device)
    half = (rank + 1) // 2 if bits == 4 else rank
    _products[(batch * blocks, triton.cdiv(groups, _GROUPS))](
        codes, queries, out, blocks, codes.stride(0), codes.stride(1), groups, rank,
        TOKENS=group_tokens, WIDTH=width, HALF=half, HEADS=heads,
        PADDED_HEADS=max(16, triton.next_power_of_2(heads)),
        PADDED=max(16, triton.next_power_of_2(half)), GROUPS=_GROUPS, PACKED=bits == 4, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["blocks"])
def _products(
    codes, queries, out, blocks, codes_row, codes_block, groups, rank,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The best product of each of some groups of one block with every head's query."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    head, lane = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED)
    real = (group < groups)[:, None] & (lane < WIDTH)[None, :]
    asked = (lane < HALF)[:, None] & (head < HEADS)[None, :]
    at = queries + (row * HEADS + head[None, :]) * rank + lane[:, None]
    first = tl.load(at, mask=asked & (lane < rank)[:, None], other=0.0)
    second = first
    if PACKED:
        second = tl.load(at + HALF, mask=asked & (lane + HALF < rank)[:, None], other=0.0)
    start = codes + row * codes_row + block.to(tl.int64) * codes_block
    best = tl.full([GROUPS, PADDED_HEADS], float("-inf"), tl.float32)
    for token in tl.static_range(TOKENS):
        place = start + (token * groups + group[:, None]) * WIDTH + lane[None, :]
        code = tl.load(place, mask=real, other=0)
        if PACKED:
            low = (code & 15).to(tl.float32) - 7.5
            high = (code >> 4).to(tl.float32) - 7.5
            found = tl.dot(low, first, input_precision="tf32x3")
            found += tl.dot(high, second, input_precision="tf32x3")
        else:
            found = tl.dot(code.to(tl.float32), first, input_precision="tf32x3")
        best = tl.maximum(best, found)
    to = out + ((row * blocks + block) * groups + group[:, None]) * HEADS + head[None, :]
    tl.store(to, best, mask=(group < groups)[:, None] & (head < HEADS)[None, :])


def _by_part(codes: Tensor, queries: Tensor, bits: int) -> Tensor:
    """As `group_products`, each part of the groups with queries of its own."""
    batch, blocks, group_tokens, groups, width = codes.shape
    assert codes.stride()[2:] == (groups * width, width, 1), "a block lies as one"
    parts, heads, rank = queries.shape[1:]
    assert parts % blocks == 0, (codes.shape, queries.shape)
    assert groups * blocks % parts == 0, (codes.shape, queries.shape)
    assert queries.dtype == torch.float32 or bits != 16, queries.dtype
    queries = queries.contiguous()
    out = torch.empty(batch, blocks * groups, heads, device=codes.device)
    half = (rank + 1) // 2 if bits == 4 else rank
    per_block = parts // blocks
    each = groups // per_block
    _products_of_parts[(batch * parts,)](
        codes, queries, out, blocks, codes.stride(0), codes.stride(1), rank,
        PER_BLOCK=per_block, EACH=each, EACH_WIDE=max(16, triton.next_power_of_2(each)),
        TOKENS=group_tokens, WIDTH=width, HALF=half, HEADS=heads,
        PADDED_HEADS=max(16, triton.next_power_of_2(heads)),
        PADDED=max(16, triton.next_power_of_2(half)), PACKED=bits == 4,
        WHOLE=queries.dtype == torch.float32 or not queries.is_cuda, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _multiplied(code, query, WHOLE: tl.constexpr):
    """Of bfloat16 as such; the interpreter knows no products of it, nor have its numbers less."""
    if WHOLE:
        return tl.dot(code, query.to(tl.float32), input_precision="tf32x3")
    return tl.dot(code.to(query.dtype), query)


@triton.jit(do_not_specialize=["blocks"])
def _products_of_parts(
    codes, queries, out, blocks, codes_row, codes_block, rank,
    PER_BLOCK: tl.constexpr, EACH: tl.constexpr, EACH_WIDE: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    PADDED: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The best product of each group of one part with the part's queries."""
    part = tl.program_id(0).to(tl.int64)
    row, place_in_row = part // (blocks * PER_BLOCK), part % (blocks * PER_BLOCK)
    block, number = place_in_row // PER_BLOCK, place_in_row % PER_BLOCK
    group = tl.arange(0, EACH_WIDE)
    head, lane = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED)
    real = (group < EACH)[:, None] & (lane < WIDTH)[None, :]
    asked = (lane < HALF)[:, None] & (head < HEADS)[None, :]
    at = queries + (part * HEADS + head[None, :]) * rank + lane[:, None]
    first = tl.load(at, mask=asked & (lane < rank)[:, None], other=0.0)
    second = first
    if PACKED:
        second = tl.load(at + HALF, mask=asked & (lane + HALF < rank)[:, None], other=0.0)
    start = codes + row * codes_row + block * codes_block
    best = tl.full([EACH_WIDE, PADDED_HEADS], float("-inf"), tl.float32)
    for token in tl.static_range(TOKENS):
        line = (token * PER_BLOCK + number) * EACH + group[:, None]
        code = tl.load(start + line * WIDTH + lane[None, :], mask=real, other=0)
        if PACKED:
            low = (code & 15).to(tl.float32) - 7.5
            high = (code >> 4).to(tl.float32) - 7.5
            found = _multiplied(low, first, WHOLE) + _multiplied(high, second, WHOLE)
        else:
            found = _multiplied(code.to(tl.float32), first, WHOLE)
        best = tl.maximum(best, found)
    to = out + (part * EACH + group[:, None]) * HEADS + head[None, :]
    tl.store(to, best, mask=(group < EACH)[:, None] & (head < HEADS)[None, :])
