"""Quality in two looks: of all settings on few documents, of those that matter on more."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import fields_of
from penstock.tuner.candidates import Candidate
from research.tuning.setting_runs import TOP
from research.tuning.sweep import TwoLooks
from research.tuning.workbench import HeldOutQuality, quality_key

Row = dict[str, Any]
FLOOR = 0.03
POLICIES = [KVSwap(group_tokens=1, selected_tokens=100 + at, rank=8) for at in range(12)]


class Documents:
    """Stands for held-out documents on which every setting's divergence is known."""

    def __init__(self, count: int, divergences: Sequence[float]) -> None:
        self.documents, self.measured = count, list[int]()
        self.found: dict[str, Row] = {}
        self._divergences = divergences

    def measure(self, policies: Sequence[KVSwap]) -> None:
        for policy in policies:
            at = POLICIES.index(policy)
            self.measured.append(at)
            self.found[quality_key(fields_of(policy))] = {"kl": self._divergences[at]}

    def summary(self, floor: float) -> Row:
        return {"texts": [9] * self.documents, "settings": len(self.found), "floor": floor}


def looked(
    first: Sequence[float], closer: Sequence[float], pick: int, *, greedy: int = -1
) -> tuple[list[Row], Documents, TwoLooks]:
    """After both looks, the settings from the fastest to the slowest."""
    few, many = Documents(1, first), Documents(10, closer)
    looks = TwoLooks(cast(HeldOutQuality, few), cast(HeldOutQuality, many), FLOOR)
    chosen = [cast(Candidate, SimpleNamespace(policy=policy)) for policy in POLICIES]
    looks.measure(POLICIES)
    rows = [
        {
            "tokens_per_s": 100.0 - at, "fields": fields_of(policy),
            "peak_bytes": 101 if at == greedy else 99, "predicted_bytes": 100,
            **looks.of(fields_of(policy)),
        }
        for at, policy in enumerate(POLICIES)
    ]  # fmt: skip
    order = [*range(1, len(rows)), 0]  # as they ran: in no order of speed
    looks.look_closer(
        [chosen[at] for at in order], [rows[at] for at in order],
        lambda candidate: candidate.policy == POLICIES[pick],
    )  # fmt: skip
    return rows, many, looks


def test_the_fastest_are_looked_at_until_enough_keep_quality() -> None:
    closer = [0.01] * 12
    closer[1] = 0.04
    rows, many, looks = looked([0.001] * 12, closer, pick=0)
    assert many.measured == list(range(TOP + 1))
    assert [row["kl"] for row in rows[:3]] == [0.01, 0.04, 0.01]
    assert rows[0]["kl_first"] == 0.001
    assert rows[-1]["kl"] == 0.001
    assert "kl_first" not in rows[-1]
    told = looks.summaries()
    assert told["quality"] == {"texts": [9], "settings": 12, "floor": FLOOR}
    assert told["closer_quality"] == {"texts": [9] * 10, "settings": TOP + 1, "floor": FLOOR}


def test_a_token_missed_in_the_first_is_forgiven_if_the_rest_is_right() -> None:
    first = [0.28, 0.31, *[0.001] * 10]  # 0.28 of ten documents is 0.028, 0.31 is 0.031
    rows, many, _ = looked(first, [0.028, 0.031, *[0.001] * 10], pick=3)
    assert many.measured == [0, 2, 3, 4, 5]
    assert rows[0]["kl"] == 0.028
    assert rows[1]["kl"] == 0.31


def test_picks_are_looked_at_wherever_they_stand() -> None:
    rows, many, _ = looked([0.001] * 11 + [2.0], [0.001] * 11 + [2.5], pick=11)
    assert many.measured == [*range(TOP), 11]
    assert (rows[11]["kl"], rows[11]["kl_first"]) == (2.5, 2.0)


def test_who_took_too_much_memory_is_no_candidate() -> None:
    _, many, _ = looked([0.001] * 12, [0.001] * 12, pick=1, greedy=0)
    assert many.measured == [*range(1, TOP + 1)]
