"""The solver: the fastest that keeps quality, and the paper's greedy search on hand-made ground."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from penstock.core.slot_plan import SlotPlan
from penstock.devices.profile import DeviceProfile
from penstock.methods.kvswap.policy import KVSwap
from penstock.tuner.block_profile import BlockProfile, work_of
from penstock.tuner.candidates import Candidate
from penstock.tuner.solver import (
    HIDDEN_SHARE,
    Expected,
    best_solutions,
    expect,
    keeps_quality,
    paper_solution,
)

LAYERS, CONTEXT = 10, 8192
DISK = DeviceProfile(
    name="d", title="d", bandwidth=1e9, write_bandwidth=1e9, iops=1 / (50e-6 + 1e-9),
    latency_s=0.0, flash_page_bytes=1,
)  # fmt: skip
"""A request costs 50 microseconds and each byte a nanosecond."""
MISSES = {0: 1.0, 400: 0.5, 800: 0.2}
"""Share of a selection that is read, by capacity."""
GROUPS = (1, 2, 4, 8, 16)


def candidate(
    group: int, capacity: int, rank: int, kl: float | None = None, *, selected: int = 400,
    miss: float | None = None, batch: int = 1,
) -> Candidate:  # fmt: skip
    """1 KiB a token and layer."""
    slots = (capacity or selected) // group
    plan = SlotPlan(
        batch=batch, max_units=CONTEXT // group, group_tokens=group, num_slots=slots,
        selected_units=selected // group, sink_slots=1, window_slots=2,
        shared_every=int(not capacity), compact=False,
        index_bytes=LAYERS * CONTEXT * rank, fixed_bytes=0,
        unit_bytes=1024 * group, staging_slots=0, pool_bytes=LAYERS * slots * group * 1024,
    )  # fmt: skip
    policy = KVSwap(
        group_tokens=group, selected_tokens=selected, reuse_tokens=capacity, rank=rank, index_bits=8
    )
    work = work_of(
        plan, rows_per_sequence=1, num_layers=LAYERS, context=CONTEXT,
        hit_rate=1 - (MISSES[capacity] if miss is None else miss), row_bytes=1024 * group,
        true_query_layers=frozenset(),
    )  # fmt: skip
    return Candidate(policy=policy, plan=plan, work=work, kl=kl)


def profile_of(layer_s: float, rank: Sequence[float] = (0.0,) * 8) -> BlockProfile:
    """A layer's own work takes `layer_s`, ranking a little more."""
    return BlockProfile(
        rank=tuple(rank), block=(LAYERS * layer_s, 0.0, 0.0, 0.0, 0.0), io_factor=1.0,
        neighbours={}, device=DISK,
    )  # fmt: skip


def io_s(group: int, capacity: int) -> float:
    """By hand: requests and bytes of one layer."""
    groups = 400 // group * MISSES[capacity]
    return groups * (50e-6 + 1024 * group * 1e-9)


def setting(found: Expected | None) -> tuple[int, int, int | None]:
    assert found is not None
    each = found.candidate
    return each.plan.group_tokens, each.capacity_tokens, each.policy.rank


# The paper's search -----------------------------------------------------------------------------


@pytest.fixture
def ground() -> list[Candidate]:
    """The budget holds 800 tokens of reuse only beside a smaller index."""
    quality = {64: 0.01, 48: 0.03, 32: 0.2}
    fits = {(400, 64), (400, 48), (400, 32), (800, 48), (800, 32)}
    made = [
        candidate(group, capacity, rank, kl)
        for group in GROUPS for capacity in (0, 400, 800) for rank, kl in quality.items()
        if capacity == 0 or (capacity, rank) in fits
    ]  # fmt: skip
    # These hide everything with ease, but select less, or are of no quality at all.
    made += [candidate(g, 400, 64, 0.01, selected=200, miss=0.001) for g in GROUPS]
    made += [candidate(g, 400, 96, 9.0, miss=0.001) for g in GROUPS]
    random.Random(2).shuffle(made)
    return made


def test_io_of_the_ground(ground: list[Candidate]) -> None:
    profile = profile_of(1e-3)
    for each in ground:
        if each.selected_tokens == 400 and each.kl != 9.0:
            by_hand = io_s(each.plan.group_tokens, each.capacity_tokens)
            assert expect(profile, each).io_s == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.parametrize("group", GROUPS)
def test_the_smallest_group_that_hides(ground: list[Candidate], group: int) -> None:
    """Just enough work for this group; the index is the largest that fits."""
    profile = profile_of(HIDDEN_SHARE * io_s(group, 400) * 1.01)
    assert setting(paper_solution(profile, ground, floor=0.1)) == (group, 400, 64)


