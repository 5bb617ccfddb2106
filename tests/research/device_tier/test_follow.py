"""Methods that follow a text: counts, losses, and the full cache beside them."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from penstock.workloads.recorded_stream import Recording
from research.device_tier import follow, speed
from research.device_tier.recorded_units import recording_file

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


def test_what_a_model_selected_is_played_on_another(
    text: Path, shallow: Path, tmp_path: Path
) -> None:
    """Speed follows the recording: its share of retrievals, and what its units miss."""
    taken = tmp_path / "taken"
    often, seldom = (f"louiskv:lost_mass={mass},{OPTIONS}" for mass in (0.02, 0.5))
    methods = f"{often};{seldom};arkvale:{OPTIONS}"
    found = follow.run([
        "--model", str(shallow), "--text", str(text), "--prompt", "250", "--steps", "24",
        "--methods", methods, "--dtype", "float32", "--record", str(taken),
    ])  # fmt: skip
    followed = {row["method"]: row for row in found.figures["rows"]}
    result = speed.run([
        "--config", "tiny", "--on", "cpu", "--patterns", "320/120", "--batches", "2",
        "--steps", "12", "--places", "2", "--methods", methods, "--recorded", str(taken),
    ])  # fmt: skip
    rows = {row["method"]: row for row in result.figures["rows"]}
    recording = Recording.load(recording_file(taken, often))
    assert (recording.group_tokens, recording.shares.shape[0]) == (1, 24)
    assert 0 < rows[seldom]["recorded_share"] < rows[often]["recorded_share"] < 1
    for method in (often, seldom):
        assert rows[method]["recorded_share"] == pytest.approx(
            followed[method]["retrieval_share"], abs=2 / 24
        )
    for row in rows.values():
        assert "error" not in row
        assert all(place["hit_rate"] > 0.2 for place in row["places"]), "as a model's, not drawn"
    assert str(tmp_path) not in result.command
    assert found.settings["model"] == shallow.name


def test_recordings_that_will_not_do(text: Path, shallow: Path, tmp_path: Path) -> None:
    speed_of = ["--config", "tiny", "--on", "cpu", "--batches", "1", "--steps", "4"]
    with pytest.raises(ConfigError, match="give one of them"):
        speed.parse_arguments([*speed_of, "--recorded", str(tmp_path), "--stays", "0.5/0.5"])
    follow.run([
        "--model", str(shallow), "--text", str(text), "--prompt", "250", "--steps", "4",
        "--methods", f"arkvale:{OPTIONS}", "--dtype", "float32", "--record", str(tmp_path),
    ])  # fmt: skip
    for pattern, options, message in (
        ("160/60", OPTIONS, "longer context"), ("320/60", EXACT, "record the same method"),
    ):  # fmt: skip
        found = speed.run([
            *speed_of, "--patterns", pattern, "--methods", f"arkvale:{options}",
            "--recorded", str(tmp_path),
        ])  # fmt: skip
        assert message in found.figures["rows"][0]["error"]
