"""A recipe from begin to end: seeds that are refused, stops, what is done already."""

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import training
from penstock.core.errors import ConfigError
from tests.ready_process import ReadyProcess
from training import evaluate, retrain, train
from training.gate import REFUSED
from training.recipe import read_recipe

FOLDER = Path(training.__file__).parent
RECALL = FOLDER / "recipes" / "recall-2.toml"
CARD = FOLDER.parent / "benchmarks/results/training-recall-2-two-sittings-4k-cpu.json"
TEXT = """
name = "toy"
seed = 3
seed_step = 10
tries = 3
card = ["card.json"]
[[sittings]]
settings = "{first}"
minutes = 0.03
[[sittings]]
settings = "{last}"
minutes = 0.02
[further]
most = 2
[further.sitting]
settings = "{last}"
minutes = 0.01
[further.questions]
seed = 1
tokens = [256]
samples = 2
tasks = ["copy"]
[questions]
tokens = [256]
samples = 3
tasks = ["multi_key_few", "copy"]
"""


def recipe(folder: Path, first: Path = FOLDER / "configs" / "toy.toml") -> Path:
    """The toy twice, and a card that the toy will not be worse than."""
    write_result(folder / "card.json", [("copy", 0, 3), ("multi_key_few", 0, 3)])
    path = folder / "toy.toml"
    path.write_text(TEXT.format(first=first, last=FOLDER / "configs" / "toy.toml"))
    return path


def write_result(path: Path, cells: Sequence[tuple[str, int, int]]) -> None:
    """Answers to prompts of 256 tokens: the task, how many are right, of how many."""
    result = json.loads(CARD.read_text())
    named = {cell["task"]: cell for cell in result["figures"]["cells"]}
    result["figures"]["cells"] = [
        {**named[task], "tokens": 256, "exact": right, "asked": asked}
        for task, right, asked in cells
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))


class Commands:
    """Stands in for the processes: notes what is called, leaves what they would."""

    def __init__(self, statuses: Sequence[int], late: Sequence[int] = ()) -> None:
        """Args:
        late: answers of three that are right when it is asked whether a further sitting is needed.
        """
        self.statuses, self.called = list(statuses), list[list[str]]()
        self.late = list(late)

    def __call__(self, module: str, words: Sequence[str]) -> int:
        self.called.append([module, *words])
        status = self.statuses.pop(0)
        out = Path(self.after("--out"))
        if module == "training.train":
            (out / "model").mkdir(parents=True, exist_ok=True)
            if status == 0:
                (out / "model" / "SHA256SUMS").touch()
            if status == retrain.STOPPED:
                (out / "checkpoint.pt").touch()
        elif status == 0:
            asked = int(self.after("--samples"))
            right = self.late.pop(0) if self.after("--seed") == "1" else asked
            cells = [(task, right) for task in self.after("--tasks").split(",")]
            write_result(out, [(task, right, asked) for task, right in cells])
        return status

    def after(self, option: str) -> str:
        words = self.called[-1]
        return words[words.index(option) + 1]


