"""`python -m research.serving`: clients at once beside one after another."""

from pathlib import Path

import pytest

from penstock.evaluate.result import Result
from research.serving.program import run
from tests.ready_process import forks


def test_a_run_compares_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = forks()  # processes that have made their imports
    monkeypatch.setattr("multiprocessing.get_context", lambda kind: ready)
    out = tmp_path / "result.json"
    options = [
        "--tokens", "40", "60", "--answer", "6", "--memory", "64MiB", "--running", "2",
        "--alone", "2", "--disk", "memory", "--dtype", "float32", "--output", str(out),
    ]  # fmt: skip
    run(["--clients", "1", *options])
    run(["--clients", "3", "--reopen", "200", "--resume", *options])
    figures = Result.load(out).figures
    again = figures["reopened"]
    assert again["same_answer"]
    assert again["going_on_cached_tokens"] == again["reopened_cached_tokens"] == 200 + 5
    one, three = figures["rows"]
    assert (one["clients"], three["clients"]) == (1, 3)
    assert one["together"]["new_tokens"] == 6
    assert three["together"]["new_tokens"] == 18
    assert three["together"]["prompt_tokens"] == 140
    assert three["same_answers"] == three["alone_clients"] == 2
    assert 1 < three["together"]["rows_per_step"] <= 2
    assert 0 < three["together"]["promised_bytes"] <= three["together"]["budget_bytes"] == 64 << 20
