"""Intervals: Wilson's against known values and its coverage, the bootstrap against theory."""

import math

import numpy as np
import pytest

from penstock.evaluate.intervals import bootstrap_mean, paired_bootstrap, wilson


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),
        (0, 10, 0.0, 0.277533),  # z2 / (n + z2)
        (50, 50, 0.928652, 1.0),  # n / (n + z2)
        (1, 1, 0.206549, 1.0),
    ],
)
def test_wilson(right: int, total: int, low: float, high: float) -> None:
    estimate = wilson(right, total)
    assert estimate.value == right / total
    assert estimate.low == pytest.approx(low, abs=2e-6)
    assert estimate.high == pytest.approx(high, abs=2e-6)


def test_wilson_knows_nothing_from_nothing() -> None:
    estimate = wilson(0, 0)
    assert math.isnan(estimate.value)
    assert (estimate.low, estimate.high) == (0.0, 1.0)


def test_wilson_covers_nineteen_times_in_twenty() -> None:
    total = 25
    intervals = [wilson(right, total) for right in range(total + 1)]
    covered = []
    for share in np.linspace(0.02, 0.98, 97):
        chances = [
            math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(total + 1)
        ]
        inside = [i.low <= share <= i.high for i in intervals]
        covered.append(sum(c for c, here in zip(chances, inside, strict=True) if here))
    assert np.mean(covered) == pytest.approx(0.95, abs=0.01)


def test_bootstrap_of_a_mean_is_as_wide_as_theory_says() -> None:
    scores = [0.0, 1.0] * 200
    estimate = bootstrap_mean(scores)
    half = 1.96 * 0.5 / math.sqrt(len(scores))
    assert estimate.value == 0.5
    assert estimate.low == pytest.approx(0.5 - half, abs=0.004)
    assert estimate.high == pytest.approx(0.5 + half, abs=0.004)


def test_tasks_weigh_the_same_and_are_drawn_apart() -> None:
    assert bootstrap_mean([0.0] * 90, [1.0] * 10).value == 0.5
    # Were samples drawn across tasks, the mean would vary.
    apart = bootstrap_mean([0.0] * 90, [1.0] * 10)
    assert (apart.low, apart.high) == (0.5, 0.5)
    one, two = bootstrap_mean([0.0, 1.0] * 50), bootstrap_mean([0.0, 1.0] * 50, [0.0, 1.0] * 50)
    ratio = (one.high - one.low) / (two.high - two.low)
    assert ratio == pytest.approx(math.sqrt(2), rel=0.1)


def test_seed_decides() -> None:
    scores = list(np.random.default_rng(0).random(30))
    assert bootstrap_mean(scores, seed=1) == bootstrap_mean(scores, seed=1)
    assert bootstrap_mean(scores, seed=1) != bootstrap_mean(scores, seed=2)


def test_pairing_removes_what_is_hard_for_both() -> None:
    hard = np.random.default_rng(0).random(60)
    ours, theirs = list(hard), list(hard - 0.05)
    estimate = paired_bootstrap((ours, theirs))
    assert estimate.value == pytest.approx(0.05)
    assert estimate.low == pytest.approx(0.05)
    assert estimate.high == pytest.approx(0.05)
    alone = bootstrap_mean(ours)
    assert alone.low < alone.value - 0.05  # unpaired, the difference is not seen


def test_paired_difference_has_a_sign_and_needs_pairs() -> None:
    ours, theirs = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 7 + [1.0]
    assert paired_bootstrap((ours, theirs)).low > 0
    assert paired_bootstrap((theirs, ours)).high < 0
    assert paired_bootstrap((ours, ours), (theirs, theirs)).value == 0
    with pytest.raises(ValueError, match="shorter"):
        paired_bootstrap((ours, theirs[:3]))


def test_many_scores_are_drawn_in_parts() -> None:
    scores = [0.0, 1.0] * 3000
    estimate = bootstrap_mean(scores, resamples=500)
    assert estimate.low < 0.5 < estimate.high
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(6000), rel=0.2)
