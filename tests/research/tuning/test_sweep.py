"""`penstock bench tune`: sweep and predict on a tiny model, going on, and the figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError, PenstockError, StorageError
from penstock.evaluate.result import Result
from penstock.methods import SelectionPolicy
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import policy_from, settings_of
from penstock.tuner import candidates, engine_run, kvswap_search, pace
from penstock.tuner.engine_run import EngineRun, StepFigures, run_together
from research.figures import tuning
from research.figures.chart import draw
from research.figures.report import charts_of
from research.tuning import predict, program, setting_runs, sweep
from research.tuning.setting_runs import middle_run, predict_table, sweep_table
from tests.research.drawn_figures import figures_drawn

Row = dict[str, Any]
SETTINGS, SITTINGS, FINAL_ROUNDS = 7, 2, 2
STEPS, ROUNDS, LAST_ROUNDS = 2, 2, 3  # of the tuner's own runs
POINTS, CHECKS, FINALISTS = 4, 2, 2
PASSES, PASS_ROUNDS = 2, 1  # of what is predicted


def _every_third(method: type[SelectionPolicy]) -> Iterator[SelectionPolicy]:
    """A thinner search space: listing what fits takes as long as running it."""
    return islice(settings_of(method), 0, None, 3)


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sweep, "SITTINGS", SITTINGS)
        patched.setattr(sweep, "FINAL_ROUNDS", FINAL_ROUNDS)
        patched.setattr(engine_run, "STEPS", STEPS)
        patched.setattr(engine_run, "WARM_STEPS", 1)
        patched.setattr(candidates, "settings_of", _every_third)
        patched.setattr(kvswap_search, "ROUNDS", ROUNDS)
        patched.setattr(kvswap_search, "FINAL_ROUNDS", LAST_ROUNDS)
        patched.setattr(kvswap_search, "POINTS", POINTS)
        patched.setattr(kvswap_search, "CHECKS", CHECKS)
        patched.setattr(kvswap_search, "CORNER_POINTS", 2)
        patched.setattr(kvswap_search, "FINALISTS", FINALISTS)
        patched.setattr(pace, "_PASSES", 1)
        patched.setattr(predict, "PASSES", PASSES)
        patched.setattr(predict, "ROUNDS", PASS_ROUNDS)
        yield


def swept(out: Path) -> Result:
    few = ["--layers=2", f"--settings={SETTINGS}"]
    return sweep.run(["--quick", "--devices=nvme", *few, f"--out={out}"])


@dataclass
class Sitting:
    """A sweep that the disk leaves after its first group of settings, and that goes on."""

    out: Path
    groups: list[int] = field(default_factory=list)
    """Settings of each group that was run, in both runs."""
    left: list[str] = field(default_factory=list)
    """The journal's lines when it broke off."""

    @property
    def journal(self) -> Path:
        return self.out.with_name(f"{self.out.name}.nvme.journal")

    def run(self) -> None:
        def unplugged(runs: Sequence[EngineRun], **settings: int) -> list[StepFigures]:
            if self.groups:
                raise StorageError("the disk is gone")
            return counted(runs, **settings)

        def counted(runs: Sequence[EngineRun], **settings: int) -> list[StepFigures]:
            self.groups.append(len(runs))
            return run_together(runs, **settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setting_runs, "run_together", unplugged)
            with pytest.raises(StorageError, match="gone"):
                swept(self.out)
            self.left = self.journal.read_text().splitlines()
            patch.setattr(setting_runs, "run_together", counted)
            patch.setattr(kvswap_search, "EngineRun", None)
            swept(self.out)


@pytest.fixture(scope="module")
def sitting(tmp_path_factory: pytest.TempPathFactory) -> Sitting:
    made = Sitting(tmp_path_factory.mktemp("sweep") / "small.json")
    made.run()
    return made


@pytest.fixture(scope="module")
def sweep_file(sitting: Sitting) -> Path:
    return sitting.out


@pytest.fixture(scope="module")
def predict_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("predict") / "places.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kvswap_search, "CORNER_CHECKS", 0)  # the sweep's tuner checks its picks
        program.run(["predict", "--quick", "--layers=2", "--devices=memory", f"--out={out}"])
    return out


