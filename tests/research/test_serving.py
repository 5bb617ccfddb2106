"""`python -m research.serving`: clients at once beside one after another."""

from pathlib import Path

from penstock.evaluate.result import Result
from research.serving.program import run


def test_a_run_compares_clients(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run([
        "--clients", "1", "3", "--tokens", "40", "60", "--answer", "6", "--memory", "64MiB",
        "--running", "2", "--alone", "2", "--disk", "memory", "--dtype", "float32",
        "--output", str(out),
    ])  # fmt: skip
    one, three = Result.load(out).figures["rows"]
    assert (one["clients"], three["clients"]) == (1, 3)
    assert one["together"]["new_tokens"] == 6
    assert three["together"]["new_tokens"] == 18
    assert three["together"]["prompt_tokens"] == 140
    assert three["same_answers"] == three["alone_clients"] == 2
    assert 1 < three["together"]["rows_per_step"] <= 2
    assert 0 < three["together"]["promised_bytes"] <= 64 << 20
