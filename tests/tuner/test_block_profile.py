"""BlockProfile: planted delays come back, and foretell work that was not measured."""

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.core.slot_plan import SlotPlan
from penstock.devices.presets import EMMC, NVME
from penstock.devices.profile import DeviceProfile
from penstock.tuner.block_profile import (
    BLOCK_TERMS,
    RANK_TERMS,
    BlockProfile,
    Work,
    fit_profile,
    fit_terms,
    work_of,
)
from penstock.tuner.engine_run import StepFigures
from penstock.tuner.pipeline import LayerTimes, step_time

LAYERS = 8
RANK = (0.8e-3, 0.1e-3, 0.3e-3, 0.4e-3, 0.2e-3, 0.15e-3, 0.25e-3, 0.2e-3)
BLOCK = (3e-3, 0.5e-3, 1.2e-3, 0.7e-3, 0.6e-3)
DISK = DeviceProfile(
    name="d", title="d", bandwidth=1e9, write_bandwidth=1e9, iops=20e3, latency_s=100e-6
)


def profile_of(
    rank: tuple[float, ...] = RANK, block: tuple[float, ...] = BLOCK, io_factor: float = 1.0,
    device: DeviceProfile = DISK,
) -> BlockProfile:  # fmt: skip
    return BlockProfile(rank=rank, block=block, io_factor=io_factor, neighbours={}, device=device)


def drawn(draw: random.Random) -> Work:
    """Work of a setting as plans make it: every number free of the others."""
    batch, group = draw.choice([1, 2, 4]), draw.choice([1, 2, 4, 8, 16])
    context = draw.choice([4096, 8192, 16384])
    selected = LAYERS * batch * draw.choice([200, 400, 800]) / group
    missing = selected * draw.uniform(0.05, 1.0)
    tokens = LAYERS * batch * context
    return Work(
        batch=batch, context=context, num_layers=LAYERS, group_tokens=group,
        true_query_layers=frozenset(draw.sample(range(1, LAYERS), draw.randint(0, 2))),
        index_bytes=tokens * draw.choice([16, 24, 48, 64]), units=tokens / group,
        selected=selected, attended_tokens=LAYERS * batch * draw.uniform(400, 2000),
        missing=missing, reads=missing * draw.uniform(0.5, 1.0),
        read_bytes=missing * group * 1024, is_staged=draw.random() < 0.5,
        copies_weights=draw.random() < 0.5,
    )  # fmt: skip


def figures_of(truth: BlockProfile, work: Work, noise: float = 0.0) -> StepFigures:
    """What an engine with these delays would count."""
    ranking = replace(truth, block=(0.0,) * len(BLOCK_TERMS))
    select_s = LAYERS * ranking.layer_s(work) * (1 + noise)
    step_s, stall_s = truth.predict(work)
    return StepFigures(
        step_s=step_s * (1 + noise), select_s=select_s, stall_s=stall_s * (1 + noise),
        reads=work.reads, read_bytes=work.read_bytes, units_wanted=work.selected,
        units_hit=work.selected - work.missing, resident_bytes=0, fill_s=0.0, steps=1,
    )  # fmt: skip


# Factors ----------------------------------------------------------------------------------------


def best_by_enumeration(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """The least sum of squared relative errors of any non-negative factors: of all subsets of
    terms whose ordinary least squares is non-negative, the best one."""
    terms = rows / seconds[:, None]
    least = float(len(rows))  # all factors zero
    for count in range(1, rows.shape[1] + 1):
        for some in combinations(range(rows.shape[1]), count):
            part = terms[:, some]
            factors, *_ = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)
            if (factors >= 0).all():
                least = min(least, float(np.square(part @ factors - 1).sum()))
    return least


def error_of(rows: NDArray[np.float64], seconds: NDArray[np.float64], f: object) -> float:
    return float(np.square(rows @ np.asarray(f) / seconds - 1).sum())


@pytest.mark.parametrize("seed", range(5))
def test_planted_factors_come_back(seed: int) -> None:
    draw = np.random.default_rng(seed)
    factors = draw.uniform(0.2, 3.0, 4) * [1.0, 1e-3, 50.0, 1.0]
    rows = draw.uniform(0.1, 1.0, (24, 4)) * [1.0, 1e3, 0.02, 1.0]
    found = fit_terms(rows.tolist(), (rows @ factors).tolist())
    assert found.tolist() == pytest.approx(factors.tolist(), rel=2e-3)


@pytest.mark.parametrize("seed", range(5))
def test_as_least_squares_where_that_is_positive(seed: int) -> None:
    draw = np.random.default_rng(100 + seed)
    rows = draw.uniform(0.1, 1.0, (30, 3))
    seconds = rows @ [1.0, 2.0, 1.5] * draw.uniform(0.9, 1.1, 30)
    expected, *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones(30), rcond=None)
    assert (expected > 0).all()
    found = fit_terms(rows.tolist(), seconds.tolist())
    assert found.tolist() == pytest.approx(expected.tolist(), rel=2e-3)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_all_that_are_not_negative(seed: int) -> None:
    """With true factors that a free fit would have below zero."""
    draw = np.random.default_rng(200 + seed)
    rows = draw.uniform(0.1, 1.0, (12, 5))
    seconds = rows @ [*draw.uniform(-0.9, -0.5, 2), *draw.uniform(0.5, 2.0, 3)] + 0.9
    free, *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones(12), rcond=None)
    found = fit_terms(rows.tolist(), seconds.tolist())
    assert (free < 0).any()
    assert (found >= 0).all()
    assert error_of(rows, seconds, found) <= best_by_enumeration(rows, seconds) * 1.002 + 1e-4


