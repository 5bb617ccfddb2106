"""Solver: the setting for one (batch, context, budget), from profile and tables.

Source: KVSwap (arXiv 2511.11907), appendix A.4, in `paper_solution`.

Differences: `best_solutions` searches everything that fits for the most predicted tokens/s instead:
on CPUs ranking costs as much as reading, so that the smallest sigma is not the fastest that keeps
quality; and the paper's limits on sigma and G are replaced by a floor on measured quality.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.tuner.block_profile import BlockProfile
from penstock.tuner.candidates import Candidate

HIDDEN_SHARE = 0.9
"""1 - alpha: the part of the I/O that must run behind computation. The paper gives no value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A candidate and what it is expected to do."""

    candidate: Candidate
    step_s: float
    stall_s: float
    io_s: float
    """T_io of a layer."""
    layer_s: float
    """T_model of a layer."""

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all sequences."""
        return self.candidate.work.batch / self.step_s

    @property
    def hides(self) -> bool:
        """Whether enough of the reads runs behind the work."""
        return self.layer_s >= HIDDEN_SHARE * self.io_s


def expect(profile: BlockProfile, candidate: Candidate) -> Expected:
    """Predict one candidate."""
    work = profile.merged(candidate.work)
    step, stall = profile.predict(work)
    return Expected(
        candidate=candidate, step_s=step, stall_s=stall, io_s=profile.io_s(work),
        layer_s=profile.layer_s(work),
    )  # fmt: skip


def keeps_quality(candidate: Candidate, floor: float) -> bool:
    """Whether it stays under the floor, as far as anybody has looked."""
    return candidate.kl is None or candidate.kl <= floor


def best_solutions(
    profile: BlockProfile, found: Sequence[Candidate], *, floor: float, count: int = 1
) -> list[Expected]:
    """The candidates with most predicted tokens/s among those that keep quality, fastest first.

    Equally fast ones (within a percent) are ordered by quality.
    """
    expected = [expect(profile, each) for each in found if keeps_quality(each, floor)]
    if not expected:
        return []
    fastest = max(each.tokens_per_s for each in expected)

    def order(each: Expected) -> tuple[int, float]:
        behind = int((1 - each.tokens_per_s / fastest) / 0.01)
        return behind, each.candidate.kl or 0.0

    return sorted(expected, key=order)[:count]


def paper_solution(
    profile: BlockProfile, found: Sequence[Candidate], *, floor: float, selected_tokens: int = 400
) -> Expected | None:
    """The greedy search of appendix A.4, over settings that select `selected_tokens`.

    The smallest sigma that fits; the smallest G that hides enough of the I/O; else a larger reuse
    buffer, with the smallest sigma that still fits, from G = 1 again. Where nothing hides enough,
    the candidate with the smallest wait among all tried.
    """
    pool = [
        each for each in found
        if keeps_quality(each, floor) and each.capacity_tokens
        and abs(each.selected_tokens - selected_tokens) < 2 * each.plan.group_tokens
    ]  # fmt: skip
    last: Expected | None = None
    for capacity in sorted({each.capacity_tokens for each in pool}):
        for group in sorted({each.plan.group_tokens for each in pool}):
            fitting = [
                each for each in pool
                if each.plan.group_tokens == group
                and abs(each.capacity_tokens - capacity) < 2 * group
            ]  # fmt: skip
            if not fitting:
                continue
            largest = max(fitting, key=lambda each: each.plan.index_bytes)
            tried = expect(profile, largest)
            if tried.hides:
                return tried
            if last is None or tried.stall_s < last.stall_s:
                last = tried
    return last
