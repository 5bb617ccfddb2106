"""`penstock chat`: in a pipe, at a terminal, killed and resumed; no token is prefilled twice."""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.chat_session import StopOnInterrupt
from penstock.cli.main import app
from penstock.documents.conversation import Conversation
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.generation.sampling import SamplingParams
from penstock.testing.tiny_chat import tiny_chat_model
from tests.ready_process import ReadyProcess

FILE = "".join(f"On day {n} the ship had {n * 7 % 90} sacks of salt . " for n in range(13))
"""Of 500 characters and more, a token each."""
QUESTIONS = ["Who ?", "And where is that ?", "When ?", "Why so ?", "Since when ?"]
OPTIONS = ("--memory", "1/3", "--max-new-tokens", "12", "--max-context", "8000")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    tiny_chat_model(positions=8192, folder=folder)
    return folder


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text(FILE)
    return path


def chat(*arguments: object, lines: list[str], code: int = 0) -> Any:
    result = CliRunner().invoke(
        app, ["chat", *map(str, arguments)], input="".join(f"{line}\n" for line in lines)
    )
    assert result.exit_code == code, result.output
    return result


def figure(stderr: str, what: str) -> int:
    """A number of tokens that `/stats` has shown last."""
    found: list[str] = re.findall(rf"{what} +│ ([\d,]+)", stderr)
    return int(found[-1].replace(",", ""))


def test_a_file_is_taken_in(model: Path, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("The grass is green .")
    done = chat(model, *OPTIONS, lines=[f"/file {tmp_path / 'few.txt'}"])
    assert "few.txt is in (" in done.stderr


def test_a_line_is_a_turn_and_answers_alone_are_on_stdout(model: Path) -> None:
    result = chat(model, *OPTIONS, lines=["Who ?", "", "And where ?"])
    assert len(result.stdout.splitlines()) >= 2
    lines = result.stderr.splitlines()
    assert [" prefilled | " in line and " held | " in line for line in lines].count(True) == 2
    assert "> " not in result.stdout
    with Conversation(tiny_chat_model(positions=8192), memory="1/3", max_tokens=8000) as plain:
        params = SamplingParams(temperature=0, max_tokens=12)
        said = [plain.ask(each, params).text for each in ("Who ?", "And where ?")]
    assert result.stdout == "".join(f"{each}\n" for each in said)


def test_five_turns_over_a_file_saved_and_resumed(model: Path, notes: Path, tmp_path: Path) -> None:
    """What must be shown: no token twice, and the answers of a chat that nothing has cut."""
    saved = tmp_path / "saved"
    calm = chat(
        model, *OPTIONS, "--file", notes,
        lines=[*QUESTIONS[:3], f"/save {saved}", *QUESTIONS[3:], "/stats"],
    )  # fmt: skip
    held = figure(calm.stderr, "held")
    assert held > len(FILE)
    assert figure(calm.stderr, "prefilled") + figure(calm.stderr, "decoded") == held
    assert f"/resume {saved} goes on from here" in calm.stderr
    second = chat("--resume", saved, *OPTIONS[2:4], lines=[*QUESTIONS[3:], "/save", "/stats"])
    assert "3 turns in " in second.stderr
    assert len(second.stdout.splitlines()) >= len(QUESTIONS[3:])
    assert calm.stdout.endswith(second.stdout)
    assert held > figure(second.stderr, "restored") > len(FILE)
    assert figure(second.stderr, "prefilled") < 100
    assert figure(second.stderr, "held") == held


def test_a_stored_chat_knows_its_dtype(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = ("--memory", "1/2", *OPTIONS[2:], "--dtype", "bfloat16")  # the folder has float32
    chat(model, *options, lines=["Who ?", f"/save {saved}"])
    again = chat("--resume", saved, *OPTIONS[2:4], lines=["And where ?", "/stats"])
    assert figure(again.stderr, "restored") > 0
    refused = chat("--resume", saved, "--dtype", "float32", lines=["And where ?"], code=2)
    assert "dtype (bfloat16 there, float32 here)" in refused.stderr


def test_a_session_is_stored_at_every_turn(model: Path, tmp_path: Path) -> None:
    def turn(question: str) -> str:
        arguments = (model, *OPTIONS, "--session", tmp_path / "s", "--disk", "memory")
        return str(chat(*arguments, lines=[question]).stdout)

    said = turn("Who ?") + turn("And where ?")
    assert said == chat(model, *OPTIONS, lines=["Who ?", "And where ?"]).stdout


def test_several_lines_are_one_message(model: Path, tmp_path: Path) -> None:
    lines = ['"""one', "two", 'three"""', "four \\", "five", '"""six"""', f"/save {tmp_path / 'c'}"]
    chat(model, *OPTIONS, lines=lines)
    with Conversation.resume(
        str(model), tmp_path / "c", settings=DocumentSettings(store="memory")
    ) as stored:
        asked = [each["content"] for each in stored.messages if each["role"] == "user"]
    assert asked == ["one\ntwo\nthree", "four \nfive", "six"]


def test_the_system_prompt_clear_and_help(model: Path) -> None:
    result = chat(
        model, *OPTIONS, "--system", "Be brief.",
        lines=["/system", "Who ?", "/system Be long.", "Where ?", "/clear", "/stats", "/help",
               "/exit", "not asked"],
    )  # fmt: skip
    assert "Be brief." in result.stderr
    assert "the next message prefills the chat again" in result.stderr
    assert "has rewritten" in result.stderr
    assert figure(result.stderr, "held") == 0
    for name in ("/file", "/save", "/resume", "/stats", "/system", "/clear", "/exit"):
        assert name in result.stderr
    assert result.stderr.count(" prefilled |") == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/sav x", "no command /sav; /help"),
        ("/file", "/file needs a PATH"),
        ("/file nowhere.txt", "cannot read file nowhere.txt"),
        ("/save", "nothing to save|needs a PATH"),
        ("/stats x", "takes nothing"),
        ("/resume nowhere", "nowhere"),
    ],
)
def test_a_command_that_cannot_be_is_one_line(model: Path, line: str, says: str) -> None:
    result = chat(model, *OPTIONS, lines=[line], code=2 if "resume" not in line else 1)
    assert re.search(says, result.stderr)
    assert result.stderr.count("error: ") == 1