def run(path: Path, out: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(retrain, "call", commands)
    return retrain.main([str(path), "--out", str(out), "--device", "cpu", "--workers", "0"])


def test_the_recipe_of_the_bundled_model() -> None:
    read = read_recipe(RECALL)
    assert [plan.minutes for plan in read.sittings] == [11, 13]
    assert (read.seed, read.seed_step) == (6, 60)
    assert len(read.questions.tasks) * len(read.questions.tokens) == 52
    assert read.further.questions.seed != read.questions.seed == 0
    assert set(read.further.questions.tasks) < set(read.questions.tasks)


def test_recipes_are_read_strictly(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    for old, new, said in (
        ("tries = 3", "tries = 0", "at least one"),
        ("tries = 3", "trys = 3", "no setting 'trys'"),
        ("seed = 3\n", "", "lacks the setting 'seed'"),
        ("card.json", "cart.json", "no cart.json"),
        ("seed = 1\n", "", "a seed that is not 0"),
        ("most = 2\n", "", "further lacks the setting 'most'"),
    ):
        text = path.read_text()
        (tmp_path / "bad.toml").write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=rf"bad\.toml: .*{said}"):
            read_recipe(tmp_path / "bad.toml")


def test_seeds_that_a_gate_refuses_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = recipe(tmp_path), tmp_path / "run"
    commands = Commands([REFUSED, retrain.STOPPED])
    assert run(path, out, commands, monkeypatch) == retrain.STOPPED
    assert [commands.called[n][commands.called[n].index("--seed") + 1] for n in (0, 1)] == [
        "3",
        "4",
    ]
    # The same command again: not with the seed that was refused, and from the checkpoint; the
    # second sitting has a seed of its own and begins with the first one's model.
    commands = Commands([0, 0, 2])
    assert run(path, out, commands, monkeypatch) == 2
    first, last, asked = commands.called
    assert "--resume" in first
    assert first[first.index("--seed") + 1] == "4"
    assert last[last.index("--seed") + 1] == "13"
    assert last[last.index("--from") + 1] == str(out / "1-toy-seed-4" / "model")
    assert asked[1] == str(out / "2-toy-seed-13" / "model")
    # Both are there: nothing is trained a second time.
    commands = Commands([2])
    assert run(path, out, commands, monkeypatch) == 2
    assert [words[0] for words in commands.called] == ["training.evaluate"]


def test_what_comes_late_has_further_sittings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = recipe(tmp_path), tmp_path / "run"
    path.write_text(path.read_text().replace("samples = 2", "samples = 30"))
    write_result(tmp_path / "card.json", [("copy", 30, 30), ("multi_key_few", 30, 30)])
    # 28 of 30 is what chance has (p .49); 20 is not. Stopped in the third sitting.
    commands = Commands([0, 0, 0, retrain.STOPPED], late=[20])
    assert run(path, out, commands, monkeypatch) == retrain.STOPPED
    _, _, late, third = commands.called
    assert late[late.index("--seed") + 1] == "1"
    assert third[third.index("--seed") + 1] == "23"
    assert third[third.index("--fit") + 1] == "0.01"
    assert third[third.index("--from") + 1] == str(out / "2-toy-seed-13" / "model")
    # It goes on, and is asked again; then the card's questions.
    commands = Commands([0, 0, 0], late=[28])
    assert run(path, out, commands, monkeypatch) == 0
    third, late, asked = commands.called
    assert "--resume" in third
    assert late[1] == asked[1] == str(out / "3-toy-seed-23" / "model")
    assert asked[asked.index("--seed") + 1] == "0"
    # All is there: nothing is called.
    assert run(path, out, Commands([]), monkeypatch) == 0


def test_further_sittings_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe(tmp_path)
    path.write_text(path.read_text().replace("samples = 2", "samples = 30"))
    write_result(tmp_path / "card.json", [("copy", 30, 30)])
    commands = Commands([0] * 7, late=[20, 20])
    run(path, tmp_path / "run", commands, monkeypatch)
    assert [words[0] for words in commands.called] == [
        "training.train", "training.train", "training.evaluate", "training.train",
        "training.evaluate", "training.train", "training.evaluate",
    ]  # fmt: skip


def test_a_loan_without_time_for_further_sittings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is asked that only they would be for."""
    path, commands = recipe(tmp_path), Commands([0, 0, 0])
    monkeypatch.setattr(retrain, "call", commands)
    words = [str(path), "--out", str(tmp_path / "run"), "--device", "cpu", "--workers", "0"]
    assert retrain.main([*words, "--further", "0"]) == 0
    assert [words[0] for words in commands.called] == [
        "training.train", "training.train", "training.evaluate",
    ]  # fmt: skip
    assert retrain.main([*words, "--further", "-1"]) == 2
    assert "--further -1 must be 0 or more" in capsys.readouterr().err


def test_when_all_seeds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path)
    assert run(path, tmp_path / "run", Commands([REFUSED] * 3), monkeypatch) == 2
    assert "refused the seeds 3 to 5; give another --seed" in capsys.readouterr().err


FORKING = """
import os, signal, sys
from types import SimpleNamespace
from training import retrain, train

class Forked:
    def __init__(self, command, cwd):
        assert command[:3] == [sys.executable, "-m", "training.train"], command
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                status = train.main(command[3:])
            finally:
                os._exit(status)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)

retrain.subprocess = SimpleNamespace(Popen=Forked)
sys.exit(retrain.main(sys.argv[1:]))
"""
"""The command, whose own commands are forks of it: a new Python would import torch for seconds."""


def test_a_command_is_a_python_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert retrain.call("training.recipe", []) == 0
    assert retrain.call("json.tool", ["--help"]) == 0
    assert "usage" in capfd.readouterr().out
    assert retrain.call("json.tool", ["--no-such"]) == 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process, without seconds of imports."""

    def call(module: str, words: Sequence[str]) -> int:
        status: int = (train if module == "training.train" else evaluate).main(words)
        return status

    monkeypatch.setattr(retrain, "call", call)


def test_for_real(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by SIGTERM in the first sitting, then to the end, then once more for nothing.

    The first sitting is a process of a process.
    """
    long = tmp_path / "long.toml"
    toy = (FOLDER / "configs" / "toy.toml").read_text().replace("_tokens = 2048", "_tokens = 512")
    long.write_text(toy.replace("= 0.5", "= 0.001", 1))
    path, out = recipe(tmp_path, long), tmp_path / "run"
    text = path.read_text().replace("minutes = 0.02", "minutes = 0.01")
    path.write_text(text.replace("minutes = 0.03", "minutes = 2"))
    words = [str(path), "--out", str(out), "--device", "cpu", "--workers", "0"]
    checkpoint = out / "1-long-seed-3" / "checkpoint.pt"
    end = time.monotonic() + 120
    with ReadyProcess(FORKING, *words, folder=FOLDER.parent) as process:
        while not checkpoint.exists() and time.monotonic() < end and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == retrain.STOPPED, process.errors()
        assert "the same command goes on" in process.errors()

    path.write_text(text.replace("minutes = 0.03", "minutes = 0.01"))
    here(monkeypatch)
    assert retrain.main(words) == 0
    done = capfd.readouterr().out
    assert "2 of 2 cells agree" in done
    log = (out / "1-long-seed-3" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in log].count("begin") == 2
    written = (out / "evaluation.json").stat().st_mtime_ns
    assert retrain.main(words) == 0
    again = capfd.readouterr().out
    assert again
    assert done.endswith(again)
    assert (out / "evaluation.json").stat().st_mtime_ns == written
