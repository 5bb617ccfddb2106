"""A mistyped disk or library becomes no folder, whatever command it is given to."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app
from penstock.core.errors import ConfigError

PROMPT = ("--prompt", "The grass is green .")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("place", ["nvem", "deep/nvem", "emmc:nvem"])
@pytest.mark.parametrize(
    "command",
    [
        ("generate", "recall", *PROMPT, "--disk"), ("search", "recall", *PROMPT, "--disk"),
        ("tune", "recall", "--disk"), ("devices", "--disk"),
        ("demo", "--tokens", 2048, "--disk"),
        ("generate", "recall", *PROMPT, "--policy", "hillinfer", "--disk"),
        ("doc", "add", "recall", "text", "--name", "d", "--library", ".", "--disk"),
    ],
    ids=lambda command: " ".join(map(str, command[:2])),
)  # fmt: skip
def test_a_disk(
    command: tuple[object, ...], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("The grass is green . " * 40)
    done = run(*command, place)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == []


def test_a_library(tmp_path: Path) -> None:
    for options in (("ls",), ("gc",), ("show", "d"), ("rm", "d")):
        done = run("doc", *options, "--library", tmp_path / "nvem" / "documents")
        assert done.exit_code == 2
        assert f"there is no folder {tmp_path / 'nvem'} for the library; make it" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert run("doc", "ls", "--library", tmp_path / "documents").exit_code == 0


def test_the_user_s_own_library_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PENSTOCK_LIBRARY", raising=False)
    assert run("doc", "ls").exit_code == 0
    assert (tmp_path / "home" / ".local" / "share" / "penstock" / "documents").is_dir()


def test_a_fetched_model(tmp_path: Path) -> None:
    done = run("fetch", "prose-1", "--to", tmp_path / "nvem" / "prose-1", "--from", tmp_path)
    assert done.exit_code == 2
    assert "nvem; make it first" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_from_python(tmp_path: Path) -> None:
    for store in (tmp_path / "nvem", str(tmp_path / "nvem"), f"ufs:{tmp_path / 'nvem'}"):
        with pytest.raises(ConfigError, match="there is no directory"):
            penstock.LLM("recall", store=store).generate(["The grass is green ."])
    assert list(tmp_path.iterdir()) == []
