"""Settings of other policies: which are tried, and what is expected between the corners."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from penstock.methods import POLICIES, KVSwap, Quest
from penstock.tuner.engine_run import StepFigures
from penstock.tuner.other_policies import MOST_SETTINGS, OtherPolicies, PolicySetting, varied
from penstock.tuner.tune import _others
from penstock.tuner.tuning_task import TuningTask


def figures(step_s: float, resident: int = 1) -> StepFigures:
    return StepFigures(
        step_s=step_s, select_s=0, stall_s=0, reads=0, read_bytes=0, units_wanted=0, units_hit=0,
        resident_bytes=resident, fill_s=0, steps=1,
    )  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_the_default_comes_first_and_others_differ_in_one_choice(name: str) -> None:
    tried = varied(name)
    assert 1 <= len(tried) <= MOST_SETTINGS
    assert tried[0] == POLICIES[name]()
    assert len(set(tried)) == len(tried)
    for setting in tried[1:]:
        changed = [
            field.name for field in fields(setting)
            if getattr(setting, field.name) != getattr(tried[0], field.name)
        ]  # fmt: skip
        assert len(changed) == 1
        assert changed[0] in {choice.field for choice in setting.choices}


def test_between_the_corners_steps_grow_as_powers() -> None:
    corners = {
        (1, 4096): figures(0.01, 10), (1, 16384): figures(0.02, 20),
        (4, 4096): figures(0.04, 30), (4, 16384): figures(0.08, 40),
    }  # fmt: skip
    setting = PolicySetting(policy=Quest(), kl=0.0, read_bytes_per_token=0.0, figures=corners)
    for place, each in corners.items():
        assert setting.step_s(*place) == pytest.approx(each.step_s)
    assert setting.step_s(1, 8192) == pytest.approx(0.01 * 2**0.5)
    assert setting.step_s(2, 8192) == pytest.approx(0.01 * 2**0.5 * 2)
    assert setting.resident_bytes(1, 8192) == 20
    assert setting.resident_bytes(2, 4096) == 30
    assert setting.resident_bytes(3, 9000) == 40


def test_what_does_not_fit_at_a_corner_has_no_step() -> None:
    some = {(1, 4096): figures(0.01), (1, 16384): figures(0.02), (4, 4096): figures(0.04)}
    setting = PolicySetting(policy=Quest(), kl=0.0, read_bytes_per_token=0.0, figures=some)
    assert setting.step_s(1, 4096) is None


def test_policies_that_were_run_in_slow_and_fast_moments_are_told_at_one_pace(
    make_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {(1, 2048): replace(figures(3.0), pace_s=0.03)}
    fast = {
        (1, 2048): replace(figures(2.0), pace_s=0.01),
        (1, 4096): replace(figures(4.0), pace_s=0.02),
    }
    settings = [
        PolicySetting(policy=KVSwap(), kl=0.0, read_bytes_per_token=0.0, figures=each)
        for each in (slow, fast)
    ]
    monkeypatch.setattr(OtherPolicies, "settings", lambda *_: iter(settings))
    nothing: Any = None
    (one, other), _ = _others(make_task(), nothing, ["quest"], lambda *_: None)
    assert one.figures[1, 2048].step_s == pytest.approx(2.0)
    assert [each.step_s for each in other.figures.values()] == pytest.approx([4.0, 4.0])
    told = [each.pace_s for setting in (one, other) for each in setting.figures.values()]
    assert told == pytest.approx([0.02] * 3)
    settings = []
    assert _others(make_task(), nothing, ["quest"], lambda *_: None)[0] == []
