"""rank_units() in Triton, in one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Units of a program."""


def rank_units_triton(
    scores: Tensor, first: Tensor, end: Tensor, slot_of: Tensor | None, resident_factor: float
) -> Tensor:
    """See `rank_units.rank_units`."""
    rows, units = scores.shape
    assert scores.is_contiguous()
    assert slot_of is None or (slot_of.is_contiguous() and slot_of.shape == scores.shape)
    out = torch.empty(rows, units, dtype=torch.float32, device=scores.device)
    _rank[(triton.cdiv(units, _BLOCK), rows)](
        scores, first, end, first if slot_of is None else slot_of, out, units, resident_factor,
        BLOCK=_BLOCK, RESIDENT=slot_of is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["units"])
def _rank(
    scores, first, end, slot_of, out, units, resident_factor,
    BLOCK: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < units
    at = row * units + unit
    score = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDENT:
        slot = tl.load(slot_of + at, mask=inside, other=-1)
        score = tl.where(slot >= 0, score * resident_factor, score)
    shown = (unit >= tl.load(first + row)) & (unit < tl.load(end))
    tl.store(out + at, tl.where(shown, score, float("-inf")), mask=inside)
