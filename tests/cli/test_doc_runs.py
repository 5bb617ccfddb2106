"""`penstock doc` over several folders and failures: what was done is there, and is said."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.core.errors import StoreFullError
from penstock.models import loader
from penstock.models.loader import BUNDLED
from penstock.storage.documents import DocumentWriter

TEXT = "The grass is green . The sky is blue . The sun is yellow . Here we go . " * 12
FEW = ("--max-new-tokens", 3, "--disk", "memory")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LIBRARY", str(tmp_path / "lib"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)


def doc(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["doc", *map(str, arguments)])


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


def test_what_was_removed_is_said_where_storing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    done = doc("add", "recall", "text.txt", "--name", "green", "--disk", "memory")
    assert done.exit_code == 0, done.stderr
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