@pytest.mark.parametrize("group", [8, 16])
def test_reuse_grows_where_no_group_hides(ground: list[Candidate], group: int) -> None:
    """And the index shrinks, no further than it must, with the group from the smallest again."""
    layer_s = HIDDEN_SHARE * io_s(group, 800) * 1.01
    assert layer_s < HIDDEN_SHARE * io_s(16, 400)
    found = paper_solution(profile_of(layer_s), ground, floor=0.1)
    assert setting(found) == (group, 800, 48)
    assert found is not None
    assert found.hides


def test_where_nothing_hides_the_shortest_wait_is_taken(ground: list[Candidate]) -> None:
    found = paper_solution(profile_of(1e-5), ground, floor=0.1)
    assert setting(found) == (16, 800, 48)
    assert found is not None
    assert not found.hides
    assert found.stall_s > 0


def test_the_limits_are_the_floor(ground: list[Candidate]) -> None:
    """Where only the largest index is good enough there is nothing to give to the buffer."""
    slow = profile_of(HIDDEN_SHARE * io_s(8, 800) * 1.01)
    assert setting(paper_solution(slow, ground, floor=0.02)) == (16, 400, 64)
    assert paper_solution(slow, ground, floor=0.001) is None
    assert paper_solution(slow, [], floor=1.0) is None
    less = paper_solution(profile_of(1e-3), ground, floor=0.1, selected_tokens=200)
    assert setting(less) == (1, 400, 64)
    assert less is not None
    assert less.candidate.selected_tokens == 200


# The fastest that keeps quality -----------------------------------------------------------------


def drawn(draw: random.Random, count: int) -> list[Candidate]:
    return [
        candidate(
            draw.choice(GROUPS), draw.choice((0, 400, 800)), draw.choice((16, 32, 48, 64)),
            draw.choice((None, draw.uniform(0, 0.2))), selected=draw.choice((400, 200)),
            miss=draw.random(), batch=draw.choice((1, 1, 3)),
        )
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(15))
def test_best_solutions_by_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    found, floor = drawn(draw, 60), draw.choice((0.02, 0.1, 0.3))
    rank = [draw.uniform(0, 1e-3) for _ in range(8)]
    profile = profile_of(draw.choice((1e-4, 1e-3, 1e-2)), rank)
    good = {
        id(each): each.work.batch / profile.predict(each.work)[0]
        for each in found if each.kl is None or each.kl <= floor
    }  # fmt: skip
    ordered = best_solutions(profile, found, floor=floor, count=len(found))
    assert sorted(id(each.candidate) for each in ordered) == sorted(good)
    fastest = max(good.values())
    for each in ordered:
        assert each.tokens_per_s == pytest.approx(good[id(each.candidate)])
        assert keeps_quality(each.candidate, floor)
    # By speed, but for what is less than a percent of the fastest.
    speeds = [each.tokens_per_s / fastest for each in ordered]
    assert all(later < earlier + 0.01 for earlier, later in pairwise(speeds))
    assert speeds[0] > 0.99
    first = [e.candidate.kl or 0.0 for e in ordered if e.tokens_per_s > 0.99 * fastest]
    assert first[0] == min(first)
    for count in (1, 5):
        assert best_solutions(profile, found, floor=floor, count=count) == ordered[:count]


def test_equally_fast_ones_go_by_quality() -> None:
    profile = profile_of(5e-3)  # everything is hidden, so that all take the same time
    made = [candidate(4, 800, 48, kl) for kl in (0.05, 0.01, 0.2, 0.03)]
    ordered = best_solutions(profile, made, floor=0.1, count=9)
    assert [each.candidate.kl for each in ordered] == [0.01, 0.03, 0.05]
    slower = candidate(1, 0, 48, 0.0)
    assert best_solutions(profile, [slower, *made], floor=0.1)[0].candidate.kl == 0.01
    assert best_solutions(profile, made, floor=0.005) == []
    assert best_solutions(profile, [], floor=1.0) == []


def test_what_was_not_looked_at_is_taken_on_trust() -> None:
    assert keeps_quality(candidate(4, 400, 48, None), 0.0)
    assert keeps_quality(candidate(4, 400, 48, 0.1), 0.1)
    assert not keeps_quality(candidate(4, 400, 48, 0.1001), 0.1)
    assert not keeps_quality(candidate(4, 400, 48, float("inf")), 1e9)


def test_neighbours_are_read_together_before_time_is_foretold() -> None:
    each = candidate(1, 400, 48)
    plain = profile_of(1e-3)
    merging = BlockProfile(
        rank=plain.rank, block=plain.block, io_factor=1.0, neighbours={1: 0.75}, device=DISK
    )
    assert expect(merging, each).io_s < 0.9 * expect(plain, each).io_s
    assert expect(merging, each).step_s < expect(plain, each).step_s
    assert expect(plain, each).tokens_per_s == pytest.approx(1 / expect(plain, each).step_s)
