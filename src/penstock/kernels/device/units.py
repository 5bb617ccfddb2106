"""score_units() and select_tokens(): ranking units and taking tokens without leaving the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton
from penstock.kernels.unit_selection import unit_scores

BLOCK_UNITS = 64
"""Units that one program of the fast kernel scores."""


@dataclass(frozen=True, slots=True)
class UnitScratch:
    """What the fast kernels need in between, made once for all layers of a shape."""

    logits: Tensor
    """float32 [rows, heads of a row, capacity]"""
    partial: Tensor
    """Largest logit and sum of exponentials of each block of units.
    float32 [2, rows, heads of a row, blocks]"""
    ends: Tensor
    """Tokens taken up to and with each unit. int32 [rows, capacity]"""

    @classmethod
    def allocate(
        cls, rows: int, heads: int, capacity: int, device: torch.device | str
    ) -> "UnitScratch":
        """Make the tensors; what is in them between two calls means nothing."""
        blocks = -(-capacity // BLOCK_UNITS)
        return cls(
            torch.empty(rows, heads, capacity, dtype=torch.float32, device=device),
            torch.empty(2, rows, heads, blocks, dtype=torch.float32, device=device),
            torch.empty(rows, capacity, dtype=torch.int32, device=device),
        )

    @staticmethod
    def num_bytes(rows: int, heads: int, capacity: int) -> int:
        """Bytes of the tensors, for the ledger."""
        return 4 * rows * (heads * (capacity + 2 * -(-capacity // BLOCK_UNITS)) + capacity)


def score_units(
    query: Tensor, means: Tensor, sizes: Tensor, count: Tensor, scaling: float, due: Tensor,
    out: Tensor, scratch: UnitScratch | None = None, spread: Tensor | None = None,
) -> None:  # fmt: skip
    """Score the units of the rows that retrieve: softmax over units, mean over the row's heads.

    Source: LouisKV, appendix B (A_t). `unit_selection.unit_scores`, in place.

    Args:
        query: post-RoPE; the last dimension is contiguous. [rows, heads of a row, head_dim]
        means: one index vector per unit; contiguous. [rows, capacity, head_dim]
        sizes: tokens of each unit that may be taken. int32 [rows, capacity]
        count: units in use; those behind them stay out. int32 [rows]
        scaling: factor on the logits.
        due: rows to score; the others keep what they have. bool [rows]
        out: the scores, minus one where a unit is empty or not in use. float32 [rows, capacity]
        scratch: of the same rows, heads and capacity; None: made in the call.
        spread: half the variance of a component of each unit's keys, as `unit_scores` has it from
            `squares`; None: units are ranked by their means alone. float32 [rows, capacity]
    """
    arguments = (query, means, sizes, count, scaling, due, out, scratch, spread)
    if uses_triton(query):
        from penstock.kernels.device import units_triton

        units_triton.score_units(*arguments)
    else:
        score_units_twin(*arguments)


def score_units_twin(
    query: Tensor, means: Tensor, sizes: Tensor, count: Tensor, scaling: float, due: Tensor,
    out: Tensor, scratch: UnitScratch | None = None, spread: Tensor | None = None,
) -> None:  # fmt: skip
    """The meaning of `score_units` in plain torch; scores all rows and keeps those that are due."""
    squares = None
    if spread is not None:
        squares = 2 * means.shape[2] * spread + means.float().square().sum(dim=2)
    scores = unit_scores(query, means, _sizes_in_use(sizes, count), scaling, squares=squares)
    out.copy_(torch.where(due.unsqueeze(1), scores, out))


def select_tokens(
    scores: Tensor, first: Tensor, sizes: Tensor, count: Tensor, members: Tensor, due: Tensor,
    ids: Tensor, valid: Tensor, scratch: UnitScratch | None = None,
) -> None:  # fmt: skip
    """Take units by falling score until exactly as many tokens are taken as `ids` has places.

    The last unit gives its first tokens only. `unit_selection.take_units`, in place and in another
    order: tokens lie by the number of their unit, then as in `members`.

    Source: LouisKV, section 4.3 (selection under a budget) and algorithm 1, line 23.

    Args:
        scores: equal ones are taken in order of unit; no not-a-numbers. float32 [rows, capacity]
        first: where each unit's tokens begin in `members`. int32 [rows, capacity]
        sizes: tokens of each unit that may be taken. int32 [rows, capacity]
        count: units in use. int32 [rows]
        members: positions, those of a unit side by side. int16 or int32 [rows, tokens]
        due: rows to select for; the others keep what they have. bool [rows]
        ids: positions taken, real ones first, the rest 0. int32 [rows, budget]
        valid: which of them are real. bool [rows, budget]
        scratch: of the same rows and capacity; None: made in the call.
    """
    arguments = (scores, first, sizes, count, members, due, ids, valid, scratch)
    if uses_triton(scores):
        from penstock.kernels.device import units_triton

        units_triton.select_tokens(*arguments)
    else:
        select_tokens_twin(*arguments)


def select_tokens_twin(
    scores: Tensor, first: Tensor, sizes: Tensor, count: Tensor, members: Tensor, due: Tensor,
    ids: Tensor, valid: Tensor, scratch: UnitScratch | None = None,
) -> None:  # fmt: skip
    """The meaning of `select_tokens` in plain torch: one sort of the units, one search a token."""
    budget = ids.shape[1]
    sizes = _sizes_in_use(sizes, count).long()
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    ranked = sizes.gather(1, order)
    before = ranked.cumsum(dim=1) - ranked
    taken = torch.zeros_like(sizes)
    taken.scatter_(1, order, torch.minimum((budget - before).clamp_min(0), ranked))
    ends = taken.cumsum(dim=1)
    places = torch.arange(budget, device=scores.device).expand(len(scores), -1).contiguous()
    # The unit in which the j-th token lies is the first one that ends behind j.
    unit = torch.searchsorted(ends, places, right=True)
    real = unit < sizes.shape[1]
    unit = unit.clamp_max(sizes.shape[1] - 1)
    where = first.gather(1, unit).long() + places - (ends - taken).gather(1, unit)
    where = where.clamp(0, members.shape[1] - 1)
    chosen = members.gather(1, where).to(ids.dtype).masked_fill(~real, 0)
    ids.copy_(torch.where(due.unsqueeze(1), chosen, ids))
    valid.copy_(torch.where(due.unsqueeze(1), real, valid))


def _sizes_in_use(sizes: Tensor, count: Tensor) -> Tensor:
    """Tokens that may be taken of each unit, zero behind the units in use."""
    units = torch.arange(sizes.shape[1], device=sizes.device)
    return sizes.clamp_min(0).masked_fill(units >= count.unsqueeze(1), 0)
