"""`python -m research.mass`: what steps say of their attention beside what they have."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from penstock.testing.tiny_chat import tiny_chat_model
from research.mass.program import run


def test_a_run_compares_said_with_true_mass(tmp_path: Path) -> None:
    tiny_chat_model(folder=tmp_path / "model")
    text, out = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("A word comes after a word, and nothing else does so well. " * 20)
    arguments = [
        "--model", str(tmp_path / "model"), "--text", str(text), "--tokens", "600", "--steps", "12",
        "--mass", "0.5", "--floor", "0.9", "--selected", "64", "--memory", "1/2", "--output",
        str(out), "--skip", "20",
    ]  # fmt: skip
    run(arguments)
    assert str(tmp_path) not in out.read_text(), "a folder of this machine"
    figures = Result.load(out).figures
    fixed, plain, again, exact = figures["rows"]
    assert [row["what"] for row in (fixed, plain, again, exact)] == [
        "64 tokens", "mass=0.5", "mass=0.5, again below 0.9", "mass=0.5, exact below 0.9",
    ]  # fmt: skip
    assert fixed["said_mass"] == pytest.approx(1.0), "which says nothing"
    for row in (plain, again, exact):
        assert row["steps"] == 12
        assert abs(row["mean_error"]) < 0.1
        assert row["seconds"] > 0
    assert plain["read_again"] == plain["exact"] == 0
    assert exact["exact"] > 0
    assert exact["true_mass"] > 0.9
    with pytest.raises(ConfigError, match="give more --text"):
        run([*arguments, "--steps", "9000"])
