"""`penstock doc` over several folders and failures: what was done is there, and is said."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import screen
from penstock.cli.main import app
from penstock.core.errors import FetchError, StoreFullError
from penstock.documents.document import Document
from penstock.documents.questions import Question
from penstock.generation.output import RequestOutput
from penstock.models import loader
from penstock.models.loader import BUNDLED
from penstock.storage.documents import DocumentWriter

TEXT = "The grass is green . The sky is blue . The sun is yellow . Here we go . " * 8
FEW = ("--max-new-tokens", 3, "--disk", "memory")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LIBRARY", str(tmp_path / "lib"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)


def doc(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["doc", *map(str, arguments)])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that stays as it is."""
    (text := tmp_path_factory.mktemp("stored") / "text.txt").write_text(TEXT)
    library = text.parent / "lib"
    options = ("--name", "green", "--disk", "memory", "--library", library)
    done = doc("add", "recall", text, *options)
    assert done.exit_code == 0, done.stderr
    return library


@pytest.fixture
def _green(stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored, tmp_path / "lib")


def test_a_models_folder_is_found_from_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(loader.__file__).parent / BUNDLED, tmp_path / "mm")
    done = doc("add", "./mm", "text.txt", "--name", "green", "--disk", "memory")
    assert done.exit_code == 0, done.stderr
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = doc("ask", "green", "The grass is", *FEW)
    assert done.exit_code == 0, done.stderr
    (tmp_path / "mm").rename(tmp_path / "moved")
    done = doc("ask", "green", "The grass is", *FEW)
    assert done.exit_code == 2
    assert f"no model folder {tmp_path / 'mm'}" in done.stderr
    assert "--model" in done.stderr
    done = doc("ask", "green", "The grass is", "--model", tmp_path / "moved", *FEW)
    assert done.exit_code == 0, done.stderr


@pytest.mark.usefixtures("_green")
def test_what_was_removed_is_said_where_storing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    [entry] = json.loads(doc("ls", "--json").stdout)["documents"]
    options = ("--name", "new", "--max-disk", int(1.6 * entry["size_bytes"]), "--disk", "memory")
    done = doc("add", "recall", "text.txt", *options, "--policy", "h2o")
    assert (done.exit_code, "removed" in done.stderr) == (2, False), done.stderr
    assert [each["name"] for each in json.loads(doc("ls", "--json").stdout)["documents"]] == [
        "green"
    ]

    def fail(*_: object, **__: object) -> None:
        raise StoreFullError("the disk is full")

    monkeypatch.setattr(DocumentWriter, "commit", fail)
    done = doc("add", "recall", "text.txt", *options)
    assert done.exit_code == 1
    assert "removed green, to make room" in done.stderr
    assert "error: the disk is full" in done.stderr
    assert json.loads(doc("ls", "--json").stdout)["documents"] == []


@pytest.mark.usefixtures("_green")
def test_all_questions_are_checked_before_the_first_is_answered() -> None:
    long = "green " * 41000
    for questions, words in (
        (["The grass is", " "], "question 2 is empty"),
        (["The grass is", "a\udcff"], "a question is not UTF-8 text"),
        (["The grass is", "Here", long], "question 3 has "),
    ):
        for keep in ([], ["--keep"]):
            done = doc("ask", "green", *questions, *keep, *FEW)
            assert (done.exit_code, done.stdout) == (2, "")
            assert words in done.stderr
    [entry] = json.loads(doc("ls", "--json").stdout)["documents"]
    assert (entry["generation"], entry["asks"]) == (1, 6)


@pytest.mark.usefixtures("_green")
@pytest.mark.parametrize("keep", [[], ["--keep"]])
def test_answers_that_were_done_are_printed_where_a_later_one_fails(
    keep: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = json.loads(doc("ask", "green", "The grass is", *FEW, "--json").stdout)
    once = Document._ask_once

    def fails_then(document: Document, question: Question, *rest: Any) -> RequestOutput:
        if question.text == "The sun":
            raise FetchError("the disk has failed")
        return once(document, question, *rest)

    monkeypatch.setattr(Document, "_ask_once", fails_then)
    asked = ("ask", "green", "The grass is", "The sun", *keep, *FEW)
    done = doc(*asked, "--json")
    assert (done.exit_code, done.stderr) == (1, "error: the disk has failed\n")
    [answer] = json.loads(done.stdout)
    assert (answer["question"], answer["answer"]) == ("The grass is", expected["answer"])
    done = doc(*asked)
    assert done.exit_code == 1
    assert len(done.stdout.splitlines()) == 1


def test_storing_that_takes_a_while_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    done = doc("add", "recall", "text.txt", "--name", "quick", "--disk", "memory")
    assert "store" not in done.stderr
    monkeypatch.setattr(screen, "_QUIET_S", 0.0)
    done = doc("add", "recall", "text.txt", "--name", "slow", "--disk", "memory")
    lines = done.stderr.splitlines()
    assert done.exit_code == 0, done.stderr
    at = next(i for i, line in enumerate(lines) if line.startswith("store 100%"))
    assert any(line.startswith("prefill 100 %") for line in lines[:at])
