"""`python -m research.prompts`: prompts through tiers beside the plain cache."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.prompts.program import run


def test_a_run_compares_prompts_in_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    arguments = [
        "--model", "tiny", "--tokens", "600", "--batch", "1", "2", "--memory", "3/5", "1/1000",
        "--rounds", "2", "--chunk", "256", "--disk", "memory", "--dtype", "float32",
        "--output", str(out),
    ]  # fmt: skip
    run(arguments)
    rows = Result.load(out).figures["rows"]
    assert [(row["batch"], row["what"]) for row in rows] == [
        (rows, what) for rows in (1, 2) for what in ("DynamicCache", "3/5", "1/1000")
    ]
    for plain, ours, little in (rows[:3], rows[3:]):
        assert plain["seconds_ratio"] == plain["cpu_s_ratio"] == 1
        assert ours["differs"] < 1e-3, "the first token's logits are exact"
        assert ours["peak_bytes"] <= ours["limit_bytes"] < ours["full_cache_bytes"]
        assert len(ours["passes"]) == 2
        assert "is too little for kvswap" in little["skipped"]
    assert "too little memory" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="give more --text"):
        run(["--text", str(Path(__file__)), "--tokens", "90000", "--batch", "1"])