def test_refusals(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    result = chat(model, *OPTIONS, lines=["Who ?", f"/save {tmp_path / 'mine'}"], code=2)
    assert "is there already" in result.stderr
    chat(model, *OPTIONS, lines=["Who ?", f"/save {tmp_path / 'c'}"])
    for options, says in {
        ("recall",): "no chat template",
        (): "give a MODEL",
        ("--resume", tmp_path / "c", "--policy", "quest"): "its own policy",
        ("--resume", tmp_path / "c", "--disk", "ufs"): "is simulated",
        ("--resume", tmp_path / "c", "--session", tmp_path / "c"): "give one of",
        (model, "--chat-template-kwargs", "{"): "is not JSON",
        (model, "--max-new-tokens", "0"): "at least 1",
    }.items():
        assert says in chat(*options, lines=["?"], code=2).stderr
    loaded = tiny_chat_model(positions=8192)
    Document.create(loaded, "A text.", tmp_path / "d").close()
    assert "no chat" in chat(model, "--resume", tmp_path / "d", lines=["?"], code=1).stderr


def test_without_readline_and_documents(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.delattr(os, "O_DIRECTORY")
    result = chat(model, *OPTIONS, lines=["Who ?", f"/save {tmp_path / 'c'}"], code=2)
    assert result.stdout
    assert "cannot be saved or resumed on Windows" in result.stderr


def test_ctrl_c_ends_an_answer_and_then_the_turn() -> None:
    with StopOnInterrupt(active=True) as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not stop.should_stop()
        signal.raise_signal(signal.SIGINT)
        assert stop.should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


class Terminal:
    """A chat in a process of its own, at a terminal of 80 columns."""

    def __init__(self, process: ReadyProcess, terminal: int) -> None:
        self.process, self._terminal = process, terminal
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait(self, what: str, seconds: float = 240) -> str:
        """Read until something is seen; returns all up to its end, and goes on behind it."""
        until = time.monotonic() + seconds
        while not (found := re.search(what, self.seen)):
            assert time.monotonic() < until, f"no {what!r} in {self.seen!r}"
            if select.select([self._terminal], [], [], 1)[0]:
                more = os.read(self._terminal, 1 << 16).decode(errors="replace")
                self.seen = re.sub(r"\s+", " ", self.seen + more)  # lines fold anywhere
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def interrupt(self, what: str) -> None:
        """Press Ctrl-C until something is seen: Python's readline misses one that comes between two
        characters, until the next."""
        for _ in range(100):
            self.process.send_signal(signal.SIGINT)
            with suppress(AssertionError):
                self.wait(what, seconds=2)
                return
        raise AssertionError(f"no {what!r} in {self.seen!r}")


@contextmanager
def at_a_terminal(*arguments: object, home: Path) -> Iterator[Terminal]:
    pty = pytest.importorskip("pty")
    own, theirs = pty.openpty()
    try:
        with ReadyProcess(
            "from penstock.cli.entry import main; main()", "chat", *map(str, arguments),
            environment={"TERM": "dumb", "COLUMNS": "80", "HOME": str(home)},
            terminal=os.ttyname(theirs),
        ) as process:  # fmt: skip
            yield Terminal(process, own)
    finally:
        os.close(theirs)
        os.close(own)


def test_at_a_terminal_killed_and_resumed(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    saved = tmp_path / "saved"
    options = (*OPTIONS[:2], "--max-new-tokens", "2000", "--max-context", "8000")
    with at_a_terminal(model, *options, home=home) as terminal:
        terminal.wait("tokens; /help")
        terminal.wait("> ")
        terminal.type("half a line")
        terminal.wait("half a line")
        terminal.interrupt("> ")  # clears the line
        terminal.type("Who ?\n")
        terminal.wait(r"Who \?\s+\S+")
        terminal.wait(r"\S")  # more of the answer
        terminal.process.send_signal(signal.SIGINT)  # stops the answer
        line = terminal.wait(r"tokens?, .*?/8,000")
        terminal.type(f"/save {saved}\n")
        terminal.wait("goes on from here")
        terminal.wait("> ")
        terminal.type("This is lost ?\n")
        terminal.wait(r"lost \?\s+\S+")
        terminal.process.kill()
        assert terminal.process.wait() == -signal.SIGKILL
    assert list(home.iterdir()) == [], "no history is written"
    count = re.findall(r"(\d+) tokens?, ", line)[-1]
    assert 1 <= int(count) < 2000
    with Conversation.resume(
        str(model), saved, settings=DocumentSettings(store="memory")
    ) as stored:
        assert stored.messages[0]["content"] == "Who ?"
        answer = stored.messages[1]["content"]
        assert len(answer) == int(count), "a character is a token"
        held = stored.counts.restored_tokens
        assert len(stored.tokens) == held
    with at_a_terminal("--resume", saved, home=home) as terminal:
        terminal.wait(r"1 turn in \d+ tokens resumed")
        terminal.wait("> ")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.process.wait(timeout=240) == 0
