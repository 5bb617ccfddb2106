"""The gate: read strictly, and a run whose seed has not found what it asks for ends there."""

from pathlib import Path

import pytest

import training
from penstock.core.errors import ConfigError
from training import train
from training.gate import REFUSED, Gate, SeedRefused
from training.settings import read_settings

CONFIGS = Path(training.__file__).parent / "configs"


def gated(path: Path, *, task: str = "multi_value", step: int = 20, loss: float = 0.01) -> Path:
    """The toy with a gate."""
    text = (CONFIGS / "toy.toml").read_text()
    path.write_text(f'{text}\n[gate]\nstep = {step}\ntask = "{task}"\nloss = {loss}\n')
    return path


def test_losses_are_looked_at_once_the_step_is_there() -> None:
    gate = Gate(step=10, task="copy", loss=0.2)
    assert not gate.check(9, {"copy": 5.0})
    assert not gate.check(10, {"multi_value": 5.0})
    assert gate.check(10, {"copy": 0.2})
    for loss in (0.21, float("nan")):
        with pytest.raises(SeedRefused, match=r"at step 12 copy has .* 0.2 of runs .* --seed"):
            gate.check(12, {"copy": loss})


def test_settings_have_one_or_none(tmp_path: Path) -> None:
    assert read_settings(CONFIGS / "toy.toml").gate is None
    read = read_settings(gated(tmp_path / "toy.toml", step=100))
    assert read.gate == Gate(step=100, task="multi_value", loss=0.01)
    assert read.scaled(0.5).gate == Gate(step=50, task="multi_value", loss=0.01)
    assert read.scaled(0.001).gate == Gate(step=1, task="multi_value", loss=0.01)
    assert read_settings(CONFIGS / "toy.toml").scaled(0.5).gate is None
    with pytest.raises(ConfigError, match="not 'riddle'"):
        read_settings(gated(tmp_path / "bad.toml", task="riddle"))
    with pytest.raises(ConfigError, match="a step above 0"):
        read_settings(gated(tmp_path / "bad.toml", step=0))


def run(settings: Path, out: Path, *more: str) -> int:
    return train.main(
        [str(settings), "--out", str(out), "--device", "cpu", "--scale", "0.1", *more]
    )


def test_a_run_is_refused_and_another_one_takes_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "LOG_S", 0.0)  # losses of every step
    settings, out = gated(tmp_path / "toy.toml"), tmp_path / "run"
    assert run(settings, out, "--workers", "0") == REFUSED
    said = capsys.readouterr().err
    assert "multi_value has" in said
    assert "give another --seed" in said
    assert not (out / "model").exists()
    gated(settings, loss=100.0)
    assert run(settings, out, "--workers", "0", "--seed", "7") == 0
    assert (out / "model" / "config.json").is_file()
