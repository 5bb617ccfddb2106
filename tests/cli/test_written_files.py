"""Files beside an answer: refused before the work if they cannot be, written behind the answer."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.generate import check_writable
from penstock.cli.main import app
from penstock.core.errors import ConfigError

PROMPT = "The grass is green . The sky is blue . Here we go ."
GENERATE = ("generate", "recall", "--prompt", PROMPT, "--max-new-tokens", 3, "--disk", "memory")
SEARCH = (
    "search", "recall", "--prompt", PROMPT, "--beams", 4, "--step", 4, "--max-new-tokens", 4,
    "--seed", 1, "--temperature", 2, "--store", "memory",
)  # fmt: skip


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_looking_leaves_everything_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "new", "--trace")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    (tmp_path / "ahead").symlink_to(tmp_path / "none")
    for name in ("old", "link", "ahead"):
        check_writable(tmp_path / name, "--trace")
    assert (tmp_path / "old").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ahead", "link", "old"]
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "pipe", "--trace")
    check_writable(Path("/dev/null"), "--trace")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "is a folder"),
        ("no/file", "does not exist"),
        ("n" * 300, "cannot be written"),
        ("/proc/penstock.png", "cannot be written"),
        ("loop", "cannot be written"),
    ],
)
def test_what_cannot_be_written(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=rf"^--trace .* {words}"):
        check_writable(tmp_path / name, "--trace")


@pytest.mark.parametrize(
    "command",
    [
        (*GENERATE, "--trace"),
        (*SEARCH, "--tree"),
        ("calibrate", "recall", "--text", __file__, "--output"),
        ("tune", "recall", "--output"),
    ],
    ids=lambda command: str(command[0]),
)
def test_it_is_refused_before_the_work(command: tuple[object, ...]) -> None:
    done = run(*command, "/proc/penstock.png")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {command[-1]} /proc/penstock.png cannot be written")


@pytest.mark.parametrize("command", [(*GENERATE, "--trace"), (*SEARCH, "--tree")])
@pytest.mark.parametrize("as_json", [True, False])
def test_the_answer_comes_first(
    command: tuple[object, ...], as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes the folder away meanwhile has the answer all the same."""
    monkeypatch.setattr("penstock.cli.generate.check_writable", lambda *_: None)
    monkeypatch.setattr("penstock.cli.search.check_writable", lambda *_: None)
    options = ["--json"] if as_json else []
    done = run(*command, tmp_path / "gone" / "file.png", *options)
    assert done.exit_code == 1
    assert "error: cannot write the t" in done.stderr.splitlines()[-1]
    expected = run(*command[:-1], *options)
    if as_json:
        told, whole = json.loads(done.stdout), json.loads(expected.stdout)
        assert told.keys() == whole.keys()
    else:
        assert done.stdout == expected.stdout != ""
        assert len(done.stderr.splitlines()) > 5, "the table is there too"
