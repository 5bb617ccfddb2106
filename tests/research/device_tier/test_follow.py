"""Methods that follow a text: counts, losses, and the full cache beside them."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.device_tier import follow

OPTIONS = "selected_tokens=64,window_tokens=16,sink_tokens=4"
EXACT = "selected_tokens=400,window_tokens=16,sink_tokens=4"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of words that comes again and again, so that far keys matter."""
    words = [f"The secret word for patient blanket is social sparrow . {n} 2 ." for n in range(9)]
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(" ".join(words * 3))
    return path


def test_a_text_is_followed(
    text: Path, shallow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "follow.json"
    methods = f"full-dynamic;louiskv:tau=1,{EXACT};louiskv:tau=-1,{OPTIONS};arkvale:{OPTIONS}"
    result = follow.run([
        "--model", str(shallow), "--text", str(text), str(text), "--prompt", "250", "--steps", "4",
        "--methods", methods, "--out", str(out), "--dtype", "float32",
    ])  # fmt: skip
    rows = {(row["text"], row["method"].split(",")[0]): row for row in result.figures["rows"]}
    assert len(rows) == 8
    assert Result.load(out).figures == result.figures
    full = rows[0, "full-dynamic"]
    assert set(full) == {"text", "method", "loss", "row_s"}
    whole, once, pages = (
        rows[0, name] for name in ("louiskv:tau=1", "louiskv:tau=-1", "arkvale:selected_tokens=64")
    )
    assert whole["loss"] == pytest.approx(full["loss"], abs=1e-4), "all tokens are selected"
    assert (whole["retrieval_share"], once["retrieval_share"]) == (1.0, 0.0)
    assert once["fetched_bytes"] == 0 < pages["fetched_bytes"]
    assert pages["retrieval_share"] == 1
    assert 0 < pages["hit_rate"] < 1
    assert rows[1, "full-dynamic"]["loss"] == full["loss"], "the same text again"
    assert str(tmp_path) not in result.command
    said = capsys.readouterr().out
    assert "hit rate" in said
    assert f"{pages['fetched_bytes'] / 1024:,.0f}" in said


def test_texts_that_will_not_do(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        follow.run(["--model", "recall", "--text", str(tmp_path / "none.txt")])
    with pytest.raises(ConfigError, match="tokens; 9,257 are needed"):
        follow.run(["--model", "recall", "--text", str(text), "--prompt", "9000"])
    with pytest.raises(ConfigError, match="count from 1"):
        follow.parse_arguments(["--text", str(text), "--prompt", "0"])
