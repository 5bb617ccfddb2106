"""Files beside an answer: refused before the work if they cannot be, written behind the answer."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.output_file import check_writable
from penstock.cli.tune import DEFAULT_NAME
from penstock.core.errors import ConfigError
from penstock.core.trace import TRACE

KEPT = '{"format": "penstock-trace-0"}'
PROMPT = "The grass is green . The sky is blue . Here we go ."
GENERATE = ("generate", "recall", "--prompt", PROMPT, "--max-new-tokens", 3, "--disk", "memory")
SEARCH = (
    "search", "recall", "--prompt", PROMPT, "--beams", 2, "--step", 2, "--max-new-tokens", 2,
    "--seed", 1, "--temperature", 2, "--disk", "memory",
)  # fmt: skip


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_looking_leaves_everything_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "new", "--trace", TRACE)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").write_text(KEPT)
    (tmp_path / "link").symlink_to(tmp_path / "old")
    (tmp_path / "ahead").symlink_to(tmp_path / "none")
    for name in ("old", "link", "ahead"):
        check_writable(tmp_path / name, "--trace", TRACE)
    assert (tmp_path / "old").read_text() == KEPT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ahead", "link", "old"]
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "pipe", "--trace", TRACE)
    check_writable(Path("/dev/null"), "--trace", TRACE)


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
        check_writable(tmp_path / name, "--trace", TRACE)


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


@pytest.mark.parametrize(
    ("command", "as_json"), [((*GENERATE, "--trace"), True), ((*SEARCH, "--tree"), False)]
)
def test_the_answer_comes_first(
    command: tuple[object, ...], as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes the folder away meanwhile has the answer all the same."""
    monkeypatch.setattr("penstock.cli.generate.check_writable", lambda *_, **__: None)
    monkeypatch.setattr("penstock.cli.search.check_writable", lambda *_, **__: None)
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


TUNE = ("tune", "recall", "--max-context", 512, "--disk", "nvme")
CALIBRATE = ("calibrate", "recall", "--text", __file__)
FOREIGN = {"notes.txt": b"mine", "config.json": b'{"model_type": "llama"}', "empty": b"\n"}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize(
    "command",
    [
        (*GENERATE, "--trace"), (*TUNE, "-o"), (*TUNE, "--save-tables"), (*CALIBRATE, "-o"),
        ("bench", "needles", "--out"), ("bench", "throughput", "--quick", "--out"),
        ("bench", "accuracy", "--out"), ("bench", "documents", "--out"),
        ("bench", "record", "--prompt-file", __file__, "--out"),
        ("audit", "--prompt-file", __file__, "--out"), ("doc", "key"),
    ],
    ids=lambda command: " ".join(map(str, (*command[:2], command[-1]))),
)  # fmt: skip
def test_a_file_of_somebody_else_stays(
    command: tuple[object, ...], name: str, tmp_path: Path
) -> None:
    """It is refused before the work, with an exit code of bad input."""
    (tmp_path / name).write_bytes(FOREIGN[name])
    done = run(*command, tmp_path / name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{name} is there already and " in done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: FOREIGN[name]}


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_a_picture_of_somebody_else_stays(ending: str, tmp_path: Path) -> None:
    """Also one that the same library drew; our own is drawn again."""
    picture = tmp_path / f"tree{ending}"
    Figure().savefig(picture)
    theirs = picture.read_bytes()
    done = run(*SEARCH, "--tree", picture)
    assert (done.exit_code, picture.read_bytes()) == (2, theirs)
    assert "is no picture of penstock; give another name, or --force to replace it" in done.stderr
    for options in (("--force",), ()):
        done = run(*SEARCH, "--tree", picture, *options)
        assert done.exit_code == 0, done.stderr
        assert picture.read_bytes() != theirs


def test_force_replaces_a_file_and_our_own_needs_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("mine")
    for options in (("--force",), ()):
        assert run(*GENERATE, "--trace", path, *options).exit_code == 0
        assert json.loads(path.read_text())["format"] == "penstock-trace-1"


def test_tuning_in_a_model_folder_leaves_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name that is taken where none is given is no file's of a model."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("the model's")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert not Path(DEFAULT_NAME).exists()
    refused = run(*TUNE, "-o", "config.json")
    assert refused.exit_code == 2
    assert "config.json is there already and is no config of penstock tune" in refused.stderr
    (tmp_path / "penstock-tuned.adapter.safetensors").write_text("mine")
    refused = run(*TUNE)
    assert refused.exit_code == 2
    assert "adapter.safetensors is there already and is no adapter of penstock" in refused.stderr
    (tmp_path / "penstock-tuned.adapter.safetensors").unlink()
    (tmp_path / f"{DEFAULT_NAME}.partial").write_text("mine")
    refused = run(*TUNE)
    assert refused.exit_code == 2
    assert f"{DEFAULT_NAME}.partial is there already and is no journal" in refused.stderr
    (tmp_path / f"{DEFAULT_NAME}.partial").unlink()
    assert sorted(tmp_path.iterdir()) == before
