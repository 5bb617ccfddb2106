"""`penstock chat` and `generate` talk with a pretrained model, by its own chat template."""

import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from penstock.cli.main import app

FRANCE = "What is the capital of France?"
OPTIONS = ("--dtype", "float32", "--max-new-tokens", "10")
CHAT = (*OPTIONS, "--memory", "24MiB", "--max-context", "2048")
NOTES = "\n".join(f"On day {n} the ship had {n * 7 % 90} sacks of salt." for n in range(1, 40))
"""More tokens than a step selects at this budget."""


def run(*arguments: object, lines: tuple[str, ...] = ()) -> Any:
    result = CliRunner().invoke(
        app, [str(each) for each in arguments], input="".join(f"{line}\n" for line in lines)
    )
    assert result.exit_code == 0, result.output
    return result


def test_generate_knows_the_capital_of_france(smollm2_folder: Path) -> None:
    assert "Paris" in run("generate", smollm2_folder, "--prompt", FRANCE, *OPTIONS).stdout


def test_a_chat_over_a_file_goes_on_as_if_nothing_had_been(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    notes, saved = tmp_path / "notes.txt", tmp_path / "saved"
    notes.write_text(NOTES)
    turns = (FRANCE, f"/file {notes}", "What did the ship have?", "And of Italy?")
    calm = run("chat", smollm2_folder, *CHAT, lines=(*turns, "/stats"))
    assert "Paris" in calm.stdout.splitlines()[0]
    first = run("chat", smollm2_folder, *CHAT, lines=(*turns[:3], f"/save {saved}"))
    second = run("chat", "--resume", saved, *OPTIONS, lines=(*turns[3:], "/stats"))
    assert first.stdout + second.stdout == calm.stdout

    def figure(stderr: str, what: str) -> int:
        return int(re.findall(rf"{what} +│ ([\d,]+)", stderr)[0].replace(",", ""))

    held = figure(calm.stderr, "held")
    assert held > 600
    assert figure(calm.stderr, "prefilled") + figure(calm.stderr, "decoded") == held
    assert figure(second.stderr, "held") == held
    assert figure(second.stderr, "prefilled") < 40
