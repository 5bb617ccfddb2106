"""Picks and the Pareto front, against their definitions."""

import random

from penstock.methods.tuned_config import Figures, Solution
from penstock.tuner.solutions import pareto_front, with_picks


def solution(
    policy: str, speed: float, kl: float = 0.01, memory: int = 100, batch: int = 1,
    context: int = 4096, measured: float | None = None,
) -> Solution:  # fmt: skip
    def made(tokens_per_s: float) -> Figures:
        return Figures(
            tokens_per_s=tokens_per_s, first_token_s=1.0, resident_bytes=memory,
            read_bytes_per_token=1.0, kl=kl,
        )  # fmt: skip

    return Solution(
        batch=batch, context=context, policy=policy, fields={}, limit_bytes=1000,
        predicted=made(speed), measured=None if measured is None else made(measured),
        reason="", is_pick=False,
    )  # fmt: skip


def test_the_fastest_of_each_place_is_picked_and_measurements_count_before_predictions() -> None:
    listed = [
        solution("kvswap", 100.0, measured=50.0), solution("quest", 60.0),
        solution("kvswap", 10.0, context=8192), solution("quest", 9.0, context=8192),
        solution("kvswap", 10.0, batch=2), solution("quest", 90.0, batch=2, measured=9.0),
    ]  # fmt: skip
    picked = [(e.policy, e.batch, e.context) for e in with_picks(listed) if e.is_pick]
    assert picked == [("quest", 1, 4096), ("kvswap", 1, 8192), ("kvswap", 2, 4096)]


def test_the_front_is_what_nothing_beats() -> None:
    draw = random.Random(3)
    listed = [
        solution(str(i), draw.randint(1, 9), draw.randint(0, 9) / 100, draw.randint(1, 9))
        for i in range(60)
    ]
    front = {row["policy"] for row in pareto_front(listed)}

    def beats(a: Solution, b: Solution) -> bool:
        one = (a.predicted["kl"] or 0, -a.predicted["tokens_per_s"], a.predicted["resident_bytes"])
        two = (b.predicted["kl"] or 0, -b.predicted["tokens_per_s"], b.predicted["resident_bytes"])
        return one != two and all(x <= y for x, y in zip(one, two, strict=True))

    for each in listed:
        assert (each.policy in front) == (not any(beats(other, each) for other in listed))


def test_the_front_is_that_of_the_largest_place() -> None:
    front = pareto_front([solution("a", 1.0), solution("b", 2.0, context=8192)])
    assert [row["policy"] for row in front] == ["b"]
