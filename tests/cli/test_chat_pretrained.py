"""`penstock chat` and `generate` talk with a pretrained model, by its own chat template."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from tests.shared_weights import read_once

FRANCE = "What is the capital of France?"
OPTIONS = ("--dtype", "float32", "--max-new-tokens", "7")
CHAT = (*OPTIONS, "--memory", "14MiB", "--max-context", "1024")
NOTES = "\n".join(f"On day {n} the ship had {n * 7 % 90} sacks of salt." for n in range(1, 23))
"""More tokens than a step selects at this budget."""


@pytest.fixture(scope="module")
def model(smollm2_folder: Path) -> Iterator[Path]:
    with read_once(smollm2_folder):
        yield smollm2_folder


def run(*arguments: object, lines: tuple[str, ...] = ()) -> Any:
    result = CliRunner().invoke(
        app, [str(each) for each in arguments], input="".join(f"{line}\n" for line in lines)
    )
    assert result.exit_code == 0, result.output
    return result


def test_generate_knows_the_capital_of_france(model: Path) -> None:
    assert "Paris" in run("generate", model, "--prompt", FRANCE, *OPTIONS).stdout


@pytest.mark.slow
def test_a_chat_over_a_file_goes_on_as_if_nothing_had_been(model: Path, tmp_path: Path) -> None:
    notes, saved = tmp_path / "notes.txt", tmp_path / "saved"
    notes.write_text(NOTES)
    turns = (FRANCE, f"/file {notes}", "What did the ship have?", f"/save {saved}", "And of Italy?")
    whole = run("chat", model, *CHAT, lines=(*turns, "/stats"))
    assert "Paris" in whole.stdout.splitlines()[0]
    again = run("chat", "--resume", saved, *OPTIONS, lines=(turns[-1], "/stats"))
    assert again.stdout
    assert whole.stdout.endswith(again.stdout)

    def figure(stderr: str, what: str) -> int:
        return int(re.findall(rf"{what} +│ ([\d,]+)", stderr)[0].replace(",", ""))

    held = figure(whole.stderr, "held")
    assert held > 350
    assert figure(whole.stderr, "prefilled") + figure(whole.stderr, "decoded") == held
    assert figure(again.stderr, "held") == held
    assert figure(again.stderr, "prefilled") < 40
