"""What a shell completes, asked as its script asks; and the script itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PROGRAM = """
import contextlib, io, json, os, sys
from penstock.cli.entry import main
sys.argv[:] = ["/usr/bin/penstock"]
said = {}
for line, variables in json.load(sys.stdin).items():
    os.environ.update(variables)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
    said[line] = printed.getvalue()
assert "torch" not in sys.modules
print(json.dumps(said))
"""
COMPLETED = [
    ("penstock gen", "generate", "search"),
    ("penstock doc v", "verify", "add"),
    ("penstock generate --max", "--max-new-tokens", "--memory"),
    ("penstock generate --policy lou", "louiskv", "kvswap"),
    ("penstock generate --disk uf", "ufs", "nvme"),
    ("penstock generate --dtype b", "bfloat16", "float32"),
]
SHELLS = ("bash", "zsh", "fish")


def question(shell: str, line: str, instruction: str) -> dict[str, str]:
    """The variables by which a shell asks, for a line that ends where the cursor is."""
    words = line.split(" ")
    return {
        "_PENSTOCK_COMPLETE": f"{instruction}_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_WORD_TO_COMPLETE": words[-1],
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What is printed for each line in bash, and to each shell that asks for its script: all in one
    process."""
    questions = {line: question("bash", line, "complete") for line, _, _ in COMPLETED}
    questions |= {shell: question(shell, "", "source") for shell in SHELLS}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(SRC)}, input=json.dumps(questions),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("line", "found", "left_out"), COMPLETED)
def test_bash_completes(line: str, found: str, left_out: str, said: dict[str, str]) -> None:
    assert found in said[line].split()
    assert left_out not in said[line].split()


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script_that_asks_penstock(shell: str, said: dict[str, str]) -> None:
    assert f"complete_{shell}" in said[shell]
    assert "_PENSTOCK_COMPLETE" in said[shell]
    assert "penstock" in said[shell]
