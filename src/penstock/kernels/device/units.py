"""score_units() and select_tokens(): ranking units and taking tokens without leaving the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton
from penstock.kernels.unit_selection import (
    renew_units,
    taken_tokens,
    unit_scores,
    unit_weights,
)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSums:
    """Logarithms of sums of exponentials, of each head. All float32 [rows, heads of a row]"""

    attended: Tensor
    """Of all that it attended to in the step before; minus infinity: not known."""
    before: Tensor
    """Of all units' tokens in the step before, as they are estimated."""
    now: Tensor
    """The same, of this step."""

    @classmethod
    def allocate(cls, rows: int, heads: int, device: torch.device) -> "HeadSums":
        """Make the tensors; nothing is known."""
        made = cls(**{
            name: torch.empty(rows, heads, dtype=torch.float32, device=device)
            for name in ("attended", "before", "now")
        })  # fmt: skip
        made.forget()
        return made

    def forget(self) -> None:
        """The next step is a first one."""
        self.attended.fill_(-torch.inf)
        self.before.zero_()
        self.now.zero_()


@dataclass(frozen=True, kw_only=True, slots=True)
class Upkeep:
    """When a row that is not due selects anew, and what it has."""

    current: Tensor
    """Tokens of each unit that are selected. int32 [rows, capacity]"""
    renewed: Tensor
    """Selections of each row so far. int64 [rows]"""
    lost: Tensor
    """What new selections would have gained since the newest one, added up. float32 [rows]"""
    lost_mass: float
    """A row that has lost more than this is due."""
    keep: float
    """See `unit_selection.renew_units`."""
    sums: HeadSums
    """Those of this step become those of the step before."""

    @classmethod
    def allocate(
        cls, rows: int, heads: int, capacity: int, device: torch.device, *, lost_mass: float,
        keep: float,
    ) -> "Upkeep":  # fmt: skip
        """Make the tensors; nothing is selected."""
        return cls(
            current=torch.zeros(rows, capacity, dtype=torch.int32, device=device),
            renewed=torch.zeros(rows, dtype=torch.int64, device=device),
            lost=torch.zeros(rows, dtype=torch.float32, device=device), lost_mass=lost_mass,
            keep=keep, sums=HeadSums.allocate(rows, heads, device),
        )  # fmt: skip

    @staticmethod
    def num_bytes(rows: int, heads: int, capacity: int) -> int:
        """Bytes of the tensors, for the ledger."""
        return rows * (4 * capacity + 12 * heads + 12)


def score_units(
    query: Tensor, means: Tensor, sizes: Tensor, count: Tensor, scaling: float,
    due: Tensor | None, out: Tensor, scratch: UnitScratch | None = None,
    spread: Tensor | None = None, sums: HeadSums | None = None,
) -> None:  # fmt: skip
    """Score the units of the rows that retrieve: softmax over units, mean over the row's heads.

    Source: LouisKV, appendix B (A_t). `unit_selection.unit_scores`, in place.

    Args:
        query: post-RoPE; the last dimension is contiguous. [rows, heads of a row, head_dim]
        means: one index vector per unit; contiguous. [rows, capacity, head_dim]
        sizes: tokens of each unit that may be taken. int32 [rows, capacity]
        count: units in use; those behind them stay out. int32 [rows]
        scaling: factor on the logits.
        due: rows to score; the others keep what they have; None: all. bool [rows]
        out: the scores, minus one where a unit is empty or not in use. float32 [rows, capacity]
        scratch: of the same rows, heads and capacity; None: made in the call.
        spread: half the variance of a component of each unit's keys, as `unit_scores` has it from
            `squares`; None: units are ranked by their means alone. float32 [rows, capacity]
        sums: heads are weighed by them, as `unit_scores` has it; `now` is written.
    """
    arguments = (query, means, sizes, count, scaling, due, out, scratch, spread, sums)
    if uses_triton(query):
        from penstock.kernels.device import units_triton

        units_triton.score_units(*arguments)
    else:
        score_units_twin(*arguments)


def score_units_twin(
    query: Tensor, means: Tensor, sizes: Tensor, count: Tensor, scaling: float,
    due: Tensor | None, out: Tensor, scratch: UnitScratch | None = None,
    spread: Tensor | None = None, sums: HeadSums | None = None,
) -> None:  # fmt: skip
    """The meaning of `score_units` in plain torch; scores all rows and keeps those that are due."""
    squares = None
    if spread is not None:
        squares = 2 * means.shape[2] * spread + means.float().square().sum(dim=2)
    weights = None if sums is None else unit_weights(sums.before, sums.attended)
    scores = unit_scores(
        query, means, _sizes_in_use(sizes, count), scaling, squares=squares, weights=weights,
        sums=None if sums is None else sums.now,
    )  # fmt: skip
    out.copy_(scores if due is None else torch.where(due.unsqueeze(1), scores, out))


def select_tokens(
    scores: Tensor, first: Tensor, sizes: Tensor, count: Tensor, members: Tensor, due: Tensor,
    ids: Tensor, valid: Tensor, scratch: UnitScratch | None = None, upkeep: Upkeep | None = None,
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
        due: rows to select for; the others keep what they have, but with `upkeep`: then it also
            receives the rows that select. bool [rows]
        ids: positions taken, real ones first, the rest 0. int32 [rows, budget]
        valid: which of them are real. bool [rows, budget]
        scratch: of the same rows and capacity; None: made in the call.
        upkeep: lets rows become due, and is brought up to date; `scores` are then of all rows.
    """
    arguments = (scores, first, sizes, count, members, due, ids, valid, scratch, upkeep)
    if uses_triton(scores):
        from penstock.kernels.device import units_triton

        units_triton.select_tokens(*arguments)
    else:
        select_tokens_twin(*arguments)


def select_tokens_twin(
    scores: Tensor, first: Tensor, sizes: Tensor, count: Tensor, members: Tensor, due: Tensor,
    ids: Tensor, valid: Tensor, scratch: UnitScratch | None = None, upkeep: Upkeep | None = None,
) -> None:  # fmt: skip
    """The meaning of `select_tokens` in plain torch: one sort of the units, one search a token."""
    budget = ids.shape[1]
    sizes = _sizes_in_use(sizes, count)
    current = torch.zeros_like(sizes) if upkeep is None else upkeep.current
    keep = 1.0 if upkeep is None else upkeep.keep
    taken, gain = renew_units(scores, sizes, current, budget, keep)
    if upkeep is not None:
        upkeep.lost.add_(gain.clamp_min(0.0))
        due.logical_or_(upkeep.lost > upkeep.lost_mass)
        upkeep.lost.masked_fill_(due, 0.0)
        upkeep.sums.before.copy_(upkeep.sums.now)
        current.copy_(torch.where(due.unsqueeze(1), taken.to(current.dtype), current))
        upkeep.renewed.add_(due)
    chosen, real = taken_tokens(taken, first, members, budget)
    ids.copy_(torch.where(due.unsqueeze(1), chosen.to(ids.dtype), ids))
    valid.copy_(torch.where(due.unsqueeze(1), real, valid))


def _sizes_in_use(sizes: Tensor, count: Tensor) -> Tensor:
    """Tokens that may be taken of each unit, zero behind the units in use."""
    units = torch.arange(sizes.shape[1], device=sizes.device)
    return sizes.clamp_min(0).masked_fill(units >= count.unsqueeze(1), 0)
