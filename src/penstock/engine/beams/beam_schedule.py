"""Which beams run together: Algorithm 1, balanced grouping, what to load and to prefetch.

Pure functions over sets of block ids; nothing here knows where a block lies or what is in it.

Words: a beam's *blocks* are those that it reads, the partly filled last one too; its *growth* are
the slots that it needs beside them, for itself alone, until the end of the step. A partly filled
block that other beams hold as well is copied before it is written; with `share` the copy is
growth of every one of them. An id stands at most once in a beam.

Source: Wang et al., "Locality-Aware Beam Scheduling for Efficient Test-Time Compute with a
Consumer-Grade GPU", 4.1 (Algorithm 1) and 4.2 (balanced grouping, prefetch).

Departures from it, each with a switch: `follow` starts a group with the beam that shares most
with what is in fast memory already, where the paper takes any; `share` keeps one copy of a block
in fast memory for all beams of a group, where the paper keeps one for each beam (footnote 2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import BudgetError

Blocks: TypeAlias = NDArray[np.int64]
"""Ids of blocks. int64 [blocks]"""
Limit: TypeAlias = Callable[[int, int], int]
"""(groups closed so far, beams left) to the most beams of the next group."""

_NO_BLOCKS = np.zeros(0, dtype=np.int64)


class BeamRoomError(BudgetError):
    """One beam alone does not fit into fast memory; the caller knows what a block weighs.

    Attributes:
        needed_blocks: slots of the longest beam at the end of the step.
        capacity_blocks: slots that there are.
    """

    def __init__(self, needed_blocks: int, capacity_blocks: int) -> None:
        super().__init__(
            f"one beam takes {needed_blocks:,} blocks of fast memory at the end of the step, and "
            f"there is room for {capacity_blocks:,}; give more memory"
        )
        self.needed_blocks = needed_blocks
        self.capacity_blocks = capacity_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSettings:
    """How beams are grouped; the defaults without `follow` are the paper's."""

    overlap: bool = True
    """Algorithm 1: the next beam is the one that shares most with its group. False: in order."""
    balance: bool = True
    """Groups as even as they can be in the least number of rounds. False: as full as they can."""
    share: bool = False
    """A block that several beams of a group hold has one slot. False: one for each of them."""
    follow: bool = True
    """A group's first beam shares most with the group before. False: the lowest index."""


DEFAULT_SETTINGS = ScheduleSettings()


