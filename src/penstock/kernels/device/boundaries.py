"""find_boundaries() and grow_units(): segments of the answer, kept on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton
from penstock.kernels.unit_selection import query_similarity


@dataclass(frozen=True, slots=True)
class UnitState:
    """Units of one layer: clusters of the prompt, then segments, of which the last is open."""

    count: Tensor
    """Units in use; the last one is the open segment where one is open. int32 [rows]"""
    open_tokens: Tensor
    """Tokens of the open segment; 0: none is open. int32 [rows]"""
    first: Tensor
    """Where a unit's tokens that may be taken begin in `members`. int32 [rows, capacity]"""
    sizes: Tensor
    """Tokens of a unit that may be taken: those behind the window. int32 [rows, capacity]"""
    start: Tensor
    """First position that may be taken: padding and sinks come before it. int32 [rows]"""

    @classmethod
    def allocate(cls, rows: int, capacity: int, device: torch.device | str) -> "UnitState":
        """Make the tensors, all zero: no unit is in use."""

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            zeros(rows), zeros(rows), zeros(rows, capacity), zeros(rows, capacity), zeros(rows)
        )

    @staticmethod
    def num_bytes(rows: int, capacity: int) -> int:
        """Bytes of the tensors, for the ledger."""
        return 4 * rows * (3 + 2 * capacity)

    @property
    def capacity(self) -> int:
        """Units that there is room for."""
        return self.first.shape[1]


@dataclass(frozen=True, slots=True)
class UnitSpread:
    """How far the keys of a layer's units lie from their means."""

    halves: Tensor
    """Half the variance of a component of each unit's keys: their mean squared distance to their
    mean, over twice head_dim. float32 [rows, capacity]"""
    open_square: Tensor
    """Sum of the squared lengths of the open segment's keys. float32 [rows]"""

    @classmethod
    def allocate(cls, rows: int, capacity: int, device: torch.device | str) -> "UnitSpread":
        """Make the tensors, all zero."""
        return cls(
            torch.zeros(rows, capacity, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.float32, device=device),
        )

    @staticmethod
    def num_bytes(rows: int, capacity: int) -> int:
        """Bytes of the tensors, for the ledger."""
        return 4 * rows * (capacity + 1)


@dataclass(frozen=True, slots=True)
class Leaving:
    """What a step changes besides boundaries: a token leaves the window and may be taken."""

    unit_of: Tensor
    """Unit of each position, -1 for none. int16 or int32 [rows, tokens]"""
    state: UnitState
    """Its `sizes` grow by one where the token is not padding or a sink."""
    position: Tensor
    """Of the token; negative: none has left. int64 [1]"""
    first: Tensor
    """First position that may be taken. int32 [rows]"""
    end: Tensor
    """Positions from here on are in the window. int64 [1]"""
    budget: int
    """Rows with no more tokens between the two retrieve at every step: they take them all."""


def find_boundaries(
    query: Tensor, previous: Tensor, known: Tensor, last: Tensor, due_rows: Tensor,
    boundary: Tensor, position: Tensor, *, tau: float, stride: int, every: bool,
    rows_per_sequence: int, counters: Tensor, leaving: Leaving | None = None,
    only_first: bool = False,
) -> None:  # fmt: skip
    """Decide which sequences begin a segment at this step, and which rows retrieve.

    With `leaving` also let the token that has just left the window be taken: its unit is one token
    larger, and a row with few tokens retrieves (`counters` say nothing of that).

    Source: LouisKV, section 4.1 and algorithm 1, line 35 (`SemanticBoundaries`).

    Args:
        query: the step's query; the last dimension is contiguous. [rows, heads of a row, head_dim]
        previous: the query of the step before, replaced by this one; contiguous, same dtype.
        known: whether `previous` means something; becomes true. bool [sequences]
        last: position of each sequence's newest boundary, brought up to date. int64 [sequences]
        due_rows: receives which rows retrieve: those of a boundary. bool [rows]
        boundary: receives which sequences begin a segment. bool [sequences]
        position: of the step's token. int64 [1]
        tau: a mean cosine below it is a boundary.
        stride: a boundary every so many steps instead; 0: by `tau`.
        every: all rows retrieve; boundaries only cut segments.
        rows_per_sequence: rows of a sequence, which lie side by side.
        counters: grow by steps, boundaries and retrievals. int64 [sequences, 3]
        leaving: the token that leaves the window with this step; None: only boundaries.
        only_first: of boundaries, rows retrieve at a sequence's first one alone (`Upkeep`).
    """
    if uses_triton(query):
        import penstock.kernels.device.boundaries_triton as fast

        find = fast.find_boundaries
    else:
        find = find_boundaries_twin
    find(
        query, previous, known, last, due_rows, boundary, position, tau=tau, stride=stride,
        every=every, rows_per_sequence=rows_per_sequence, counters=counters, leaving=leaving,
        only_first=only_first,
    )  # fmt: skip


