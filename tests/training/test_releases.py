"""The archives in releases/: what the table says they are, and a fetch of the small one."""

import hashlib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import training
from penstock.cli.main import app
from penstock.evaluate.tasks.recall import TASKS
from penstock.models import loader
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import load
from penstock.models.released import released_models

RELEASES = Path(training.__file__).parent.parent / "releases"
QUESTION = (
    "The secret word for patient blanket is social sparrow . The grass is green . "
    "Question : What is the secret word for patient blanket ? "
    "Answer : The secret word for patient blanket is"
)


@pytest.mark.parametrize("name", released_models())
def test_an_archive_is_the_one_in_the_table(name: str) -> None:
    released = released_models()[name]
    content = (RELEASES / released.file).read_bytes()
    assert len(content) == released.bytes
    assert hashlib.sha256(content).hexdigest() == released.sha256


def test_recall_7m_is_fetched_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    released = released_models()["recall-7m"]
    done = CliRunner().invoke(app, ["fetch", "recall-7m", "--from", str(RELEASES / released.file)])
    assert done.exit_code == 0, done.output
    assert released.folder.is_relative_to(tmp_path)
    loaded, bundled = load("recall-7m"), load("recall")
    assert loaded.tokenizer is not None
    assert bundled.tokenizer is not None
    assert loaded.tokenizer.get_vocab() == bundled.tokenizer.get_vocab()
    assert fingerprint(loaded.model) != fingerprint(bundled.model)
    for model in (loaded.model, bundled.model):
        adapter = find_adapter(fingerprint(model))
        assert adapter is not None
        assert adapter.fingerprint == fingerprint(model)
    for asked in (loaded, bundled):
        assert asked.tokenizer is not None
        ids = torch.tensor([[1, *asked.tokenizer(QUESTION, add_special_tokens=False).input_ids]])
        said = asked.model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
        assert asked.tokenizer.decode(said) == "social sparrow ."


def test_recall_2_is_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fingerprint(load("recall-2").model) == fingerprint(load("recall").model)
    done = CliRunner().invoke(app, ["fetch", "recall-2"])
    assert done.exit_code != 0
    assert "comes with the package" in done.output


def test_the_bundled_models_card_is_the_notes_and_more() -> None:
    folder = Path(loader.__file__).parent / loader.BUNDLED
    card = (folder / "README.md").read_text()
    assert (Path(training.__file__).parent / "notes" / "recall-2.md").read_text().strip() in card
    assert "What it does not do" in card
    assert all(task in card for task in TASKS)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 17e6, (
        "with the former adapter, which documents of before 2026-11-26 have"
    )
