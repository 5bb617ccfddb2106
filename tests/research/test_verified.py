"""`python -m research.verified`: every row has full attention's tokens, and its costs."""

import sysconfig
from pathlib import Path

import pytest

from penstock.evaluate.result import Result
from penstock.testing.tiny_chat import tiny_chat_model
from research.verified.program import _MODULES, run, same_tokens, text_of


def test_a_run_says_tokens_bytes_and_times(tmp_path: Path) -> None:
    tiny_chat_model(folder=tmp_path / "model")
    text, out = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("A word comes after a word, and nothing else does. " * 60)
    run([
        "--model", str(tmp_path / "model"), "--text", str(text), "--ask", "Which ?",
        "--tokens", "1600", "--new-tokens", "10", "--exact-tokens", "3", "--verify", "3",
        "--memory", "1/2", "--disk", str(tmp_path), "--chunk", "128", "--output", str(out),
    ])  # fmt: skip
    assert str(tmp_path) not in out.read_text(), "a folder of this machine"
    figures = Result.load(out).figures
    plain, exact, policy, verified = figures["rows"]
    assert figures["prompt_tokens"] <= 1600
    assert [row["what"] for row in (exact, policy, verified)] == ["exact", "kvswap", "verify=3"]
    assert verified["tokens"] == plain["tokens"]
    assert exact["tokens"] == plain["tokens"][:4]
    assert verified["same_tokens"] == 10
    assert verified["verified"]["exact_bytes_per_token"] > policy["bytes_per_token"] > 0
    assert all(row["seconds_per_token"] > 0 for row in figures["rows"])


def test_tokens_are_the_same_up_to_the_first_that_is_not() -> None:
    assert same_tokens([1, 2, 3], [1, 2, 4, 5]) == 2
    assert same_tokens([1, 2], [1, 2, 4]) == 2
    assert same_tokens([], [1]) == 0


def test_modules_of_the_library_may_be_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _MODULES:
        package = name in ("zipfile", "ast")
        file = tmp_path / name / "__init__.py" if package else tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"# {name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert text_of([]).split("\n") == [f"# {name}" for name in _MODULES]
