"""Goals: read strictly, and a run that misses them says how to go on."""

import json
from pathlib import Path
from typing import Any

import pytest

import training
from penstock.core.errors import ConfigError
from training import train
from training.goals import Goals
from training.settings import read_settings

CONFIGS = Path(training.__file__).parent / "configs"


def aimed(path: Path, *, steps: int = 20, losses: str = "multi_value = 0.01") -> Path:
    """The toy with goals."""
    text = (CONFIGS / "toy.toml").read_text()
    path.write_text(f"{text}\n[goals]\nsteps = {steps}\n[goals.losses]\n{losses}\n")
    return path


def look(step: int, **losses: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "by_task": losses}


def test_the_last_steps_are_averaged(tmp_path: Path) -> None:
    goals = Goals(steps=100, losses={"copy": 0.2, "long_walk": 0.01, "two_walkers": 1.0})
    records = [
        look(800, copy=9.0), look(901, copy=0.1), {"kind": "glance", "step": 950, "exact": []},
        look(1000, copy=0.2, long_walk=0.02, most_frequent=5.0),
    ]  # fmt: skip
    assert goals.reached(records) == pytest.approx({"copy": 0.15, "long_walk": 0.02})
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    [line] = goals.missed(log)
    assert line.startswith("long_walk has 0.02 nats a token at the end, not 0.01")
    log.write_text(json.dumps(look(5, copy=float("nan"))) + "\n")
    assert len(goals.missed(log)) == 1
    log.write_text("")
    assert goals.missed(log) == []


def test_settings_have_some_or_none(tmp_path: Path) -> None:
    assert read_settings(CONFIGS / "toy.toml").goals is None
    assert read_settings(CONFIGS / "recall-2-last.toml").goals is not None
    read = read_settings(aimed(tmp_path / "toy.toml"))
    assert read.goals == Goals(steps=20, losses={"multi_value": 0.01})
    assert read.scaled(0.5).goals == Goals(steps=10, losses={"multi_value": 0.01})
    assert read.as_dict()["goals"] == {"steps": 20, "losses": {"multi_value": 0.01}}
    for wrong in (
        {"steps": 0}, {"losses": ""}, {"losses": "riddle = 1.0"}, {"losses": "multi_value = 0"},
        {"losses": 'multi_value = "low"'},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"\[goals\] needs"):
            read_settings(aimed(tmp_path / "bad.toml", **wrong))


def test_a_run_says_what_it_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = aimed(tmp_path / "toy.toml")
    arguments = [str(settings), "--device", "cpu", "--scale", "0.1", "--workers", "0"]
    assert train.main([*arguments, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[-2].startswith("not there yet: multi_value has")
    assert said[-1].startswith(f"go on with the same settings, --from {tmp_path / 'run'}")
    aimed(settings, losses="multi_value = 100")
    assert train.main([*arguments, "--out", str(tmp_path / "other")]) == 0
    assert "not there yet" not in capsys.readouterr().err