def find_boundaries_twin(
    query: Tensor, previous: Tensor, known: Tensor, last: Tensor, due_rows: Tensor,
    boundary: Tensor, position: Tensor, *, tau: float, stride: int, every: bool,
    rows_per_sequence: int, counters: Tensor, leaving: Leaving | None = None,
    only_first: bool = False,
) -> None:  # fmt: skip
    """The meaning of `find_boundaries` in plain torch."""
    if stride:
        changed = position - last >= stride
    else:
        changed = query_similarity(previous, query, rows_per_sequence) < tau
    boundary.copy_(~known | changed)
    due = torch.ones_like(boundary) if every else ~known if only_first else boundary.clone()
    last.copy_(torch.where(boundary, position, last))
    known.fill_(True)
    previous.copy_(query)
    due_rows.copy_(_spread(due, rows_per_sequence))
    counters[:, 0] += 1
    counters[:, 1] += boundary
    counters[:, 2] += due
    if leaving is not None:
        _leave_window(leaving.unit_of, leaving.state, leaving.position)
        due_rows.logical_or_(leaving.end - leaving.first <= leaving.budget)


def grow_units(
    keys: Tensor, boundary: Tensor, means: Tensor, open_sum: Tensor, state: UnitState,
    unit_of: Tensor, position: Tensor, rows_per_sequence: int, spread: UnitSpread | None = None,
) -> None:  # fmt: skip
    """Take the step's token into the open segment, or into a new one at a boundary.

    A full table lets the open segment go on past boundaries. Where it is full and no segment is
    open, the token belongs to no unit and is never selected: leave room for one segment. Tokens of
    a segment are expected to be their own places in `members` of `select_tokens`.

    Source: LouisKV, section 4.2 (segments of the answer), `methods/louiskv/unit_pool.py`.

    Args:
        keys: of the new token, post-RoPE; the last dimension is contiguous. [rows, head_dim]
        boundary: from `find_boundaries`. bool [sequences]
        means: index vectors; the open segment's is brought up to date. [rows, capacity, head_dim]
        open_sum: sum of the open segment's keys. float32 [rows, head_dim]
        state: brought up to date, except for `sizes` of units that grow: see `Leaving`.
        unit_of: receives the unit of the token, -1 for none. int16 or int32 [rows, tokens]
        position: of the token. int64 [1]
        rows_per_sequence: rows of a sequence, which lie side by side.
        spread: the open segment's is brought up to date; None: only means.
    """
    arguments = (
        keys, boundary, means, open_sum, state, unit_of, position, rows_per_sequence, spread
    )  # fmt: skip
    if uses_triton(keys):
        from penstock.kernels.device import boundaries_triton

        boundaries_triton.grow_units(*arguments)
    else:
        grow_units_twin(*arguments)


def grow_units_twin(
    keys: Tensor, boundary: Tensor, means: Tensor, open_sum: Tensor, state: UnitState,
    unit_of: Tensor, position: Tensor, rows_per_sequence: int, spread: UnitSpread | None = None,
) -> None:  # fmt: skip
    """The meaning of `grow_units` in plain torch."""
    cut = _spread(boundary, rows_per_sequence) | (state.open_tokens == 0)
    begins = cut & (state.count < state.capacity)
    is_open = begins | (state.open_tokens > 0)
    state.count.add_(begins)
    unit = (state.count - 1).clamp_min(0).long().unsqueeze(1)
    begins_unit = begins.unsqueeze(1)
    first = torch.maximum(position, state.start).to(torch.int32).unsqueeze(1)
    state.first.scatter_(1, unit, torch.where(begins_unit, first, state.first.gather(1, unit)))
    state.sizes.scatter_(1, unit, state.sizes.gather(1, unit).masked_fill(begins_unit, 0))
    state.open_tokens.masked_fill_(begins, 0).add_(is_open)
    open_sum.masked_fill_(begins_unit, 0.0)
    taken = keys.float().masked_fill(~is_open.unsqueeze(1), 0.0)
    open_sum.add_(taken)
    wide_mean = open_sum / state.open_tokens.clamp_min(1).unsqueeze(1)
    if spread is not None:
        spread.open_square.masked_fill_(begins, 0.0).add_(taken.square().sum(dim=1))
        square = spread.open_square / state.open_tokens.clamp_min(1)
        half = (square - wide_mean.square().sum(dim=1)).clamp_min(0.0) / (2 * keys.shape[1])
        kept = spread.halves.gather(1, unit)
        spread.halves.scatter_(1, unit, torch.where(is_open.unsqueeze(1), half.unsqueeze(1), kept))
    mean = wide_mean.to(means.dtype).unsqueeze(1)
    place = unit.unsqueeze(2).expand(-1, 1, means.shape[2])
    means.scatter_(1, place, torch.where(is_open[:, None, None], mean, means.gather(1, place)))
    at = position.expand(len(keys), 1)
    unit_of.scatter_(1, at, unit.masked_fill(~is_open.unsqueeze(1), -1).to(unit_of.dtype))


def _leave_window(unit_of: Tensor, state: UnitState, end: Tensor) -> None:
    unit = unit_of.gather(1, end.clamp_min(0).expand(len(unit_of), 1)).long()
    leaves = ((end >= 0) & (end >= state.start)).unsqueeze(1) & (unit >= 0)
    state.sizes.scatter_add_(1, unit.clamp_min(0), leaves.to(torch.int32))


def _spread(sequences: Tensor, rows_per_sequence: int) -> Tensor:
    """What holds for a sequence, for each of its rows."""
    return sequences.unsqueeze(1).expand(-1, rows_per_sequence).reshape(-1)
