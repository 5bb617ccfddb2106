"""The archives in releases/: what the table says they are, and a fetch of the small one."""

import hashlib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import training
from penstock.bench.tasks.recall import TASKS
from penstock.cli.main import app
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import load
from penstock.models.released import released_models

RELEASES = Path(training.__file__).parent.parent / "releases"


@pytest.mark.parametrize("name", released_models())
def test_an_archive_is_the_one_in_the_table(name: str) -> None:
    released = released_models()[name]
    content = (RELEASES / released.file).read_bytes()
    assert len(content) == released.bytes
    assert hashlib.sha256(content).hexdigest() == released.sha256


def test_recall_2_is_fetched_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    released = released_models()["recall-2"]
    done = CliRunner().invoke(app, ["fetch", "recall-2", "--from", str(RELEASES / released.file)])
    assert done.exit_code == 0, done.output
    assert released.folder.is_relative_to(tmp_path)
    for line in (released.folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((released.folder / name).read_bytes()).hexdigest() == digest
    loaded, bundled = load("recall-2"), load("recall")
    assert loaded.tokenizer is not None
    assert bundled.tokenizer is not None
    assert loaded.tokenizer.get_vocab() == bundled.tokenizer.get_vocab()
    assert find_adapter(fingerprint(loaded.model)) is not None
    card = (released.folder / "README.md").read_text()
    assert "What it does not do" in card
    assert all(task in card for task in TASKS)
    asked = "What is the secret word for patient blanket ?"
    text = (
        "The secret word for patient blanket is social sparrow . The grass is green . "
        f"Question : {asked} Answer : The secret word for patient blanket is"
    )
    ids = torch.tensor([[1, *loaded.tokenizer(text, add_special_tokens=False).input_ids]])
    said = loaded.model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert loaded.tokenizer.decode(said) == "social sparrow ."
