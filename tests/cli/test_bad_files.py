"""Every file that any command takes, in every bad state: one line and an exit code, at once.

The commands and their parameters are the application's own; a new one is asked for its line here.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.engine.adapter import FORMAT
from penstock.testing.tiny_chat import tiny_chat_model
from tests.shared_weights import read_once

PROMPT = ("--prompt", "The grass is green .")
LEAST: dict[str, tuple[object, ...]] = {
    "generate": ("recall", *PROMPT, "--disk", "memory", "--max-new-tokens", 2),
    "chat": ("talks", "--disk", "memory", "--max-new-tokens", 2, "--memory", "1/2"),
    "search": ("talks", *PROMPT, "--beams", 2, "--max-new-tokens", 2, "--disk", "memory"),
    "calibrate": ("talks", "--text", __file__, "-o", "made.safetensors"),
    "tune": ("talks", "--max-context", 512, "--disk", "nvme", "-o", "made.json"),
    "doc add": ("talks", "good.txt", "--name", "d", "--library", ".", "--disk", "memory"),
    "doc ask": ("d", "What ?", "--library", "."),
    "doc verify": ("d", "--library", "."),
    "doc ls": (), "doc gc": (), "doc show": ("d",), "doc rm": ("d",), "doc key": ("made.key",),
    "fetch": ("prose-1", "--from", "none"),
    "serve": ("talks", "--port", 0, "--check", "--disk", "memory", "--memory", "64MiB"),
}  # fmt: skip
"""The least that a command with a file among its parameters can be given; "talks" is a model of two
layers with a chat template."""
TEXTS = ("prompt_file", "text", "file", "messages")
"""Any text will do for these."""
WRITTEN = ("trace", "tree", "output", "save_tables", "to", "library", "sessions")
DEEP = "[" * 100_000


def bad_files(folder: Path) -> dict[str, Path]:
    """Files of every kind that is none of ours."""
    made: dict[str, bytes] = {
        "empty": b"", "binary": bytes(range(256)) * 9, "half.json": b'{"format": "penstock-conf',
        "deep.json": DEEP.encode(), "list.json": b"[1, 2]", "null.json": b"null",
        "keys.json": b'{"format": "penstock-config-1", "model": 3, "solutions": {}}',
        "tables.json": b'{"format": "penstock-tables-1", "entries": [{}]}',
        "newer.json": b'{"format": "penstock-config-99"}', "nan.json": b'{"format": NaN}',
        "half.safetensors": (1 << 40).to_bytes(8, "little") + b"{",
        "header.safetensors": (2).to_bytes(8, "little") + b"[]",
    }  # fmt: skip
    for name, content in made.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    about = {"format": FORMAT, "fingerprint": "x", "tokens": "9", "layers": "1"}
    basis = torch.eye(8, 4)
    save_file({"layers.0.basis": basis}, folder / "lacks.safetensors", about)
    save_file(
        {"layers.0.basis": basis.to(torch.int8), "layers.0.peak": torch.ones(4),
         "prediction_cosine": torch.ones(1)}, folder / "dtype.safetensors", about,
    )  # fmt: skip
    save_file({"a": basis}, folder / "words.safetensors", about | {"layers": "many"})
    np.savez(folder / "arrays.npz", a=np.ones(3))
    names = [*made, "lacks.safetensors", "dtype.safetensors", "words.safetensors", "arrays.npz"]
    return {name: folder / name for name in [*names, "pipe", "folder", "none"]} | {
        "endless": Path("/dev/zero")
    }


def takers(under: typer.Typer = app, words: str = "") -> Iterator[tuple[str, str, str]]:
    """Every command's parameters that are paths: command, parameter, option."""
    for group in under.registered_groups:
        assert group.typer_instance is not None
        name = group.name or group.typer_instance.info.name
        yield from takers(group.typer_instance, f"{words} {name}".strip())
    for command in under.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            if "pathlib" not in str(hint).partition("<")[0]:
                continue
            [about] = hint.__metadata__
            is_option = isinstance(about, typer.models.OptionInfo)
            said = [word for word in about.param_decls or () if word.startswith("--")]
            option = (said or [f"--{name.replace('_', '-')}"])[0] if is_option else ""
            yield f"{words} {command.name}".strip(), name, option