def test_terms_that_runs_cannot_tell_apart_share_or_stay_out() -> None:
    rows = [[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [3.0, 6.0, 0.0]]
    found = fit_terms(rows, [1.0, 2.0, 3.0])
    assert found[0] + 2 * found[1] == pytest.approx(1.0, rel=1e-3)
    assert found[2] == 0
    assert fit_terms([[4.0]], [2.0])[0] == pytest.approx(0.5, rel=1e-3)


# Predictions ------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    work = Work(
        batch=2, context=8192, num_layers=LAYERS, group_tokens=4, true_query_layers=frozenset({3}),
        index_bytes=3 << 20, units=2 * 2**14, selected=5 * 2**10, attended_tokens=6 * 2**13,
        missing=2**11, reads=2**10, read_bytes=2**10 * 6000, is_staged=True, copies_weights=True,
    )  # fmt: skip
    for term, times in zip(RANK_TERMS, (1, 2, 3, 2, 2, 5, 1, 0), strict=True):
        one = profile_of(tuple(float(name == term) for name in RANK_TERMS), (0.0,) * 5)
        assert one.layer_s(work) * LAYERS == pytest.approx(times), term
    for term, times in zip(BLOCK_TERMS, (1, 2, 6, 1, 2), strict=True):
        one = profile_of((0.0,) * 8, tuple(float(name == term) for name in BLOCK_TERMS))
        assert one.layer_s(work) * LAYERS == pytest.approx(times), term
    slower = replace(work, copies_weights=False)
    reading = profile_of((*(0.0,) * 7, 1.0), (0.0,) * 5)
    assert reading.layer_s(slower) > reading.layer_s(work), "16-bit weights are more to read"
    unstaged = profile_of((0.0,) * 8, (0.0, 0.0, 0.0, 0.0, 1.0))
    assert unstaged.layer_s(replace(work, is_staged=False)) == 0

    # Two pages each: 6000 bytes are asked for, 8192 are read.
    truth = profile_of(io_factor=2.0)
    io_s = 2.0 * (2**10 * 8192 / 1e9 + 2**10 * (1 / 20e3 - 4096 / 1e9)) / LAYERS
    assert truth.io_s(work) == pytest.approx(io_s)
    rank_s = float(np.dot(RANK, (1, 2, 3, 2, 2, 5, 1, 0))) / LAYERS
    block_s = float(np.dot(BLOCK, (1, 2, 6, 1, 2))) / LAYERS
    layers = [
        LayerTimes(block_s=block_s, rank_s=rank_s, io_s=io_s, is_predicted=n not in (0, 3))
        for n in range(LAYERS)
    ]
    assert truth.predict(work) == pytest.approx(step_time(layers, latency_s=100e-6))
    assert truth.io_s(replace(work, missing=0.0, reads=0.0, read_bytes=0.0)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_more_of_anything_is_never_faster(seed: int) -> None:
    work, truth = drawn(random.Random(seed)), profile_of()
    step, stall = truth.predict(work)
    assert 0 <= stall < step
    for more in (
        replace(work, reads=2 * work.reads, read_bytes=2 * work.read_bytes),
        replace(work, context=2 * work.context, units=2 * work.units),
        replace(work, index_bytes=2 * work.index_bytes),
        replace(work, attended_tokens=2 * work.attended_tokens),
        replace(work, true_query_layers=work.true_query_layers | {5}),
    ):
        assert truth.predict(more)[0] >= step - 1e-12
    assert replace(truth, io_factor=3.0).predict(work)[0] >= step
    assert truth.predict(work)[0] >= LAYERS * truth.layer_s(work)


# Fitting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "io_factor"), [(DISK, 0.5), (NVME, 1.0), (EMMC, 1.7)], ids=["disk", "nvme", "emmc"]
)
def test_a_planted_profile_foretells_unseen_work(device: DeviceProfile, io_factor: float) -> None:
    draw = random.Random(3)
    truth = profile_of(io_factor=io_factor, device=device)
    works = [drawn(draw) for _ in range(40)]
    fitted = fit_profile([(work, figures_of(truth, work)) for work in works], device)
    assert min(*fitted.rank, *fitted.block) >= 0
    assert fitted.io_factor == pytest.approx(io_factor, rel=0.04)
    for _ in range(30):
        unseen = drawn(draw)
        assert fitted.predict(unseen)[0] == pytest.approx(truth.predict(unseen)[0], rel=0.04)
        assert fitted.layer_s(unseen) == pytest.approx(truth.layer_s(unseen), rel=0.02)


