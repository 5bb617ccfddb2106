"""SegmentRuns: which units of a pool are segments, and what they become when neighbours merge."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.device.boundaries import UnitSpread, UnitState
from penstock.methods.louiskv.unit_spread import merge_units


class Merge(NamedTuple):
    """New numbers of units."""

    targets: Tensor
    """What each unit becomes. int64 [rows, capacity]"""
    segments: Tensor
    """Whether a new number may be that of a segment. bool [capacity]"""
    counts: Tensor
    """Units in use afterwards. int32 [rows]"""


class SegmentRuns:
    """Units of consecutive tokens, one behind another: those of answers, and of short inputs.

    All rows have their runs at the same numbers, though a row may have fewer units in one. The
    newest run is open: steps take numbers in it.
    """

    def __init__(self) -> None:
        self.first = 0
        """Where the open run begins."""
        self._closed: list[tuple[int, int]] = []
        """First unit and end of the runs that clusters came behind."""

    def put_clusters(self, base: int, end: int) -> None:
        """The units from `base` to `end` are clusters; the run that was open ends before them."""
        if base > self.first:
            self._closed.append((self.first, base))
        self.first = end

    def crop(self, count: int) -> None:
        """No row has more than `count` units any more, and all rows end in one run or behind it."""
        self._closed = [run for run in self._closed if run[0] < count]
        if self._closed and count <= self._closed[-1][1]:
            self.first = self._closed.pop()[0]
        self.first = min(self.first, count)

    def merge(self, count: Tensor, capacity: int) -> Merge:
        """Make one of every two neighbours in each run, but for each row's last unit.

        Args:
            count: units in use. int32 [rows]
            capacity: units that there is room for.
        """
        numbers = torch.arange(capacity, device=count.device)
        joins = torch.zeros(capacity, dtype=torch.bool, device=count.device)
        for first, end in self._closed:
            joins[first + 1 : end : 2] = True
        before = numbers - joins.cumsum(dim=0)
        segments = torch.zeros_like(joins)
        segments[before[joins]] = True
        base = self._merged_first
        segments[base:] = True
        place, closed = numbers - self.first, (count[:, None] - 1 - self.first).clamp_min(0)
        pairs = base + torch.where(place < closed, place, closed + closed % 2) // 2
        targets = torch.where(place < 0, before, pairs)
        counts = torch.where(
            count > self.first, base + (closed[:, 0] + 1) // 2 + 1,
            (before[(count - 1).clamp_min(0)] + 1).minimum(count),
        )  # fmt: skip
        return Merge(targets, segments, counts.to(torch.int32))

    @property
    def _merged_first(self) -> int:
        return self.first - sum((end - first) // 2 for first, end in self._closed)

    def merged(self) -> None:
        """All rows have the numbers that `merge` gave them."""
        self.first, shift = self._merged_first, 0
        closed, self._closed = self._closed, []
        for first, end in closed:
            joined = (end - first) // 2
            self._closed.append((first - shift, end - shift - joined))
            shift += joined

    def copy(self) -> "SegmentRuns":
        """The same runs, to go on by themselves."""
        other = SegmentRuns()
        other.first, other._closed = self.first, list(self._closed)
        return other


def merge_rows(
    merge: Merge, means: Tensor, state: UnitState, spread: UnitSpread | None, unit_of: Tensor,
    rows: slice,
) -> None:  # fmt: skip
    """Give the units of some rows their new numbers; all else is changed in place.

    Args:
        merge: of these rows.
        means: of the keys of each unit. [all rows, capacity, head_dim]
        unit_of: unit of each token that is there. [all rows, tokens]
    """
    target, length = merge.targets, unit_of.shape[1]
    units = unit_of[rows].long()
    ones = torch.ones_like(units, dtype=torch.float32)
    held = torch.zeros(target.shape, device=units.device).scatter_add_(1, units, ones)
    part = means[rows]
    wide = target.unsqueeze(-1).expand_as(part)
    sums = torch.zeros(part.shape, device=units.device)
    sums.scatter_add_(1, wide, part.float() * held.unsqueeze(-1))
    total = torch.zeros_like(held).scatter_add_(1, target, held).clamp_min_(1)
    sums /= total.unsqueeze(-1)
    if spread is not None:
        spread.halves[rows] = merge_units(spread.halves[rows], part, sums, target, held, total)
    means[rows] = sums.to(means.dtype)
    sizes = state.sizes[rows]
    state.sizes[rows] = torch.zeros_like(sizes).scatter_add_(1, target, sizes)
    numbers = torch.arange(target.shape[1], device=units.device)
    used = torch.where(numbers < state.count[rows, None], state.first[rows], length)
    first = torch.full_like(used, length).scatter_reduce_(1, target, used, "amin")
    # Of a segment the first token that may be selected, where sinks or padding come before it.
    start = state.start[rows, None]
    state.first[rows] = torch.where(merge.segments, first.maximum(start), first)
    unit_of[rows] = target.gather(1, units).to(unit_of.dtype)
    state.count[rows] = merge.counts
