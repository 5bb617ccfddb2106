"""No string out of a file, a name or an answer controls the terminal, whatever command shows it."""

import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from penstock.cli.console import PlainConsole, for_reader, plain_output
from penstock.cli.main import app
from penstock.cli.screen import AnswerScreen
from penstock.models import loader
from penstock.models.loader import BUNDLED

EVIL = "\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\x9b31m\u202e[bold red]:skull:[/x]"
SEEN = "[bold red]:skull:[/x]"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
TEXT = "The grass is green . The sky is blue . The sun is yellow . Here we go . There and back . "
SMALL = ("--max-new-tokens", 2, "--disk", "memory")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shown(*arguments: object) -> str:
    """All that a command puts out, on one line as words; none of it controls anything."""
    done = run(*arguments)
    told = str(done.stdout + done.stderr)
    assert CONTROL.search(told) is None, repr(told)
    assert "Traceback" not in told
    return " ".join(told.split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in a folder of that name."""
    folder = tmp_path_factory.mktemp("models") / EVIL.replace("/", "")
    shutil.copytree(Path(loader.__file__).parent / BUNDLED, folder)
    return folder


@pytest.fixture(scope="module")
def library(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document whose manifest has such strings."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "text").write_text(TEXT * 20)
    told = shown(
        "doc", "add", model, folder / "text", "--name", "doc", "--title", EVIL, "--disk", "memory",
        "--library", folder,
    )  # fmt: skip
    assert "doc: " in told
    (folder / EVIL.replace("/", "")).mkdir()
    return folder


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (("ls",), True), (("show", "doc"), True), (("verify", "doc"), False), (("gc",), True),
        (("ask", "doc", f"{EVIL} Here we go", "The sun", *SMALL), True),
        (("ask", "doc", "The sun", "--model", EVIL, *SMALL), True),
        (("show", EVIL), True), (("rm", EVIL), True),
        (("add", "recall", EVIL, "--name", "other"), True), (("key", f"no/{EVIL}"), True),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)  # fmt: skip
def test_documents(arguments: tuple[object, ...], seen: bool, library: Path) -> None:
    where = () if arguments[0] == "key" else ("--library", library)
    told = shown("doc", *arguments, *where)
    assert not seen or "skull" in told


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", EVIL, "--prompt", "x"), ("generate", "recall", "--prompt-file", EVIL),
        ("generate", "recall", "--prompt", "x", "--disk", f"/dev/null/{EVIL}"),
        ("generate", "recall", "--prompt", "x", "--config", EVIL),
        ("generate", "recall", "--prompt", "x", "--adapter", EVIL),
        ("generate", "recall", "--prompt", "x", "--policy", EVIL),
        ("search", "recall", "--prompt", "x", "--scorer", EVIL),
        ("calibrate", "recall", "--text", EVIL, "-o", "x"), ("fetch", EVIL),
        ("tune", "recall", "-o", f"no/{EVIL}/x"), ("plan", "--model", EVIL, "--hardware", "x"),
        ("devices", "--disk", f"/dev/null/{EVIL}"), ("audit", EVIL, "--prompt-file", EVIL),
        ("bench", "accuracy", "--data", EVIL), ("bench", "needles", "--model", EVIL),
        ("bench", "throughput", f"--{EVIL}"),
        ("search", "plan", "--model", EVIL, "--memory", "1GiB"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]) if arguments[0] != "generate" else None,
)  # fmt: skip
def test_errors(arguments: tuple[object, ...], tmp_path: Path,
                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert "skull" in shown(*arguments)


def test_what_is_said_of_a_model(model: Path) -> None:
    told = shown("generate", model, "--prompt", TEXT, *SMALL)
    assert "KV cache lies on" in told


def test_strings_are_as_they_are() -> None:
    """Neither markup nor emoji, in lines and in tables; their widths are those that they have."""
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, width=120, color_system="truecolor")
    table = Table()
    table.add_column("what\x1b[2J")
    table.add_row(EVIL)
    table.add_row(Text(EVIL, "bold"))
    console.print(table)
    console.print(EVIL, style="bold")
    console.print(Text.assemble((EVIL, "red"), EVIL), soft_wrap=True)
    with console.status(Text(EVIL)):
        pass
    lines = out.getvalue()
    commands = re.findall(r"\x1b\[([0-9;?]*[A-Za-z])", lines)
    assert {command[-1] for command in commands} <= set("mlhKA"), "styles and rich's own"
    assert re.search(r"\x1b(?!\[)", lines) is None
    assert "\x07" not in lines
    assert "\x9b" not in lines
    assert lines.count("[bold red]:skull:[/x]") >= 4
    rows = [line for line in lines.splitlines() if "skull" in line and "│" in line]
    assert len({len(re.sub(r"\x1b\[[0-9;]*m", "", row)) for row in rows}) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_answer_is_spelt_out_on_a_terminal_alone() -> None:
    for out, expected in ((Terminal(), "a\\x1b[2Jb\n"), (io.StringIO(), "a\x1b[2Jb\n")):
        with AnswerScreen(None, out) as screen:
            screen.on_text(0, "a\x1b[2J")
            screen.on_text(0, "b")
        assert out.getvalue() == expected
        assert for_reader("\x07", out) == ("\\x07" if out.isatty() else "\x07")


def test_programs_that_print_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    with plain_output():
        print(EVIL)
        print(EVIL, file=sys.stderr, end="", flush=True)
    told = capsys.readouterr()
    assert told.out == told.err + "\n"
    assert CONTROL.search(told.out) is None
    assert SEEN in told.out


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_line_is_broken_between_words_on_a_terminal_alone(is_terminal: bool) -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, width=20, force_terminal=is_terminal, color_system=None)
    console.print("one line of several words", soft_wrap=True)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    broken = ["one line of several", "words"]
    assert lines == (broken if is_terminal else ["one line of several words"])
