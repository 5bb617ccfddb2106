"""group_shares() in Triton: each block's maxima and sums, then all blocks' shares; two launches."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Numbers that one program reads."""


def group_shares_triton(logits: Tensor, end: Tensor, *, squares: bool = False) -> Tensor:
    """`group_shares.group_shares` in Triton, in two passes over blocks."""
    batch, groups, heads = logits.shape
    assert logits.stride()[1:] == (heads, 1), "the heads of a group lie side by side"
    wide = triton.next_power_of_2(heads)
    block = max(16, _TILE // wide)
    blocks = triton.cdiv(groups, block)
    most = triton.next_power_of_2(blocks)  # or each length of a cache would have its own kernel
    partial = torch.empty(2, batch, blocks, heads, dtype=torch.float32, device=logits.device)
    out = torch.empty(batch, groups, dtype=torch.float32, device=logits.device)
    sizes = {"HEADS": heads, "HEADS_WIDE": wide, "BLOCK": block}
    _largest[(blocks, batch)](
        logits, end, partial[0], partial[1], logits.stride(0), groups, num_warps=4, **sizes
    )
    _shares[(blocks, batch)](
        logits, end, partial[0], partial[1], out, logits.stride(0), groups,
        blocks, MOST_BLOCKS=most, BLOCKS_WIDE=max(1, min(_TILE // wide, most)),
        SQUARES=squares, num_warps=4, **sizes,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["groups"])
def _largest(
    logits, end, largest, total, logits_row, groups,
    HEADS: tl.constexpr, HEADS_WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each head's maximum and sum of exponentials over one block of groups."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    head = tl.arange(0, HEADS_WIDE)
    group = block * BLOCK + tl.arange(0, BLOCK)
    seen = (group < groups) & (group < tl.load(end))
    there = logits + row * logits_row + group[:, None] * HEADS + head[None, :]
    whole = seen[:, None] & (head < HEADS)[None, :]
    value = tl.load(there, mask=whole, other=float("-inf"))
    maximum = tl.max(value, axis=0)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    at = (row * tl.num_programs(0) + block) * HEADS + head
    tl.store(largest + at, maximum, mask=head < HEADS)
    tl.store(total + at, tl.sum(tl.exp(value - shift[None, :]), axis=0), mask=head < HEADS)


@triton.jit(do_not_specialize=["groups", "blocks"])
def _shares(
    logits, end, largest, total, out, logits_row, groups, blocks,
    HEADS: tl.constexpr, HEADS_WIDE: tl.constexpr, BLOCK: tl.constexpr,
    MOST_BLOCKS: tl.constexpr, BLOCKS_WIDE: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """What the groups of one block have of the softmax over all blocks, all heads together."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    head = tl.arange(0, HEADS_WIDE)
    shift = tl.full([HEADS_WIDE], float("-inf"), tl.float32)
    whole = tl.zeros([HEADS_WIDE], tl.float32)
    for first in range(0, MOST_BLOCKS, BLOCKS_WIDE):
        other = first + tl.arange(0, BLOCKS_WIDE)
        real = (other < blocks)[:, None] & (head < HEADS)[None, :]
        at = (row * blocks + other[:, None]) * HEADS + head[None, :]
        maxima = tl.load(largest + at, mask=real, other=float("-inf"))
        sums = tl.load(total + at, mask=real, other=0.0)
        higher = tl.maximum(shift, tl.max(maxima, axis=0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        whole = whole * tl.exp(shift - safe) + tl.sum(sums * tl.exp(maxima - safe[None, :]), axis=0)
        shift = higher
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    per_whole = tl.where(whole > 0, 1.0 / tl.where(whole > 0, whole, 1.0), 0.0)
    group = block * BLOCK + tl.arange(0, BLOCK)
    seen = (group < groups) & (group < tl.load(end))
    there = logits + row * logits_row + group[:, None] * HEADS + head[None, :]
    value = tl.load(there, mask=seen[:, None] & (head < HEADS)[None, :], other=float("-inf"))
    shares = tl.exp(value - shift[None, :]) * per_whole[None, :]
    score = tl.sqrt(tl.sum(shares * shares, axis=1)) if SQUARES else tl.sum(shares, axis=1)
    tl.store(out + row * groups + group, score, mask=group < groups)
