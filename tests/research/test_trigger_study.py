"""The trigger study: masses add up, variants retrieve as often as they say, captures are reused."""

from pathlib import Path

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.trigger_study.capture import Capture
from research.trigger_study.follow import SCORES, TRIGGERS, Variant, follow, variants
from research.trigger_study.program import needed_shares, parse_arguments, run
from research.trigger_study.units import LayerSteps, Window, layer_steps

PROMPT, STEPS, BUDGET = 192, 40, 32
WINDOW = Window(window=16, sinks=4, cluster=8, block=96)


@pytest.fixture(scope="module")
def layer() -> LayerSteps:
    """Two KV heads of two query heads each, whose queries wander."""
    torch.manual_seed(0)
    keys = 2 * torch.randn(1, 2, PROMPT + STEPS, 8)
    queries = [torch.randn(4, 8)]
    for _ in range(STEPS - 1):
        queries.append(0.9 * queries[-1] + 0.6 * torch.randn(4, 8))
    capture = Capture(
        keys=keys, queries=torch.stack(queries)[None], scaling=0.5, prompt_tokens=PROMPT, answer=""
    )  # fmt: skip
    return layer_steps(capture, 0, WINDOW, torch.device("cpu"))


def test_masses_add_up(layer: LayerSteps) -> None:
    whole = layer.mass.sum(dim=3) + layer.edge
    torch.testing.assert_close(whole, torch.ones_like(whole))
    selectable = PROMPT + torch.arange(STEPS) - WINDOW.window + 1 - WINDOW.sinks
    assert torch.equal(layer.sizes.sum(dim=2), selectable.expand(2, -1))


def test_variants_retrieve_as_they_say(layer: LayerSteps) -> None:
    every = [
        Variant(trigger="never"), Variant(trigger="always"),
        Variant(trigger="always", scores="truth"), Variant(trigger="stride", threshold=2),
        Variant(trigger="cosine", threshold=0.25),
        Variant(trigger="gains added up", threshold=0.02, scores="weighed", keep=2.0),
        Variant(trigger="gains added up", threshold=0.2, scores="weighed", keep=2.0),
        Variant(trigger="always", scores="weighed", keep=2.0),
        Variant(trigger="always", scores="weighed"),
    ]  # fmt: skip
    found = follow(layer, BUDGET, every)
    share, captured, lost = found.share.tolist(), found.captured.tolist(), found.lost.tolist()
    assert share[:3] == [0, 1, 1]
    assert share[3] == pytest.approx(0.5, abs=1 / STEPS)
    assert share[4] == pytest.approx(0.25, abs=1 / STEPS)
    assert 0 < share[6] < share[5] < 1
    assert captured[0] < captured[6] < captured[5] < captured[8] + 0.01
    assert max(captured) == captured[2]
    assert min(lost) == lost[2]
    assert found.fetched[0] == 0
    assert found.fetched[7] < found.fetched[8], "what is held stays longer"


def test_every_trigger_and_every_score_is_followed() -> None:
    every = variants()
    assert {one.trigger for one in every} == set(TRIGGERS)
    assert {one.scores for one in every} == set(SCORES)
    assert len(set(every)) == len(every)


def test_a_model_is_studied(shallow: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The secret word for patient blanket is social sparrow . 4 2 . " * 30)
    out, captures = tmp_path / "study.json", tmp_path / "captures"
    arguments = [
        "--model", str(shallow), "--prose", str(text), "--cases", "prose", "--tokens", "128",
        "--steps", "70",
        "--budget", "24", "--window", "16", "--sinks", "4", "--cluster", "8", "--layers", "1",
        "--captures", str(captures), "--output", str(out),
    ]  # fmt: skip
    first = run(arguments)
    kept = list(captures.iterdir())
    assert len(kept) == 1
    before = kept[0].stat().st_mtime_ns
    again = run(arguments)
    assert kept[0].stat().st_mtime_ns == before
    assert again.figures == first.figures == Result.load(out).figures
    assert str(tmp_path) not in first.command
    assert first.figures["cases"]["prose"]["steps"] == 70
    shares = {name: found for _, name, found in needed_shares(first.figures["rows"], "captured")}
    assert shares["stride"][0] == pytest.approx(0.5, abs=0.02)


def test_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than window, sinks and budget"):
        parse_arguments(["--model", "recall", "--tokens", "800"])
    short = tmp_path / "short.txt"
    short.write_text("A few words.")
    with pytest.raises(ConfigError, match="tokens; 1,100 are needed"):
        run([
            "--model", "recall", "--prose", str(short), "--cases", "prose", "--tokens", "1000",
            "--steps", "100",
        ])  # fmt: skip
