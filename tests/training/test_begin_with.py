"""Runs that begin with another run's model: its weights and no others, and what is refused."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import training
from penstock.models.loader import load
from training import card_sittings, model_card, train
from training.checkpoint import load_checkpoint, read_vocabulary
from training.data import RowMaker
from training.settings import read_settings
from training.trainer import Trainer

TOY = Path(training.__file__).parent / "configs" / "toy.toml"
SHORT = {
    "micro_batch_tokens = 2048": "micro_batch_tokens = 512",
    "steps = 20": "steps = 4",
    "samples = 2": "samples = 1",
    "seed = 0": "seed = 5",
}


def write(path: Path, changes: dict[str, str]) -> Path:
    text = TOY.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def run(folder: Path, name: str, *more: str) -> int:
    settings = write(folder / "short.toml", SHORT)
    return train.main([str(settings), "--out", str(folder / name), "--workers", "0", *more])


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    assert run(folder, "toy", "--seed", "1") == 0
    return folder / "toy" / "model"


def test_weights_are_those_of_the_model_and_the_optimizer_is_new(
    first: Path, tmp_path: Path
) -> None:
    assert run(tmp_path, "second", "--from", str(first), "--minutes", "0.01") == 3
    state = load_checkpoint(tmp_path / "second")
    assert state is not None
    assert state["steps_done"] == 0
    for name, weight in load(first, dtype="float32").model.state_dict().items():
        assert torch.equal(weight, state["model"][name]), name
    assert all(not part["state"] for part in state["optimizers"])
    (begin, *_) = (tmp_path / "second" / "log.jsonl").read_text().splitlines()
    digest = hashlib.sha256((first / "model.safetensors").read_bytes()).hexdigest()
    assert json.loads(begin)["begun_with"] == {"model": "toy/model", "sha256": digest}


def test_the_loss_goes_on_where_the_model_was(first: Path, tmp_path: Path) -> None:
    settings = read_settings(write(tmp_path / "short.toml", SHORT))
    batch = RowMaker(settings, read_vocabulary()).batch(9)
    losses = []
    for begin in (None, first):
        trainer = Trainer(settings, read_vocabulary(), torch.device("cpu"))
        if begin is not None:
            trainer.begin_with(begin)
        trainer.step([batch])
        losses.append(trainer.figures().loss)
    assert losses[0] > 7.2  # log 1472 is 7.3
    assert losses[1] < losses[0] - 0.3


def test_a_run_that_was_begun_so_just_resumes(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--from", str(first))
    assert run(tmp_path, "through", *given) == 0
    asked = iter([""] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(train.Stop, "reason", lambda self: next(asked, "the time is up"))
        assert run(tmp_path, "in two", *given) == 3
    assert run(tmp_path, "in two", *given) == 2, "a checkpoint is not overwritten unasked"
    assert run(tmp_path, "in two", "--resume", *given, "--minutes", "0.01") == 3, "the same model"
    assert run(tmp_path, "in two", "--resume") == 0
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("through", "in two")
    ]
    assert weights[0] == weights[1]
    begins = [
        (record["step"], record["begun_with"]["model"])
        for record in card_sittings.read_log(tmp_path / "in two" / "log.jsonl")
        if record["kind"] == "begin"
    ]
    assert begins == [(0, "toy/model"), (3, "toy/model"), (3, "toy/model")]
    monkeypatch.setattr(model_card, "_draw", lambda records, folder: False)
    model_card.write_card(tmp_path / "in two", tmp_path / "none.json")
    card = (tmp_path / "in two" / "model" / "README.md").read_text()
    assert "Begun with the weights of toy/model" in card
    assert "random weights" not in card


def test_the_checkpoint_of_another_run_is_not_taken_up(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "own", "--minutes", "0.01") == 3
    assert run(tmp_path, "own", "--resume", "--from", str(first)) == 2
    assert "did not begin with" in capsys.readouterr().err
    assert run(tmp_path, "own", "--resume", "--minutes", "0.01") == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers = 2", "layers = 3", "num_hidden_layers is 2, the settings have 3"),
        ("kv_heads = 1", "kv_heads = 2", "num_key_value_heads is 1"),
        ("rope_theta = 1e4", "rope_theta = 2e4", "rope_parameters is"),
    ],
)
def test_models_of_another_shape_are_refused(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str,
    message: str,
) -> None:  # fmt: skip
    other = write(tmp_path / "other.toml", {**SHORT, old: new})
    words = [str(other), "--out", str(tmp_path / "run"), "--workers", "0", "--from", str(first)]
    assert train.main(words) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert message in errors[0]
    assert load_checkpoint(tmp_path / "run") is None


def test_a_folder_without_a_model_is_refused(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "run", "--from", str(first.parent)) == 2
    assert "give the model/ of a run" in capsys.readouterr().err
