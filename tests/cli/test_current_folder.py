"""No command runs what merely lies in the current folder, whatever it is called."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.core.child_python import python_command
from tests.ready_process import ReadyProcess

SOURCE = str(Path(penstock.__file__).parents[1])
RAN = "the current folder's code ran"
NAMES = (
    "ast", "runpy", "json", "struct", "pickle", "multiprocessing", "numpy", "torch", "kernels",
    "matplotlib", "penstock", "sitecustomize", "usercustomize", "accelerate", "flash_attn",
)  # fmt: skip
ANEW = f"""
import os, sys
from functools import cache
from transformers.quantizers import auto
for name in [*sys.modules]:
    if name.partition(".")[0] in {{*{NAMES}}} - {{"numpy", "torch"}}:
        del sys.modules[name]
for registered in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
    registered.pop("penstock", None)
os.environ.pop("PYTHONSAFEPATH", None)
real, here, first = cache(os.path.realpath), os.getcwd(), [*sys.path]

class Watch:
    def find_spec(name, path=None, target=None):
        entries = [real(entry or here) for entry in sys.path]
        if path is None and here in entries:
            # The folder of a scorer stands behind all that was there before.
            if "--scorer" not in sys.argv or not {{*first}} <= {{*entries[: entries.index(here)]}}:
                print({RAN!r}, "for", name, sys.path, file=sys.stderr)

sys.meta_path.insert(0, Watch)
"""
"""What a process that is forked with the libraries imports anew, and where it looks for the rest.

Both libraries cannot be imported twice. Wherever a module is looked for, the folder is not on the
path, or is behind all others.
"""
COMMANDS = """
import json, multiprocessing, sys
from penstock.cli.entry import main
*_, commands, worker = sys.argv
for words in json.loads(commands):
    sys.argv[:] = ["penstock", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    if words[0] == "bench":
        spawned = multiprocessing.get_context("spawn").Process(target=exec, args=(worker, {}))
        spawned.start()
        spawned.join()
        assert spawned.exitcode == 0
"""
WORKER = f"""
import importlib.util, os
places = [importlib.util.find_spec(name) for name in {NAMES}]
found = [each.name for each in places if each and os.path.dirname(str(each.origin)) == os.getcwd()]
assert not found, found
"""
"""Stands for a worker of `bench accuracy`: looks where it would import each of the names from."""
SEARCH = (
    "search", "recall", "--prompt", "The grass is green .", "--beams", "2", "--step", "2",
    "--max-new-tokens", "2", "--seed", "1", "--disk", "memory",
)  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data with files that are called as modules are; each leaves a mark."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "prompt.txt").write_text("The grass is green . The sky is blue .")
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"print({RAN!r}); open('ran-{name}', 'w').close()\n")
    return folder


def assert_nothing_ran(folder: Path) -> None:
    assert sorted(path.name for path in folder.glob("ran-*")) == []


def run(folder: Path, *commands: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    """Commands as their script runs them, in one process, up to the first that fails.

    What one command imports is there for the next; a path that a command added would stay as well.
    """
    with ReadyProcess(ANEW + COMMANDS, json.dumps(commands), WORKER, folder=folder) as process:
        said = process.stdout.read()
        return subprocess.CompletedProcess([], process.wait(), said, process.errors())


@pytest.fixture(scope="module")
def done(hostile: Path) -> "subprocess.CompletedProcess[str]":
    """With processes beside them: of near-storage attention, and as a benchmark spawns its workers.

    The last two commands have a scorer from a file; the file of the very last is not there.
    """
    (hostile / "mine.py").write_text(
        "import json, torch\ndef rate(texts):\n    return [1.0 for _ in texts]\n"
    )
    (elsewhere := hostile / "elsewhere").mkdir()
    (elsewhere / "beside.py").write_text("RATING = 2.0\n")
    (elsewhere / "json.py").write_text(
        "import beside\ndef rate(texts):\n    return [beside.RATING for _ in texts]\n"
    )
    return run(
        hostile,
        ("generate", "recall", "--prompt-file", "prompt.txt", "--max-new-tokens", "2",
         "--disk", "memory", "--policy", "hillinfer"),
        SEARCH,
        ("bench", "accuracy", "--samples", "1", "--tokens", "256", "--tasks", "multi_key_few",
         "--settings", "full"),
        (*SEARCH, "--scorer", "mine:rate"),
        (*SEARCH, "--scorer", "elsewhere/json.py:rate", "--json"),
        (*SEARCH, "--scorer", "elsewhere/none.py:rate"),
    )  # fmt: skip


def test_commands_run_nothing_of_the_folder(
    hostile: Path, done: "subprocess.CompletedProcess[str]"
) -> None:
    assert done.returncode == 2, done.stderr
    assert "elsewhere/none.py" in done.stderr.splitlines()[-1], "the last one alone fails"
    assert RAN not in done.stdout + done.stderr
    assert_nothing_ran(hostile)


def test_nor_does_a_process_as_it_starts(hostile: Path) -> None:
    """Its script is not in the folder: nothing would be imported from there."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{COMMANDS}\nexec(worker, {{}})", '[["config"]]', WORKER],
        cwd=hostile, env=environment | {"PYTHONPATH": SOURCE}, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert RAN not in done.stdout + done.stderr
    assert_nothing_ran(hostile)


def test_a_scorer_of_a_file_has_its_folder_behind_all_others(
    done: "subprocess.CompletedProcess[str]",
) -> None:
    """A file is found where its name leads, also when it is called as an installed module is."""
    assert done.stdout.count('"scorer": "elsewhere/json.py:rate"') == 1
    assert done.stdout.count('"scorer"') == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: scorer elsewhere/none.py:rate")
    assert done.stderr.endswith(f"{line}\n")


def test_nor_does_a_process_that_a_program_starts(hostile: Path) -> None:
    """A program in the folder has it on its own path, under any of its names."""
    (beside := hostile / "beside").mkdir()
    (beside / "imports_much.py").write_text("import ast, json, multiprocessing, struct\n")
    for entry in ("", ".", str(hostile), f"{hostile}/../{hostile.name}"):
        code = (
            f"import subprocess, sys; sys.path += [{SOURCE!r}, {str(beside)!r}]\n"
            "from penstock.core.child_python import python_command\n"
            f"sys.path.insert(0, {entry!r})\n"
            "sys.exit(subprocess.call(python_command('imports_much')))"
        )  # fmt: skip
        done = subprocess.run([sys.executable, "-P", "-c", code], cwd=hostile, check=False)
        assert done.returncode == 0
        assert_nothing_ran(hostile)


def test_a_process_has_the_path_and_the_words_that_it_was_given(tmp_path: Path) -> None:
    strange = tmp_path / "a folder: with\nlines"
    strange.mkdir()
    (strange / "prints_words.py").write_text("import sys\nprint(sys.argv[1:], __name__)\n")
    former = sys.path[:]
    try:
        sys.path.append(str(strange))
        command = python_command("prints_words", "one", "-c", "")
    finally:
        sys.path[:] = former
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['one', '-c', ''] __main__\n"
