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
    """`group_products.group_products` in Triton; products are of float32, as three of TF32."""
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
