"""The examples of the pages are run as they are pasted: every Python block, every command.

Each page has an empty folder of its own, with what its commands read (`made_files`). Its blocks run
there in their order, in this process; Python's are one session, as a reader pastes them. `prints:
TEXT` in a comment of a block is what it must print; of a command, what that command must print. A
comment in front of a block says what else is done with it, and why:

    <!-- run: with OPTIONS: why -->      each command gets these options behind its own
    <!-- run: parse only: why -->        options are read and checked, as far as the program does so
    <!-- run: skip: why -->              nothing

Parsing ends a command where its options are read. `make` is asked what it would do (`make -n`).
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import penstock.models
from penstock.cli.main import app
from penstock.evaluate.tasks.recall import make_sample
from penstock.models.cache_argument import OUTPUT_NAME
from tests.shared_weights import read_once

TOP = Path(__file__).parents[1]
PAGES = [
    str(path.relative_to(TOP))
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "benchmarks/**/*.md",
        "training/*.md",
        "research/**/*.md",
    )
    for path in sorted(TOP.glob(pattern))
    if "```sh\n" in path.read_text() or "```python\n" in path.read_text()
]
BLOCK = re.compile(
    r"(?:^<!-- run: (?P<how>[^\n]*?): (?P<why>[^\n]*) -->\n)?"
    r"^```(?P<language>sh|python)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PRINTS = re.compile(r"#.*?prints: (.*)$", re.MULTILINE)
ASSIGNMENT = re.compile(r"(\w+)=(\S+)")
UsageError = typer.BadParameter.__mro__[1]  # of click, or of the typer that has its own
WAYS = {"run", "parse only", "skip"}


@pytest.fixture(scope="module", autouse=True)
def _read_once() -> Iterator[None]:
    with read_once():
        yield


class OptionsRead(BaseException):
    """Raised behind the reading of options, where a command is only parsed."""


@dataclass(frozen=True)
class Block:
    """A block of a page: its language, its text, and how it is run."""

    language: str
    code: str
    how: str
    options: tuple[str, ...]

    def commands(self) -> Iterator[tuple[list[str], list[str]]]:
        """The words of each command, and what it must print."""
        variables: dict[str, str] = {}
        for line in self.code.replace("\\\n", " ").splitlines():
            command, _, comment = line.partition(" #")
            for name, value in variables.items():
                command = command.replace(f"${name}", value)
            if assignment := ASSIGNMENT.fullmatch(command.strip()):
                variables[assignment[1]] = assignment[2]
            elif words := shlex.split(command):
                yield [*words, *self.options], PRINTS.findall(f"#{comment}")


def blocks(page: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer((TOP / page).read_text()):
        how = match["how"] or "run"
        options = shlex.split(how.removeprefix("with ")) if how.startswith("with ") else []
        how = "run" if options else how
        assert how in WAYS, how
        found.append(Block(match["language"], match["code"], how, tuple(options)))
    return found


def made_files(folder: Path) -> None:
    """What the examples name as the reader's own."""
    text = "The grass is green . The sky is blue . The sun is yellow . Here we go . " * 8
    fact = "The secret word for patient blanket is social sparrow . "
    key = "the secret word for patient blanket"
    question = f"Question : What is {key} ? Answer : T{key[1:]} is"
    for name in ("question.txt", "task.txt"):
        (folder / name).write_text(text + fact + text + question)
    for name in ("document.txt", "sample.txt", "book.txt"):
        (folder / name).write_text(text + fact + text)
    bundled = Path(penstock.models.__file__).parent / "recall"
    shutil.copytree(bundled, folder / "my-model", copy_function=link)
    (folder / "verify.py").write_text(
        "def rate(texts):\n    return [float('social' in text) for text in texts]\n"
    )


def link(source: str, target: str) -> None:
    Path(target).symlink_to(source)


def run_python(code: str, how: str, session: dict[str, Any]) -> str:
    code = code.replace("cache=cache", f"{OUTPUT_NAME}=cache")  # as docs/quickstart.md says
    compiled = compile(code, "example", "exec")
    printed = io.StringIO()
    if how == "run":
        with contextlib.redirect_stdout(printed):
            exec(compiled, session)
    return printed.getvalue()


def run_penstock(words: list[str]) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, f"penstock {shlex.join(words)}: {result.stderr}"
    return result.stdout


