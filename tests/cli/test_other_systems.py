"""Windows and macOS, as far as they can be shown on another system: see `tests/other_systems.py`.

Penstock is imported, answers `--help`, and gives the same tokens from memory and from the portable
files; what a system lacks is refused with the reason.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.testing.tiny_chat import tiny_chat_model
from tests.ready_process import ReadyProcess

TOP = Path(__file__).parents[2]
PROMPT = "The grass is green . The sky is blue . The sun is yellow . Here we go . " * 9 + "Who ?"
PROGRAM = """
import json, os, sys
from tests.other_systems import import_libraries, simulate
folder, model, prompt, *systems = sys.argv[1:]
import_libraries()
import cryptography.hazmat.primitives.ciphers.aead, transformers.convert_slow_tokenizer
import transformers.models.llama.modeling_llama
from transformers.quantizers import auto
for name in [each for each in sys.modules if each.partition(".")[0] == "penstock"]:
    del sys.modules[name]  # as this system has it
for registered in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
    registered.pop("penstock", None)
for system in systems:
    if os.fork() == 0:
        folder = f"{folder}-{system}"
        os.mkdir(folder)
        sys.stdout = open(f"{folder}.json", "w")
        with open(text := f"{folder}.txt", "w") as file:
            file.write(prompt)
        break
else:
    sys.exit(sum(os.wait()[1] for _ in systems) != 0)
simulate(system)

from typer.testing import CliRunner
import penstock
from penstock.cli.entry import set_defaults
from penstock.cli.main import app
from penstock.core.errors import PenstockError
from penstock.storage import file_space
from penstock.storage.aio_calls import find_calls
from penstock.testing.tiny_models import tiny_model

set_defaults()
run = CliRunner().invoke

def answer(*words):
    done = run(app, ["generate", model, "--prompt", prompt, "--max-new-tokens", "6", "--raw",
                     "--chunk", "256", *words, "--json"])
    assert done.exit_code == 0, (words, done.output)
    said = json.loads(done.stdout)
    return {name: said[name] for name in ("token_ids", "store", "process_peak_bytes")} | {
        "reads": said["decode"]["read_bytes"]}

def refusal(make):
    try:
        make()
    except PenstockError as error:
        return str(error)

found = {
    "sees": [file_space.os.name, hasattr(file_space.os, "O_DIRECT")],
    "help": run(app, ["--help"]).exit_code,
    "version": run(app, ["--version"]).stdout,
    "config": run(app, ["config", "--path"]).exit_code,
    "memory": answer("--disk", "memory", "--memory", "1/2"),
    "file": answer("--disk", folder, "--memory", "1/2"),
    "exact": answer("--disk", folder, "--memory", "1/2", "--exact"),
    "sealed": answer("--disk", folder, "--memory", "1/2", "--seal"),
    "left": os.listdir(folder),
    "aio": refusal(find_calls),
    "documents": run(app, ["doc", "add", model, text, "--name",
                           "x", "--library", folder + "-library"]).stderr,
    "near": refusal(lambda: penstock.TieredCache(
        tiny_model("llama"), "hillinfer", "1/2", "memory", max_tokens=400, must_tier=True)),
}
print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two layers in float32."""
    folder = tmp_path_factory.mktemp("model")
    tiny_chat_model(folder=folder)
    return str(folder)


@pytest.fixture(scope="module")
def answers(model: str) -> dict[bool, list[int]]:
    """Tokens of this system, by a selection and exactly."""
    params = SamplingParams(temperature=0, max_tokens=6)
    found = {}
    for exact in (False, True):
        llm = LLM(model, memory="1/2", store="memory", exact=exact, prefill_chunk_size=256)
        [output] = llm.generate(PROMPT, params)
        found[exact] = list(output.token_ids)
    return found


@pytest.fixture(scope="module")
def found(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the program found, by system: a process that has the libraries forks one for each."""
    top, systems = tmp_path_factory.mktemp("systems"), ("darwin", "win32")
    words = (str(top / "disk"), model, PROMPT, *systems)
    with ReadyProcess(PROGRAM, *words, folder=TOP) as run:
        assert run.wait() == 0, run.errors()
    return {each: json.loads((top / f"disk-{each}.json").read_text()) for each in systems}


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_run_on_another_system(
    system: str, found: dict[str, dict[str, Any]], answers: dict[bool, list[int]]
) -> None:
    of_system = found[system]
    assert of_system["sees"] == ["nt" if system == "win32" else "posix", False]
    assert (of_system["help"], of_system["config"]) == (0, 0)
    assert of_system["version"].startswith("penstock 0.")
    assert of_system["memory"]["token_ids"] == answers[False]
    assert of_system["file"]["token_ids"] == of_system["sealed"]["token_ids"] == answers[False]
    assert of_system["exact"]["token_ids"] == answers[True]
    assert of_system["file"]["reads"] > 0
    assert "no direct I/O here" in of_system["file"]["store"]
    assert of_system["left"] == []
    assert "needs Linux" in of_system["aio"]
    if system == "win32":
        assert "stored documents need" in of_system["documents"]
        assert "near-storage devices need" in of_system["near"]
    else:
        assert "ask it: penstock doc ask x" in of_system["documents"]


POSIX = {
    "fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog", "posix", "_posixshmem",
    "curses", "readline",
}  # fmt: skip
SOME_POSIX = re.compile(rf"\b({'|'.join(sorted(POSIX))})\b")


def _at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, without those of a `try`."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        each = waiting.pop()
        yield each
        if isinstance(each, ast.If | ast.With | ast.For | ast.While | ast.ClassDef):
            waiting += each.body


def test_no_module_needs_posix_to_be_imported() -> None:
    found = []
    for path in (TOP / "src" / "penstock").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for each in _at_import(ast.parse(text)) if SOME_POSIX.search(text) else ():
            names = [alias.name for alias in each.names] if isinstance(each, ast.Import) else []
            if isinstance(each, ast.ImportFrom):
                names.append(str(each.module))
            found += [f"{path.name}: {name}" for name in names if name.split(".")[0] in POSIX]
    assert not found
