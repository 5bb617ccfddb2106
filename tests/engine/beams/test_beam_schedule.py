"""Groups: Algorithm 1 as it is printed, balance, capacity, and what is loaded, kept, prefetched."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.core.errors import BudgetError
from penstock.engine.beams.beam_schedule import (
    BeamRoomError,
    Blocks,
    ScheduleSettings,
    blocks_to_load,
    keep_order,
    prefetch_order,
    schedule_beams,
    slots_needed,
)

PAPER = ScheduleSettings(follow=False)
OPTIONS = [
    ScheduleSettings(overlap=overlap, balance=balance, share=share, follow=follow)
    for overlap in (False, True)
    for balance in (False, True)
    for share in (False, True)
    for follow in (False, True)
]


def ids(*numbers: int) -> Blocks:
    return np.array(numbers, dtype=np.int64)


def algorithm_1(kv_blocks: Sequence[set[int]], sizes: Sequence[int]) -> list[list[int]]:
    """The pseudocode, line by line, over sets; a size for each group."""
    unused = set(range(len(kv_blocks)))
    groups: list[list[int]] = []
    while unused:
        cur: list[int] = []
        while len(cur) < sizes[len(groups)] and unused:
            union = set().union(*(kv_blocks[j] for j in cur))
            best = max(sorted(unused), key=lambda i: len(kv_blocks[i] & union))
            cur.append(best)
            unused.remove(best)
        groups.append(cur)
    return groups


@st.composite
def beams(draw: st.DrawFn, alike: bool = False, most: int = 14) -> list[Blocks]:
    """Blocks of some beams: paths of a tree, or any sets; ids close together or far apart."""
    count = draw(st.integers(1, most))
    length = draw(st.integers(1, 6))
    scale = draw(st.sampled_from([1, 1, 10**9]))
    if draw(st.booleans()):
        paths: list[list[int]] = [[0]] * count
        fresh = 1
        for _ in range(length):
            paths = [paths[draw(st.integers(0, count - 1))] + [fresh + i] for i in range(count)]
            fresh += count
    else:
        one = st.lists(
            st.integers(0, 30), unique=True, min_size=length if alike else 0, max_size=length
        )
        paths = [draw(one) for _ in range(count)]
    if not alike:
        paths = [path[: draw(st.integers(0, len(path)))] for path in paths]
    return [np.array(path, dtype=np.int64) * scale for path in paths]


def needed(group: Sequence[int], blocks: list[Blocks], growth: list[int], share: bool) -> int:
    held = [blocks[beam].tolist() for beam in group]
    kept = len(set().union(*held)) if share else sum(map(len, held))
    return kept + sum(growth[beam] for beam in group)


def alike(blocks: list[Blocks]) -> tuple[list[int], int]:
    """(growth of each beam that makes all need the same, that need)"""
    need = max(1, *map(len, blocks))
    return [need - len(each) for each in blocks], need


def sizes_of(num_beams: int, most: int, balance: bool) -> list[int]:
    """Sizes of the groups of beams of which `most` fit: even, smaller ones first, or full."""
    if not balance:
        whole, rest = divmod(num_beams, most)
        return [most] * whole + [rest] * (rest > 0)
    rounds = -(-num_beams // most)
    return [(num_beams + i) // rounds for i in range(rounds)]


@given(beams(), st.data(), st.booleans())
def test_groups_are_those_of_the_pseudocode(
    blocks: list[Blocks], data: st.DataObject, balance: bool
) -> None:
    most = data.draw(st.integers(1, len(blocks)))
    growth, need = alike(blocks)
    options = ScheduleSettings(balance=balance, follow=False)
    capacity = need * most + data.draw(st.integers(0, need - 1))
    printed = algorithm_1(
        [set(each.tolist()) for each in blocks], sizes_of(len(blocks), most, balance)
    )
    assert schedule_beams(blocks, growth, capacity, options) == printed


def in_groups_of(most: int, blocks: list[Blocks]) -> list[list[int]]:
    growth, need = alike(blocks)
    return schedule_beams(blocks, growth, need * most, PAPER)


def test_ties_go_to_the_lowest_index_and_overlap_decides() -> None:
    blocks = [ids(0, 1), ids(0, 2), ids(0, 1, 3), ids(9), ids(9, 8), ids(9, 7)]
    assert in_groups_of(3, blocks) == [[0, 2, 1], [3, 4, 5]]
    assert in_groups_of(2, [ids(1), ids(2), ids(3)]) == [[0], [1, 2]]


def test_figure_8_beams_with_a_common_prefix_share_a_group() -> None:
    # Fig. 8 has six beams and room for three: 1 to 4 are of one branch, 5 and 6 of the other.
    blocks = [
        ids(0, 1, 2, 3), ids(0, 1, 2, 4), ids(0, 5, 6, 7), ids(0, 1, 2, 8), ids(0, 5, 6, 9),
        ids(0, 5, 6, 10),
    ]  # fmt: skip
    assert in_groups_of(3, blocks) == [[0, 1, 3], [2, 4, 5]]


@pytest.mark.parametrize(
    ("beams", "most", "balanced", "greedy"),
    [
        (16, 7, [5, 5, 6], [7, 7, 2]),  # the paper's example
        (12, 6, [6, 6], [6, 6]),
        (5, 9, [5], [5]),
        (7, 1, [1] * 7, [1] * 7),
        (0, 3, [], []),
    ],
)
def test_sizes(beams: int, most: int, balanced: list[int], greedy: list[int]) -> None:
    blocks = [ids(beam) for beam in range(beams)]
    for balance, expected in ((True, balanced), (False, greedy)):
        options = ScheduleSettings(balance=balance)
        groups = schedule_beams(blocks, [0] * beams, most, options)
        assert [len(group) for group in groups] == expected


@settings(max_examples=60)
@given(beams(), st.data(), st.sampled_from(OPTIONS))
def test_every_beam_runs_once_and_no_group_is_too_large(
    blocks: list[Blocks], data: st.DataObject, options: ScheduleSettings
) -> None:
    growth = data.draw(st.lists(st.integers(0, 3), min_size=len(blocks), max_size=len(blocks)))
    longest = max(len(each) + more for each, more in zip(blocks, growth, strict=True))
    capacity = data.draw(st.integers(longest, longest * (len(blocks) + 1) + 1))
    resident = np.array(data.draw(st.lists(st.integers(0, 99), unique=True)), dtype=np.int64)
    groups = schedule_beams(blocks, growth, capacity, options, resident=resident)
    assert sorted(beam for group in groups for beam in group) == list(range(len(blocks)))
    for group in groups:
        assert 0 < needed(group, blocks, growth, options.share) <= capacity or longest == 0
        assert slots_needed(group, blocks, growth, share=options.share) == needed(
            group, blocks, growth, options.share
        )
    if options.overlap:
        most = len(blocks) if longest == 0 else capacity // longest
        assert len(groups) <= -(-len(blocks) // most)


@given(beams(alike=True), st.integers(0, 3), st.data())
def test_rounds_are_the_least_and_balance_keeps_them(
    blocks: list[Blocks], more: int, data: st.DataObject
) -> None:
    growth, need = [more] * len(blocks), len(blocks[0]) + more
    most = data.draw(st.integers(1, len(blocks)))
    capacity = need * most + data.draw(st.integers(0, need - 1))
    rounds = -(-len(blocks) // most)
    for balance in (True, False):
        options = ScheduleSettings(balance=balance, follow=False)
        assert len(schedule_beams(blocks, growth, capacity, options)) == rounds
    shared = schedule_beams(blocks, growth, capacity, ScheduleSettings(share=True))
    assert len(shared) <= rounds


@given(beams(), st.integers(0, 20), st.sampled_from([o for o in OPTIONS if o.balance]))
def test_balance_costs_no_round(blocks: list[Blocks], more: int, options: ScheduleSettings) -> None:
    growth = [1] * len(blocks)
    capacity = max(map(len, blocks)) + 1 + more
    full = ScheduleSettings(
        overlap=options.overlap, balance=False, share=options.share, follow=options.follow
    )
    rounds = len(schedule_beams(blocks, growth, capacity, options))
    assert rounds <= len(schedule_beams(blocks, growth, capacity, full))


def test_balance_evens_groups_of_beams_that_differ() -> None:
    blocks = [np.arange(100 * i, 100 * i + 2 + i % 3) for i in range(12)]  # 36 blocks
    for share in (False, True):
        options = ScheduleSettings(share=share)
        sizes = [len(group) for group in schedule_beams(blocks, [0] * 12, 26, options)]
        assert sizes == [6, 6]


def test_sharing_lets_more_beams_in() -> None:
    prompt = list(range(20))
    blocks = [ids(*prompt, 100 + i) for i in range(8)]
    assert len(schedule_beams(blocks, [1] * 8, 44)) == 4
    assert len(schedule_beams(blocks, [1] * 8, 44, ScheduleSettings(share=True))) == 1
    # 20 + 8 * 2 slots are the least that holds them all.
    assert len(schedule_beams(blocks, [1] * 8, 36, ScheduleSettings(share=True))) == 1
    assert len(schedule_beams(blocks, [1] * 8, 35, ScheduleSettings(share=True))) == 2


def test_without_overlap_beams_run_in_their_order() -> None:
    blocks = [ids(0, 1), ids(2, 3), ids(0, 1), ids(2, 3)]
    options = ScheduleSettings(overlap=False)
    assert schedule_beams(blocks, [0] * 4, 4, options) == [[0, 1], [2, 3]]
    assert schedule_beams(blocks, [0] * 4, 4) == [[0, 2], [1, 3]]


def test_a_group_follows_the_one_before() -> None:
    blocks = [ids(0, 1), ids(5, 6), ids(0, 2), ids(0, 3), ids(5, 7), ids(5, 8)]
    options = ScheduleSettings(follow=True)
    assert schedule_beams(blocks, [0] * 6, 4, PAPER) == [[0, 2], [1, 4], [3, 5]]
    assert schedule_beams(blocks, [0] * 6, 4, options)[1][0] == 3
    assert schedule_beams(blocks, [0] * 6, 4, options, resident=ids(8, 5))[0] == [5, 1]
    assert schedule_beams(blocks, [0] * 6, 4, PAPER, resident=ids(8, 5))[0] == [0, 2]


def test_a_beam_that_does_not_fit() -> None:
    with pytest.raises(BeamRoomError, match="takes 5 blocks") as caught:
        schedule_beams([ids(1), ids(2, 3, 4)], [0, 2], 4)
    assert (caught.value.needed_blocks, caught.value.capacity_blocks) == (5, 4)
    assert isinstance(caught.value, BudgetError)
    assert schedule_beams([ids(1), ids(2, 3, 4)], [0, 2], 5) == [[0], [1]]


def test_nothing_to_do() -> None:
    assert schedule_beams([], [], 4) == []
    assert schedule_beams([ids(), ids()], [0, 0], 0) == [[0, 1]]


@given(beams(), st.sets(st.integers(0, 30)), st.data())
@example([np.arange(3), np.arange(2)], {0}, None)
def test_what_a_group_loads(
    blocks: list[Blocks], there: set[int], data: st.DataObject | None
) -> None:
    group = (
        list(range(len(blocks))) if data is None else data.draw(st.permutations(range(len(blocks))))
    )
    wanted = [block for beam in group for block in blocks[beam].tolist()]
    resident = np.array(sorted(there), dtype=np.int64)
    loads = blocks_to_load(group, blocks, resident).tolist()
    assert loads == [block for block in dict.fromkeys(wanted) if block not in there]
    every = blocks_to_load(group, blocks, resident, once=False).tolist()
    assert every == [block for block in wanted if block not in there]


def test_what_is_needed_soonest_is_kept() -> None:
    blocks = [ids(0, 1), ids(0, 2), ids(0, 3, 4), ids(0, 3, 5)]
    groups = [[0], [1], [2], [3]]
    there = ids(5, 4, 3, 2, 1, 0)
    # Group 1 holds 0 and 2; then 3 and 4 are read, then 5; 1 has had its turn.
    assert keep_order(groups, blocks, 1, there).tolist() == [3, 4, 5, 1]
    assert keep_order(groups, blocks, 3, there).tolist() == [1, 2, 4]  # the last that came first
    assert keep_order(groups, blocks, 0, ids()).tolist() == []


def test_the_next_group_is_prefetched_beam_after_beam() -> None:
    blocks = [ids(0, 1), ids(0, 1, 2), ids(0, 3), ids(0, 3, 4), ids(0, 5)]
    groups = [[0, 1], [4, 3, 2]]
    held = ids(0, 1, 2)

    def order(free_slots: int, share: bool) -> list[int]:
        loads = prefetch_order(groups, blocks, 0, free_slots=free_slots, resident=held, share=share)
        return [int(block) for block in loads]

    assert order(9, share=True) == [5, 3, 4]
    assert order(2, share=True) == [5, 3]
    # Copies of their own: beam 4 takes two slots, of which one is loaded.
    assert order(2, share=False) == [5]
    assert order(4, share=False) == [5, 3]
    assert order(9, share=False) == [5, 3, 4]
    assert order(0, share=True) == []
    assert prefetch_order(groups, blocks, 1, free_slots=9, resident=held).tolist() == []
