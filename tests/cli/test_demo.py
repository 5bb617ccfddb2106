"""`penstock demo` answers correctly at a small size, and says so."""

from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["demo", "--tokens", "2000", *map(str, arguments)])


@cache
def answered(seed: int) -> Any:
    return run("--memory", "1/4", "--seed", seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_correct_answer(seed: int) -> None:
    result = answered(seed)
    assert result.exit_code == 0, result.output
    for said in ("at token", "Question : ", "Answer : ", "Correct", "of the full", "stall"):
        assert said in result.stdout


def test_another_seed_is_another_document() -> None:
    questions = {
        line
        for seed in (0, 1)
        for line in answered(seed).stdout.splitlines()
        if line.startswith("Question")
    }
    assert len(questions) == 2


def test_a_wrong_answer_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.evaluate.tasks.sample.score", lambda sample, text: 0.0)
    result = run("--memory", "1/4")
    assert result.exit_code == 1
    assert "Wrong: the document says" in result.stdout


def test_a_document_that_is_too_short() -> None:
    result = CliRunner().invoke(app, ["demo", "--tokens", "10"])
    assert result.exit_code == 2
    assert "tokens=10" in result.stderr