def nvme_of(path: Path) -> Row:
    device: Row = Result.load(path).figures["devices"]["nvme"]
    return device


# Sweep --------------------------------------------------------------------------------------------


def test_every_setting_ran_within_its_plan(sweep_file: Path) -> None:
    device = nvme_of(sweep_file)
    rows = device["settings"]
    assert len({str(row["fields"]) for row in rows}) == len(rows) == SETTINGS < device["fit"]
    limit = Result.load(sweep_file).figures["limit_bytes"]
    for row in rows:
        policy = policy_from("kvswap", row["fields"])
        assert isinstance(policy, KVSwap)
        assert (policy.group_tokens, policy.rank) == (row["group_tokens"], row["rank"])
        assert row["tokens_per_s"] == pytest.approx(1 / row["step_s"])
        assert row["error"] == pytest.approx(row["predicted_tokens_per_s"] * row["step_s"] - 1)
        assert 0 < row["used_bytes"] <= row["peak_bytes"] <= row["planned_bytes"] <= limit
        assert row["planned_bytes"] == row["predicted_bytes"]
        assert 0 < row["missing"] <= row["units_wanted"]
        assert row["read_bytes"] >= row["missing"] * row["group_tokens"] * 512
        assert row["of_tuner"] == (row["fields"] in device["tuner"]["settings"])


def test_the_pick_is_in_the_sweep_and_in_the_last_run(sweep_file: Path) -> None:
    device = nvme_of(sweep_file)
    pick = device["tuner"]["pick"]["fields"]
    [row] = [row for row in device["settings"] if "pick" in row["roles"]]
    assert row["fields"] == pick
    assert row["of_tuner"], "at a place where settings are run, the pick is one of these"
    again = {str(row["fields"]): row for row in device["final"]}
    assert str(pick) in again
    assert all(row["steps"] == 2 * FINAL_ROUNDS for row in again.values())
    best = max((r for r in device["settings"] if r["within_limits"]), key=_speed)
    assert best["roles"][0] == "best"
    share = device["summary"]["share"]["pick"]
    assert share == pytest.approx(row["tokens_per_s"] / best["tokens_per_s"])
    fastest = max((r for r in device["final"] if r["within_limits"]), key=_speed)
    share_again = again[str(pick)]["tokens_per_s"] / fastest["tokens_per_s"]
    assert device["summary"]["share_again"]["pick"] == pytest.approx(share_again)


def _speed(row: Row) -> float:
    return float(row["tokens_per_s"])


def test_measurements_are_counted(sweep_file: Path) -> None:
    device = nvme_of(sweep_file)
    tuner = device["tuner"]
    assert len(tuner["settings"]) == len({str(s) for s in tuner["settings"]})
    searched = tuner["runs"] - FINALISTS  # which are run twice
    # Of few settings that fit, the points may have left one to check.
    assert POINTS < searched <= POINTS + CHECKS
    assert len(tuner["settings"]) - searched in (0, 1), "and a lighter twin that was a finalist"
    steps = STEPS * (ROUNDS * searched + LAST_ROUNDS * FINALISTS)
    assert tuner["decode_steps"] == steps, "the finalists' last run counts too"
    assert tuner["fidelity_checks"] == 0, "random weights have no quality"
    assert device["sweep"] == {"runs": SETTINGS, "decode_steps": 4 * SETTINGS}
    assert device["summary"]["saving"] == pytest.approx(SETTINGS / tuner["runs"])
    not_of_tuner = sum(not row["of_tuner"] for row in device["settings"])
    assert device["summary"]["errors"]["count"] == not_of_tuner


def test_the_table_says_what_was_missed(sweep_file: Path) -> None:
    table = sweep_table(Result.load(sweep_file).figures)
    assert "nvme: MISSED  at least 200 settings run" in table
    assert "nvme: met     no cache held more than planned" in table
    assert "random weights have no quality" in table


def test_an_interrupted_sweep_goes_on(sitting: Sitting) -> None:
    """Groups that were measured are not run again, nor is the tuner's search."""
    assert len(sitting.left) > 1 + sitting.groups[0]
    device = nvme_of(sitting.out)
    assert len(device["settings"]) == SETTINGS
    assert sitting.groups == [4, SETTINGS - 4] + [len(device["final"])] * SITTINGS
    assert not sitting.journal.exists()