@contextlib.contextmanager
def stopped_behind_options() -> Iterator[None]:
    """Within it a program that reads its options ends there, with `OptionsRead`."""
    read = argparse.ArgumentParser.parse_args

    def read_and_stop(self: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        read(self, *arguments)
        raise OptionsRead

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", read_and_stop)
        try:
            yield
        except OptionsRead:
            return
    raise AssertionError("it read no options")


def parse_penstock(words: list[str]) -> None:
    """Reads the options of a command that typer knows, or lets a benchmark read its own."""
    command: Any = get_command(app)
    path, rest = [], list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        path.append(rest.pop(0))
        command = command.commands[path[-1]]
    assert path, f"there is no command {words[0]!r}"
    if command.context_settings.get("ignore_unknown_options"):
        with stopped_behind_options():
            run_penstock(words)
    else:
        command.make_context(path[-1], rest)


def run_program(words: list[str], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a module or a file of the project, or its start, up to where its options are read."""
    is_module = words[0] == "-m"
    monkeypatch.setattr(sys, "argv", words[1:] if is_module else words)
    monkeypatch.setattr(sys, "path", [str(TOP), str((TOP / words[0]).parent), *sys.path])
    stop = stopped_behind_options if how == "parse only" else contextlib.nullcontext
    with warnings.catch_warnings(), stop():
        warnings.simplefilter("ignore", RuntimeWarning)  # a package that is imported already
        if is_module:
            runpy.run_module(words[1], run_name="__main__")
        else:
            runpy.run_path(str(TOP / words[0]), run_name="__main__")


def run_command(words: list[str], how: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs or parses one command; what it printed on stdout."""
    program, *rest = words
    if program == "make":
        if shutil.which("make"):
            # What a make that runs the tests was given is not for this one.
            ours = {name: value for name, value in os.environ.items() if "MAKE" not in name}
            asked = subprocess.run(
                ["make", "-n", "-C", TOP, *rest], env=ours, capture_output=True, check=False
            )
            assert asked.returncode == 0, asked.stderr
    elif program == "python":
        run_program(rest, how, monkeypatch)
    elif how == "run":
        assert program == "penstock"
        return run_penstock(rest)
    else:
        assert program == "penstock"
        parse_penstock(rest)
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_do_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_LIBRARY", str(tmp_path / "library of documents"))
    session: dict[str, Any] = {"__name__": "example"}
    for block in blocks(page):
        if block.how == "skip":
            continue
        if block.language == "python":
            printed = run_python(block.code, block.how, session)
            for text in PRINTS.findall(block.code) if block.how == "run" else ():
                assert text in printed, block.code
                printed = printed[printed.index(text) + len(text) :]
            continue
        for words, texts in block.commands():
            printed = run_command(words, block.how, monkeypatch)
            assert block.how != "run" or all(text in printed for text in texts), (words, printed)


def test_every_block_is_found_and_reasons_are_given() -> None:
    for page in PAGES:
        text = (TOP / page).read_text()
        assert len(blocks(page)) == len(re.findall(r"^```(?:sh|python)$", text, re.MULTILINE)), page
        assert len(re.findall("^<!-- run", text, re.MULTILINE)) == len(
            [match for match in BLOCK.finditer(text) if match["how"]]
        ), f"{page}: a marker is not `run: WAY: why`, or is not on the line before its block"


def test_wrong_options_and_commands_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no-such-option"):
        run_command(["penstock", "generate", "--no-such-option"], "parse only", monkeypatch)
    with pytest.raises(AssertionError, match="unrecognized"):
        run_command(["penstock", "bench", "needles", "--no-such-option"], "parse only", monkeypatch)
    words = ["python", "-m", "research.clusters", "--no-such-option"]
    with pytest.raises(SystemExit):
        run_command(words, "parse only", monkeypatch)
    with pytest.raises(AssertionError, match="no-such-command"):
        run_command(["penstock", "no-such-command"], "parse only", monkeypatch)
    with pytest.raises(AssertionError, match="no-such-model"):
        run_command(["penstock", "plan", "--model", "no-such-model"], "run", monkeypatch)


def test_a_command_is_read_as_a_shell_reads_it() -> None:
    code = "RUN=runs/a\npenstock X $RUN/m \\\n    --y 'b c'  # why; prints: a b .\n"
    [(words, texts)] = Block("sh", code, "run", ("--z", "1")).commands()
    assert words == ["penstock", "X", "runs/a/m", "--y", "b c", "--z", "1"]
    assert texts == ["a b ."]


def shown_lines(picture: Path) -> list[str]:
    """The lines of a terminal that rich has drawn."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        if "clip-path" in element.attrib:
            place = (float(element.attrib["x"]), (element.text or "").replace("\xa0", " "))
            lines.setdefault(float(element.attrib["y"]), []).append(place)
    return ["".join(text for _, text in sorted(lines[y])) for y in sorted(lines)]


def test_the_demo_that_the_readme_shows_is_the_one_that_runs() -> None:
    """Its document, question and answer; tests/cli/test_demo.py runs it on a shorter document."""
    assert "(docs/images/demo.svg)" in (TOP / "README.md").read_text()
    shown = "\n".join(line.rstrip() for line in shown_lines(TOP / "docs" / "images" / "demo.svg"))
    bundled = Path(penstock.models.__file__).parent / "recall"
    vocabulary = json.loads((bundled / "tokenizer.json").read_text())["model"]["vocab"]
    sample = make_sample("multi_query", 16384, random.Random(0), vocabulary)
    words = sample.prompt.split()
    facts = re.findall(r"^  at token +([\d,]+)  (.*)$", shown, re.MULTILINE)
    assert len(facts) == len(sample.values)
    for place, fact in facts:
        start = int(place.replace(",", ""))
        assert words[start : start + len(fact.split())] == fact.split()
    question = sample.prompt.rpartition("Question : ")[2].removesuffix(" Answer :")
    asked = f"Question : {question} Answer : {sample.answer.removesuffix(' <eos>')} Correct"
    assert asked in " ".join(shown.split())