TAKERS = list(takers())


def test_every_command_with_files_is_known() -> None:
    assert len(TAKERS) > 20
    assert {command for command, _, _ in TAKERS} <= set(LEAST)


@contextmanager
def soon(seconds: int) -> Iterator[None]:
    """Whoever waits for a pipe is woken up."""

    def wake(*_: object) -> None:
        raise TimeoutError("it waits")

    former = signal.signal(signal.SIGALRM, wake)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def arguments(command: str, name: str, option: str, path: Path) -> list[str]:
    """The least of a command, with this file in its place."""
    least = list(LEAST[command])
    if not option:
        places = {"doc add": 1, "doc key": 0}
        least[places[command]] = path
        return [*command.split(), *map(str, least)]
    if name == "prompt_file":
        at = least.index("--prompt")
        del least[at : at + 2]
    for said in {option, {"--output": "-o"}.get(option, option)}:
        if said in least:
            at = least.index(said)
            del least[at : at + 2]
    return [*command.split(), *map(str, least), option, str(path)]


def wanted(name: str) -> tuple[str, ...] | None:
    """The states that are errors for a parameter; None: all of them."""
    if name in TEXTS:
        return "none", "pipe", "folder", "endless", "binary", "empty"
    if name in ("library", "sessions"):
        return "binary", "pipe", "endless"
    if name == "session":  # a chat, or a place for one
        return "binary", "pipe", "endless", "half.json"
    if name in WRITTEN:
        return "folder", "binary", "half.json", "arrays.npz"
    return None


PLACES = ("none", "pipe", "folder", "endless")
"""States of what a name leads to: commands may look at it before they read."""


def share_of(states: tuple[str, ...], command: str, name: str) -> list[str]:
    """What a file holds is for the reader that commands share: they take turns with such states."""
    sharing = [each for each, other, _ in TAKERS if other == name]
    held = [state for state in states if state not in PLACES]
    mine = held[sharing.index(command) :: len(sharing)]
    return [state for state in states if state in PLACES or state in mine]


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models") / "talks"
    tiny_chat_model(folder=folder)
    with read_once(folder):
        yield folder


@pytest.mark.parametrize(
    ("command", "name", "option"), TAKERS, ids=lambda value: str(value).replace(" ", "-")
)
def test_bad_files(
    command: str, name: str, option: str, talks: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talks").symlink_to(talks)
    (tmp_path / "good.txt").write_text("The grass is green . " * 40)
    files = bad_files(tmp_path)
    states = wanted(name) or tuple(files)
    if command == "doc key":  # a new file, whatever it is called
        states = ("folder", "binary", "pipe", "endless", "empty")
    if command in ("doc ask", "doc verify") and name == "adapter":
        return  # looked at once there is a document: see the tests of documents
    for state in states if name in (*TEXTS, *WRITTEN) else share_of(states, command, name):
        before = files[state].read_bytes() if files[state].is_file() else b""
        with soon(300):
            done = CliRunner().invoke(
                app, arguments(command, name, option, files[state]), input="Who ?\n"
            )
        said = done.stderr.splitlines()
        assert done.exit_code in (1, 2), (state, done.exit_code, done.output)
        assert said, state
        assert said[-1].startswith("error: "), (state, done.stderr)
        assert "unexpected " not in said[-1], (state, said[-1])
        assert sum(line.startswith("error: ") for line in said) == 1, state
        assert "Traceback" not in done.output
        if files[state].is_file():
            assert files[state].read_bytes() == before, state


PROGRAMS = [
    ("audit", "--prompt-file"), ("bench", "accuracy", "--data"),
    ("bench", "accuracy", "--haystack"), ("bench", "needles", "--haystack"),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=" ".join)
def test_programs(program: tuple[str, ...], tmp_path: Path) -> None:
    files = bad_files(tmp_path)
    for state in ("none", "pipe", "endless", "binary"):
        with soon(300):
            done = CliRunner().invoke(app, [*program, str(files[state])])
        assert done.exit_code in (1, 2), (state, done.exit_code, done.output)
        said = done.stderr.splitlines()
        assert said[-1].startswith("error: "), (state, done.stderr)
        assert "unexpected " not in said[-1], (state, said[-1])
