"""Calibration never reads past the positions that a model has."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.core.errors import BudgetError, ConfigError
from penstock.models.calibrate import calibrate
from penstock.models.loader import LoadedModel, load
from penstock.storage.measured_directory import (
    MIN_FILE_BYTES,
    DirectoryMeasurement,
    measure_directory,
)
from penstock.testing.tiny_models import VOCABULARY, tiny_model
from penstock.tuner import tuning_task
from penstock.tuner.tune import tune

POSITIONS = 512
FEW = 256


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_windows_are_no_longer_than_the_positions(family: str) -> None:
    model = tiny_model(family)
    text = torch.randint(3, VOCABULARY, (POSITIONS + 300,), generator=torch.Generator())
    made = calibrate(model, [text], rank=16)
    within = calibrate(model, [text], rank=16, window_tokens=POSITIONS)
    assert made.tokens == within.tokens == len(text)
    for layer, other in zip(made.layers, within.layers, strict=True):
        assert torch.equal(layer.basis, other.basis)
    with pytest.raises(ConfigError, match="window_tokens=1 must be at least 2"):
        calibrate(model, [text], rank=16, window_tokens=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with fewer positions; beside it a text that is longer."""
    beside = tmp_path_factory.mktemp("short")
    loaded = load("recall", dtype="float32")
    model: Any = loaded.model
    tokenizer: Any = loaded.tokenizer
    model.config.max_position_embeddings = FEW
    model.save_pretrained(beside / "model")
    tokenizer.save_pretrained(beside / "model")
    (beside / "text").write_text("The grass is green . The sky is blue . " * 30)
    return beside / "model"


def test_the_command_says_so(folder: Path, tmp_path: Path) -> None:
    text = folder.parent / "text"
    options = ["--text", str(text), "-o", str(tmp_path / "adapter"), "--rank", "16"]
    for given, is_said in (([], True), (["--window", "128"], False)):
        done = CliRunner().invoke(app, ["calibrate", str(folder), *options, *given])
        assert done.exit_code == 0, done.output
        assert ("has 256 positions, so that no piece is longer" in done.stderr) == is_said


def test_tuning_for_more_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_context=32,768 is more than the 256 positions"):
        tune(str(folder), max_context=32768)
    model = tiny_model("opt")
    with pytest.raises(ConfigError, match="more than the 512 positions of it; give at most"):
        tune(LoadedModel(model=model, tokenizer=None, name="it"), max_context=2048)


def test_tuning_is_for_the_positions_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def quick(place: str, **settings: Any) -> DirectoryMeasurement:
        few = {"file_bytes": MIN_FILE_BYTES, "seconds_per_cell": 0.005}
        return measure_directory(place, **{**settings, **few})

    monkeypatch.setattr(tuning_task, "measure_directory", quick)
    monkeypatch.setattr("penstock.tuner.tune.MOST_TEXTS", 1)
    loaded = load("recall")
    model: Any = loaded.model
    few = copy.copy(model.config)
    few.max_position_embeddings = 1024
    model.config = few
    with pytest.raises(BudgetError, match=r"1,?024"):
        tune(loaded, memory=4096)
    few.max_position_embeddings = 512
    with pytest.raises(ConfigError, match="512 must be at least 1024"):
        tune(loaded)
