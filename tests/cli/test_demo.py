"""`penstock demo` answers correctly at a small size, and says so."""

from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.evaluate.tasks import recall
from penstock.evaluate.tasks.sample import Sample


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["demo", "--tokens", "600", *map(str, arguments)])


def question(result: Any) -> str:
    [line] = [line for line in result.stdout.splitlines() if line.startswith("Question")]
    return str(line)


def test_answers_are_called_right_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--memory", "1/4", "--seed", 0)
    assert result.exit_code == 0, result.output
    for said in ("at token", "Question : ", "Answer : ", "Correct", "of the full", "stall"):
        assert said in result.stdout

    def few_words(*arguments: Any) -> Sample:
        """The same question; two tokens are wrong as surely as all of them."""
        return replace(make_sample(*arguments), max_new_tokens=2)

    make_sample = recall.make_sample
    monkeypatch.setattr(recall, "make_sample", few_words)
    monkeypatch.setattr("penstock.evaluate.tasks.sample.score", lambda sample, text: 0.0)
    other = run("--memory", "1/4", "--seed", 1)
    assert other.exit_code == 1
    assert "Wrong: the document says" in other.stdout
    assert question(other) != question(result), "another seed is another document"


def test_a_document_that_is_too_short() -> None:
    result = CliRunner().invoke(app, ["demo", "--tokens", "10"])
    assert result.exit_code == 2
    assert "tokens=10" in result.stderr