def schedule_beams(
    blocks: Sequence[Blocks],
    growth: Sequence[int] | Blocks,
    capacity_blocks: int,
    settings: ScheduleSettings = DEFAULT_SETTINGS,
    *,
    resident: Blocks | None = None,
) -> list[list[int]]:
    """Divide the beams of a step into groups that run one after the other.

    Where each beam has its own copies and all are of one length, the number of rounds is the
    least, ceil(beams / beams that fit). Otherwise it is what greedy packing takes: of the beams
    that still fit, the one with most overlap is added. That is never more than if all beams were
    as long as the longest and shared nothing, but it is not always the least: finding that is
    bin packing.

    Args:
        blocks: of each beam.
        growth: of each beam. [beams]
        capacity_blocks: slots of fast memory.
        resident: blocks that lie in fast memory now, for `settings.follow`.

    Returns:
        Indices of the beams of each group, in the order in which they were chosen; every beam
        stands once, and no group needs more than `capacity_blocks`.

    Raises:
        BeamRoomError: a single beam does not fit.
    """
    if not blocks:
        return []
    packing = _Packing(blocks, growth, capacity_blocks, settings, resident)
    needs, count = packing.needs, len(blocks)
    if needs.max() > capacity_blocks:
        raise BeamRoomError(int(needs.max()), capacity_blocks)
    most = count if needs.max() == 0 else capacity_blocks // int(needs.max())
    alike = not settings.share and needs.min() == needs.max()
    if alike or most >= count:
        rounds = -(-count // most)
        return packing.run(balanced_limit(rounds) if settings.balance else lambda _, left: most)
    full = packing.run(lambda _, left: left)
    slack = 0
    while settings.balance and slack < count:
        balanced = packing.run(balanced_limit(len(full), slack))
        if len(balanced) <= len(full):
            return balanced
        slack = max(2 * slack, 1)
    return full


def balanced_limit(rounds: int, slack: int = 0) -> Limit:
    """A limit under which `rounds` groups come out even, the smaller ones first.

    `slack` lets a group be so much larger than its share. Groups after the last round have no
    limit: their number tells the caller that the rounds did not suffice.
    """

    def limit(closed: int, left: int) -> int:
        return left if closed >= rounds - 1 else min(left // (rounds - closed) + slack, left)

    return limit


def slots_needed(
    group: Sequence[int],
    blocks: Sequence[Blocks],
    growth: Sequence[int] | Blocks,
    *,
    share: bool = False,
) -> int:
    """Slots of fast memory that a group takes until the end of the step."""
    present = _joined([blocks[beam] for beam in group])
    return len(distinct_blocks(present) if share else present) + sum(
        int(growth[beam]) for beam in group
    )


def blocks_to_load(
    group: Sequence[int], blocks: Sequence[Blocks], resident: Blocks, *, once: bool = True
) -> Blocks:
    """What a group has to load when its turn comes, in order: beam after beam.

    Args:
        blocks: of each beam.
        resident: blocks that lie in fast memory.
        once: a block that several beams of the group hold is loaded once; False: for each.
    """
    wanted = _joined([blocks[beam] for beam in group])
    if once:
        wanted = distinct_blocks(wanted)
    return wanted[~np.isin(wanted, resident)]


def keep_order(
    groups: Sequence[Sequence[int]], blocks: Sequence[Blocks], index: int, resident: Blocks
) -> Blocks:
    """Which blocks to keep in the slots that group `index` leaves free, the dearest first.

    Those that a later group reads, the soonest first, then the others; among equals those that
    came last. Victims are taken from the end. Blocks of the group itself are not among them.

    Args:
        blocks: of each beam.
        resident: blocks that lie in fast memory, in the order in which they came.
    """
    turns = [_joined([blocks[beam] for beam in group]) for group in groups[index:]]
    ids, first = np.unique(_joined(turns), return_index=True)
    uses = np.repeat(np.arange(len(turns)), [*map(len, turns)])[first]
    kept = distinct_blocks(resident[::-1])
    places = np.minimum(np.searchsorted(ids, kept), len(ids) - 1)
    use = np.where(ids[places] == kept, uses[places], len(turns))
    kept, use = kept[use > 0], use[use > 0]
    return kept[np.argsort(use, kind="stable")]


def prefetch_order(
    groups: Sequence[Sequence[int]],
    blocks: Sequence[Blocks],
    index: int,
    *,
    free_slots: int,
    resident: Blocks,
    share: bool = False,
) -> Blocks:
    """Blocks of group `index + 1` to load while group `index` runs, in the order of loading.

    Beam after beam, as the group's order has them; the last one may come out in part.

    Args:
        blocks: of each beam.
        free_slots: slots that group `index` does not need until its end.
        resident: blocks in fast memory, those of the running group among them.
        share: one slot for each block. False: every beam takes one for each of its blocks, also
            for those of which there is a copy in fast memory already, so that as many beams come
            as can then lie there.
    """
    if index + 1 >= len(groups) or free_slots <= 0:
        return _NO_BLOCKS
    wanted = _joined([blocks[beam] for beam in groups[index + 1]])
    if not share:
        wanted = wanted[:free_slots]
    wanted = distinct_blocks(wanted)
    missing = wanted[~np.isin(wanted, resident)]
    return missing[:free_slots]


class _Packing:
    """Adds beams to groups by overlap, on a bitmap of which beam holds what.

    Blocks that the same beams hold are one row of the bitmap, with their number as its weight:
    in a tree there are at most twice as many rows as beams, however long the prompt.
    """

    def __init__(
        self,
        blocks: Sequence[Blocks],
        growth: Sequence[int] | Blocks,
        capacity: int,
        settings: ScheduleSettings,
        resident: Blocks | None,
    ) -> None:
        assert len(growth) == len(blocks), (len(growth), len(blocks))
        bitmap, weights = _bitmap(blocks, _NO_BLOCKS if resident is None else resident)
        self._resident = bitmap[:, -1]
        self._weighted = bitmap[:, :-1] * weights[:, None]  # int64 [rows, beams]
        self._holds = bitmap[:, :-1]
        self._capacity = capacity
        self._settings = settings
        self.needs: Blocks = self._weighted.sum(axis=0) + np.asarray(growth, dtype=np.int64)
        """Slots of each beam alone at the end of the step. [beams]"""

    def run(self, limit: Limit) -> list[list[int]]:
        """Pack all beams; a group ends at its limit, or when no beam that is left fits."""
        unused = np.ones(len(self.needs), dtype=bool)
        before = self._resident
        groups: list[list[int]] = []
        while left := int(unused.sum()):
            group, before = self._fill(unused, before, limit(len(groups), left))
            groups.append(group)
        return groups

    def _fill(
        self, unused: NDArray[np.bool_], before: NDArray[np.bool_], most: int
    ) -> tuple[list[int], NDArray[np.bool_]]:
        """One group, struck from `unused`, and the rows of the bitmap that it holds."""
        present = np.zeros(len(self._holds), dtype=bool)
        overlap = np.zeros(len(self.needs), dtype=np.int64)
        follow = self._settings.overlap and self._settings.follow
        score = self._weighted[before].sum(axis=0) if follow else overlap
        group: list[int] = []
        free = self._capacity
        while len(group) < most:
            costs = self.needs - overlap if self._settings.share else self.needs
            best = self._pick(score, unused, costs <= free)
            if best is None:
                break
            group.append(best)
            unused[best] = False
            free -= int(costs[best])
            new = self._holds[:, best] & ~present
            present |= new
            overlap = overlap + self._weighted[new].sum(axis=0)
            score = overlap
        return group, present

    def _pick(
        self, score: Blocks, unused: NDArray[np.bool_], fits: NDArray[np.bool_]
    ) -> int | None:
        """The beam to add, or None if the group is full."""
        if not self._settings.overlap:
            first = int(unused.argmax())
            return first if unused[first] and fits[first] else None
        able = unused & fits
        best = int(np.where(able, score, -1).argmax())  # the lowest index of equals
        return best if able[best] else None


def _bitmap(blocks: Sequence[Blocks], resident: Blocks) -> tuple[NDArray[np.bool_], Blocks]:
    """Who holds what: bool [rows, beams + 1] (the last: resident), and blocks of each row."""
    ids = _joined(blocks)
    if len(resident):
        resident = distinct_blocks(resident[np.isin(resident, ids)])
    owners = np.repeat(np.arange(len(blocks) + 1), [*map(len, blocks), len(resident)])
    places, count = _numbered(np.concatenate((ids, resident)))
    bitmap = np.zeros((count, len(blocks) + 1), dtype=bool)
    bitmap[places, owners] = True
    # In order of first appearance, blocks that a branch of the tree holds stand together.
    packed = np.packbits(bitmap, axis=1)
    starts = np.flatnonzero(np.r_[count > 0, (packed[1:] != packed[:-1]).any(axis=1)])
    return bitmap[starts], np.diff(starts, append=count)


def _numbered(ids: Blocks) -> tuple[Blocks, int]:
    """Each id's number, by first appearance from 0, and how many there are."""
    if not len(ids):
        return ids, 0
    span = int(ids.max() - ids.min()) + 1
    if span > 8 * len(ids) + 65536:  # too far apart for a table
        ids = np.unique(ids, return_inverse=True)[1]
        span = int(ids.max()) + 1
    ids = ids - ids.min()
    first = np.zeros(span, dtype=np.int64)
    first[ids[::-1]] = np.arange(len(ids))[::-1]  # the last one written stays
    is_first = first[ids] == np.arange(len(ids))
    rank = np.cumsum(is_first) - 1
    return rank[first[ids]], int(rank[-1]) + 1


def _joined(blocks: Sequence[Blocks]) -> Blocks:
    return np.concatenate([_NO_BLOCKS, *blocks])


def distinct_blocks(ids: Blocks) -> Blocks:
    """Every id once, in order of first appearance."""
    return ids[np.sort(np.unique(ids, return_index=True)[1])]
