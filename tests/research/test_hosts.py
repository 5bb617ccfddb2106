"""`python -m research.hosts`: what one host measures, and what many do by it."""

from pathlib import Path

import pytest

from penstock.core.errors import PromptError
from research.hosts import single


def test_one_host_is_measured(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the sky is blue . the grass is green . " * 80)
    few = [f"--text={text}", "--tokens=256", "--answer=4", "--memory=8MiB"]
    found = single.run([*few, "--documents=2", "--opens=2"]).figures
    assert len(found["stored"]) == 2
    assert len(found["first_token_s"]) == 4
    assert len(found["step_s"]) <= 4 * 3
    for one in found["stored"]:
        assert one["bytes"] > one["tokens"] * 1024
    with pytest.raises(PromptError, match="give more --text"):
        single.run([*few, "--documents=9"])
