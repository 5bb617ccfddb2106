"""`python -m research.answers`: settings beside each other along full attention's own answers."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from penstock.testing.tiny_chat import tiny_chat_model
from research.answers.program import run


def test_settings_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_chat_model(folder=tmp_path / "model")
    out = tmp_path / "result.json"
    arguments = [
        "--model", str(tmp_path / "model"), "--tasks", "single_2,fidelity_code", "--tokens", "2600",
        "--samples", "2", "--steps", "6", "--settings",
        "full;kvswap@1/2:selected_tokens=64,reuse_tokens=128;kvswap@1/900", "--dtype", "float32",
        "--output", str(out),
    ]  # fmt: skip
    run(arguments)
    assert str(tmp_path) not in out.read_text(), "a folder of this machine"
    rows = Result.load(out).figures["rows"]
    assert [row["task"] for row in rows] == 3 * ["single_2"] + 3 * ["fidelity_code"]
    for full, some, least in (rows[:3], rows[3:]):
        assert len(full["kl"]) == len(some["kl"]) == 2
        assert max(full["kl"]) < 1e-4 < min(some["kl"])
        assert min(full["same"]) == 1
        assert max(some["mass"]) < 1
        assert some["read_bytes"] > 0
        assert 0 < some["memory_bytes"] < 0.6 * some["full_cache_bytes"]
        assert "smallest budget that would do" in least["refused"]
    assert "fidelity_code" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no task is called 'none'"):
        run([*arguments, "--tasks", "none"])