def test_few_noisy_runs_foretell_what_is_like_them() -> None:
    """Twelve runs for twelve factors: less than can be told apart, and 3 % of noise."""
    draw = random.Random(5)
    truth = profile_of(io_factor=1.3)
    runs = []
    for _ in range(12):
        work = drawn(draw)
        runs.append((work, figures_of(truth, work, noise=draw.gauss(0.0, 0.03))))
    fitted = fit_profile(runs, DISK)
    unseen = [drawn(draw) for _ in range(40)]
    errors = [abs(fitted.predict(w)[0] / figures_of(truth, w).step_s - 1) for w in unseen]
    assert np.median(errors) < 0.06
    assert max(errors) < 0.3


def test_neighbours_are_read_together_as_they_were_measured() -> None:
    draw = random.Random(7)
    works = []
    for group, share in ((1, 0.4), (1, 0.6), (8, 0.9)):
        work = drawn(draw)
        works.append(
            replace(work, group_tokens=group, selected=100.0, missing=100.0, reads=100 * share)
        )
    still = replace(works[0], group_tokens=16, missing=0.0, reads=0.0, read_bytes=0.0)
    fitted = fit_profile([(w, figures_of(profile_of(), w)) for w in [*works, still]], DISK)
    assert fitted.neighbours == pytest.approx({1: 0.5, 8: 0.1})
    asked = replace(works[0], selected=1000.0, missing=1000.0, reads=1000.0)
    for group, reads in ((1, 500), (2, 500), (4, 900), (8, 900), (16, 900)):
        assert fitted.merged(replace(asked, group_tokens=group)).reads == pytest.approx(reads)
    half = replace(asked, missing=500.0, reads=500.0)
    assert fitted.merged(half).reads == pytest.approx(500 * (1 - 0.5 / 4)), "fewer neighbours miss"
    assert fitted.merged(asked).read_bytes == asked.read_bytes, "fewer reads of the same bytes"
    assert profile_of().merged(asked) == asked
    assert fitted.as_dict()["neighbours"] == pytest.approx({"1": 0.5, "8": 0.1})
    assert list(fitted.as_dict()["rank_s"]) == list(RANK_TERMS)


def test_neighbours_are_found_from_runs_that_reuse_too() -> None:
    work = drawn(random.Random(8))
    work = replace(work, group_tokens=4, selected=1000.0)
    runs = [
        replace(work, missing=missing, reads=missing * (1 - 0.3 * (missing / 1000) ** 2))
        for missing in (1000.0, 600.0, 250.0)
    ]
    fitted = fit_profile([(w, figures_of(profile_of(), w)) for w in runs], DISK)
    assert fitted.neighbours == pytest.approx({4: 0.3})
    for run in runs:
        assert fitted.merged(replace(run, reads=run.missing)).reads == pytest.approx(run.reads)


# Work of a plan ---------------------------------------------------------------------------------

PLAN = SlotPlan(
    batch=6, max_units=512, group_tokens=4, num_slots=150, selected_units=100, sink_slots=1,
    window_slots=17, shared_every=0, compact=False, index_bytes=7777, fixed_bytes=0,
    unit_bytes=4096, staging_slots=0, pool_bytes=0,
)  # fmt: skip


def work(plan: SlotPlan, hit_rate: float = 0.75, context: int = 2000) -> Work:
    """Three rows a sequence, two sequences, five layers."""
    return work_of(
        plan, rows_per_sequence=3, num_layers=5, context=context, hit_rate=hit_rate,
        row_bytes=4608, true_query_layers=frozenset({2}),
    )  # fmt: skip


def test_work_of_a_plan() -> None:
    found = work(PLAN)
    assert (found.batch, found.context, found.group_tokens) == (2, 2000, 4)
    assert found.selected == 5 * 6 * 100
    assert found.missing == pytest.approx(0.25 * 5 * 6 * 100)
    assert found.reads == found.missing
    assert found.read_bytes == pytest.approx(found.missing * 4608)
    assert found.attended_tokens == 5 * 6 * (150 + 18) * 4
    assert found.units == 5 * 6 * 500
    assert found.index_bytes == 7777
    assert not found.is_staged
    assert not found.copies_weights
    assert work(PLAN, context=300).attended_tokens == 5 * 6 * 300, "no more than there is"


def test_work_without_reuse_and_of_a_selection_alone() -> None:
    shared = replace(PLAN, shared_every=1, num_slots=100, staging_slots=6, predictor_bytes=9)
    assert work(shared).missing == 5 * 6 * 100, "nothing is kept, whatever the hit rate"
    assert work(shared).is_staged
    assert work(shared).copies_weights
    some = replace(PLAN, shared_every=2)
    assert work(some).missing == pytest.approx((2 + 0.25 * 3) * 6 * 100), "two of five layers"
    compact = replace(PLAN, compact=True)
    assert work(compact).attended_tokens == 5 * 6 * (100 + 18) * 4
    assert work(compact).missing == work(PLAN).missing