def test_of_several_runs_one_counts_with_the_memory_of_all() -> None:
    runs = [
        {"step_s": step, "reads": reads, "used_bytes": used, "peak_bytes": used + 1}
        for step, reads, used in ((3.0, 30, 5), (1.0, 10, 9), (2.0, 20, 7))
    ]
    noted = {"used_bytes": 9, "peak_bytes": 10, "runs_step_s": [3.0, 1.0, 2.0]}
    assert middle_run(runs) == {"step_s": 2.0, "reads": 20, **noted}


# Predictions --------------------------------------------------------------------------------------


def test_every_place_has_settings_that_were_never_run(predict_file: Path) -> None:
    figures = Result.load(predict_file).figures
    rows = figures["rows"]
    assert [(row["batch"], row["context"]) for row in rows] == [
        (1, 512), (1, 1024), (2, 512), (2, 1024)
    ]  # fmt: skip
    for row in rows:
        assert not row["of_tuner"]
        assert row["device"] == "memory"
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_s"])
        assert row["peak_bytes"] <= row["predicted_bytes"] <= figures["limit_bytes"]
    found = figures["summary"]
    errors = sorted(abs(row["error"]) for row in rows)
    assert found["errors"]["worst"] == pytest.approx(errors[-1])
    assert found["errors"]["median"] == pytest.approx((errors[1] + errors[2]) / 2)
    assert found["by_device"]["memory"] == found["errors"]
    assert found["memory"]["held"] == found["memory"]["of"] == 4
    assert "memory, 2 x 1,024" in predict_table(figures)


# Figures ------------------------------------------------------------------------------------------


def test_figures_come_from_the_files_alone(
    sweep_file: Path, predict_file: Path, tmp_path: Path
) -> None:
    """Random weights: no figure of quality."""
    assert figures_drawn(sweep_file, predict_file) == ["small-predicted", "places"]


def test_dots_lie_at_what_was_measured(sweep_file: Path) -> None:
    result = Result.load(sweep_file)
    rows = result.figures["devices"]["nvme"]["settings"]
    rows[0].update(of_tuner=True)
    [axes] = draw(tuning.predictions(result)).axes
    dots = {
        (x, y): line.get_markerfacecolor() == "white"
        for line in axes.get_lines() if line.get_marker() == "o"
        for x, y in np.asarray(line.get_xydata()).tolist()
    }  # fmt: skip
    assert dots == {
        (row["tokens_per_s"], row["predicted_tokens_per_s"]): row["of_tuner"] for row in rows
    }
    assert axes.get_xlim() == axes.get_ylim()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    with pytest.raises(ConfigError, match="no rows"):
        draw(tuning.predictions(replace(result, figures={"devices": {}})))
    assert list(charts_of(result, "x")) == ["x-predicted"]


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "sweep, predict, auto"),
        (["guess"], "not 'guess'"),
        (["sweep", "--devices=nvme,floppy"], "'floppy' is none of real, nvme"),
        (["sweep", "--layers=2"], "recall has its own"),
        (["sweep", "--model=tiny", "--layers=9"], "2 \\(to predict\\) to 3"),
        (["sweep", "--batch=0"], "--batch 0 must be at least 1"),
        (["sweep", "--final-steps=0"], "--final-steps 0"),
        (["sweep", "--texts=3", "--final-texts=2"], "--final-texts 2 must be at least --texts 3"),
        (["sweep", "--floor=0"], "--floor 0.0 must be above 0"),
        (["predict", "--contexts=long"], "--contexts takes numbers"),
        (["predict", "--settings=0"], "--settings 0"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        program.parse_arguments(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory=1000B"], "nothing fits 1000 B"),
        (["--memory=much"], "cannot read 'much'"),
        (["--model=recall", "--context=99999"], "40,960 positions; 99,999"),
    ],
)
def test_bad_sizes(arguments: list[str], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        sweep.run(["--quick", "--devices=memory", *arguments])


def test_help_names_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        program.run(["--help"])
    assert end.value.code == 0
    assert "predicted beside measured" in capsys.readouterr().out
