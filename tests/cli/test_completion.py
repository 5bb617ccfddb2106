"""What a shell completes, asked as its script asks; and the script itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PROGRAM = """
import sys
from penstock.cli.entry import main
sys.argv[0] = "/usr/bin/penstock"
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def asked(shell: str, line: str, instruction: str = "complete") -> str:
    """What is printed for a line that ends where the cursor is."""
    words = line.split(" ")
    variables = {
        "_PENSTOCK_COMPLETE": f"{instruction}_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_WORD_TO_COMPLETE": words[-1],
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False,
        env={**os.environ, **variables, "PYTHONPATH": str(SRC)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("line", "found", "left_out"),
    [
        ("penstock gen", "generate", "search"),
        ("penstock doc v", "verify", "add"),
        ("penstock generate --max", "--max-new-tokens", "--memory"),
        ("penstock generate --policy lou", "louiskv", "kvswap"),
        ("penstock generate --disk uf", "ufs", "nvme"),
        ("penstock generate --dtype b", "bfloat16", "float32"),
    ],
)
def test_bash_completes(line: str, found: str, left_out: str) -> None:
    said = asked("bash", line)
    assert found in said.split()
    assert left_out not in said.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_asks_penstock(shell: str) -> None:
    script = asked(shell, "", "source")
    assert "_PENSTOCK_COMPLETE" in script
    assert "penstock" in script
