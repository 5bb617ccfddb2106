"""95 % intervals of benchmark scores: Wilson for shares, the bootstrap for means."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 10_000
_NORMAL_QUANTILE = 1.959963984540054
_DRAWN_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval, in the figure's own unit."""

    value: float
    low: float
    high: float


def wilson(right: int, total: int) -> Estimate:
    """The share of right answers.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference",
    JASA 22 (1927), without continuity correction. Unlike the textbook interval it stays within
    0 and 1 and has a width when all answers are right, or none.

    Args:
        right: answers that were wholly right.
        total: answers. With none, nothing is known: the value is NaN, the interval 0 to 1.
    """
    assert 0 <= right <= total, (right, total)
    if total == 0:
        return Estimate(float("nan"), 0.0, 1.0)
    share, z2 = right / total, _NORMAL_QUANTILE**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    spread = share * (1 - share) / total + z2 / (4 * total**2)
    half = _NORMAL_QUANTILE * spread**0.5 / (1 + z2 / total)
    # At the ends the limits are exact; rounding must not put the share outside.
    low = 0.0 if right == 0 else centre - half
    high = 1.0 if right == total else centre + half
    return Estimate(share, low, high)


def bootstrap_mean(*tasks: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """The mean score; of several tasks, the mean of the tasks' means.

    Source: Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7
    (1979); the percentile interval. Samples are drawn anew within each task. Scores that are
    all equal give an interval without width: for shares of right answers use `wilson`.

    Args:
        tasks: each task's scores, one per sample; at least one task, none empty.
        seed: of the draws; the same scores and seed give the same interval.
        resamples: number of draws.
    """
    assert tasks, "no task"
    assert all(len(task) for task in tasks), "a task without scores"
    rng = np.random.default_rng(seed)
    means: NDArray[np.float64] = np.zeros(resamples)
    for task in tasks:
        means += _resampled_means(np.asarray(task, dtype=np.float64), rng, resamples)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means / len(tasks), [tail, 1 - tail])
    value = sum(float(np.mean(task)) for task in tasks) / len(tasks)
    return Estimate(value, float(low), float(high))


def mean_percent(tasks: Sequence[Sequence[float]]) -> Estimate:
    """`bootstrap_mean` of some tasks' scores in per cent, with as many draws as a figure needs."""
    found = bootstrap_mean(*tasks, resamples=2000)
    return Estimate(100 * found.value, 100 * found.low, 100 * found.high)


def paired_bootstrap(
    *tasks: tuple[Sequence[float], Sequence[float]], seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """How much more the first method scores than the second on the same samples.

    Source: Efron's bootstrap, see `bootstrap_mean`, of the differences sample by sample: what
    makes a sample hard for both methods falls out. An interval without 0 is a difference.

    Args:
        tasks: for each task the scores of the first and of the second method, in the same
            order of samples, equally many and at least one.
        seed: of the draws.
        resamples: number of draws.
    """
    differences = [
        [first - second for first, second in zip(firsts, seconds, strict=True)]
        for firsts, seconds in tasks
    ]
    return bootstrap_mean(*differences, seed=seed, resamples=resamples)


def _resampled_means(
    scores: NDArray[np.float64], rng: np.random.Generator, resamples: int
) -> NDArray[np.float64]:
    """Means of `resamples` draws with replacement, as many scores each. [resamples]"""
    means: NDArray[np.float64] = np.empty(resamples)
    rows = max(1, _DRAWN_AT_ONCE // len(scores))
    for start in range(0, resamples, rows):
        end = min(start + rows, resamples)
        picks = rng.integers(len(scores), size=(end - start, len(scores)))
        means[start:end] = scores[picks].mean(axis=1)
    return means
