"""Quality in a sweep: held-out documents, what counts as best, and its figure."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import fields_of
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel, load
from penstock.tuner.calibration_texts import calibration_tokens
from penstock.tuner.journal import Journal
from research.figures import tuning
from research.figures.chart import draw
from research.figures.report import charts_of
from research.tuning.setting_runs import errors_of, fastest, keeps_all, sweep_summary
from research.tuning.workbench import HeldOutQuality, held_out_texts, quality_key

Row = dict[str, Any]
FORCED = 8
GOOD = KVSwap(selected_tokens=200, reuse_tokens=200, rank=64, index_bits=8)
BAD = KVSwap(group_tokens=16, selected_tokens=32, reuse_tokens=32, rank=2, index_bits=4)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("recall")


def row(speed: float, kl: float | None = 0.01, *, roles: tuple[str, ...] = (), **more: Any) -> Row:
    return {
        "tokens_per_s": speed, "predicted_tokens_per_s": speed, "kl": kl, "roles": list(roles),
        "within_limits": True, "peak_bytes": 90, "predicted_bytes": 100, "error": 0.1,
        "of_tuner": False, "group_tokens": 4, **more,
    }  # fmt: skip


# Held-out documents -------------------------------------------------------------------------------


def test_documents_are_new_and_the_same_every_time(loaded: LoadedModel) -> None:
    one, two, three = held_out_texts(loaded, tokens=1024, forced=FORCED, count=3, seed=5)
    again = held_out_texts(loaded, tokens=1024, forced=FORCED, count=3, seed=5)
    assert [text.tolist() for text in again] == [one.tolist(), two.tolist(), three.tolist()]
    other = held_out_texts(loaded, tokens=1024, forced=FORCED, count=1, seed=6)
    assert other[0].tolist() != one.tolist()
    known = {str(t.tolist()) for t in calibration_tokens(loaded, [], tokens=1024, forced=FORCED)}
    for text in (one, two, three):
        assert 900 < len(text) <= 1024
        assert str(text.tolist()) not in known


def test_documents_end_in_the_answer(loaded: LoadedModel) -> None:
    """The model itself says what will be forced: full attention finds the answer."""
    texts = held_out_texts(loaded, tokens=1024, forced=FORCED, count=2, seed=0)
    for text in texts:
        logits = loaded.model(text[None]).logits[0]
        said = logits[-FORCED - 1 : -1].argmax(-1)
        assert (said == text[-FORCED:]).float().mean() > 0.8


def test_an_answer_too_short_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="smaller --forced"):
        held_out_texts(loaded, tokens=1024, forced=600, count=1, seed=0)


def test_quality_tells_good_from_bad_and_is_measured_once(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = find_adapter(fingerprint(loaded.model))
    assert adapter is not None
    texts = held_out_texts(loaded, tokens=1024, forced=FORCED, count=1, seed=0)
    path = tmp_path / "quality.journal"
    quality = HeldOutQuality(loaded, adapter, texts, forced=FORCED, journal=Journal(path, {}))
    quality.measure([GOOD, BAD])
    good, bad = (quality.found[quality_key(fields_of(each))]["kl"] for each in (GOOD, BAD))
    assert good < 0.03 < bad
    summary = quality.summary(0.03)
    assert (summary["settings"], summary["within_floor"]) == (2, 1)
    assert summary["texts"] == [len(texts[0])]
    monkeypatch.setattr("research.tuning.workbench.Reference", None)
    again = HeldOutQuality(loaded, adapter, texts, forced=FORCED, journal=Journal(path, {}))
    again.measure([BAD])
    assert again.found[quality_key(fields_of(BAD))]["kl"] == bad


# What counts --------------------------------------------------------------------------------------


def test_what_loses_quality_or_memory_is_not_the_best() -> None:
    good, slow = row(10.0), row(9.0, 0.0)
    lossy, greedy = row(99.0, 0.5), row(98.0, peak_bytes=101)
    beyond, within = row(11.0, None, within_limits=False), row(8.0, None)
    rows = [slow, lossy, good, greedy, beyond, within]
    assert fastest(rows, 0.1, 9) == [good, slow, within]
    assert keeps_all(lossy, 0.5)
    assert not keeps_all(greedy, 9.0)


def test_errors_have_sizes_and_a_bias() -> None:
    found = errors_of([row(1.0, error=error) for error in (-0.4, -0.2, 0.1)])
    assert found == {"count": 3, "median": 0.2, "worst": 0.4, "bias": -0.2}
    assert errors_of([])["median"] is None


def device_of(**roles: float) -> Row:
    """A device with 200 equal settings beside those with roles, which have these speeds."""
    picks = [row(speed, roles=(name,), group_tokens=8) for name, speed in roles.items()]
    rows = [row(5.0, of_tuner=True, error=9.0), *picks, *(row(4.0) for _ in range(200))]
    final = [{**pick, "tokens_per_s": 2 * pick["tokens_per_s"]} for pick in picks]
    return {
        "title": "eMMC", "fit": 500, "settings": rows, "final": [*final, row(30.0)],
        "tuner": {"runs": 9, "fidelity_checks": 1, "decode_steps": 100},
        "sweep": {"runs": len(rows), "decode_steps": 2000},
    }  # fmt: skip


def test_a_summary_of_a_device() -> None:
    found = sweep_summary(device_of(best=10.0, pick=9.6, paper=8.0), 0.1)
    assert found["share"] == {"pick": 0.96, "paper": 0.8}
    assert found["share_again"] == {"pick": pytest.approx(0.64), "paper": pytest.approx(16 / 30)}
    assert found["saving"] == pytest.approx(20.4)
    assert found["saving_of_steps"] == 20
    assert found["groups"] == {"pick": 8, "best": 8, "paper": 8}
    assert found["errors"]["worst"] == pytest.approx(0.1), "the tuner's own do not count"
    assert found["pick_keeps_all"]
    assert found["met"] == {
        "share": True, "share_again": False, "saving": True, "settings": True, "memory": True
    }  # fmt: skip


def test_a_summary_without_a_paper_pick() -> None:
    device = device_of(best=10.0, pick=9.4)
    device["settings"][-1]["peak_bytes"] = 101
    found = sweep_summary(device, 0.1)
    assert found["share"]["paper"] is None
    assert found["memory"] == {"held": 202, "of": 203, "most": 1.01}
    assert not found["met"]["share"]
    assert not found["met"]["memory"]


# Figure -------------------------------------------------------------------------------------------


def result_of(*devices: Row) -> Result:
    named = {
        name: {**device, "summary": sweep_summary(device, 0.1)}
        for name, device in zip(("emmc", "real"), devices, strict=False)
    }
    return Result(
        kind="tuning.sweep", command="", seed=0, machine={}, libraries={}, commit="", date="",
        settings={"model": "recall", "batch": 1, "context": 8192, "memory": "1/6"},
        figures={"floor": 0.1, "devices": named},
    )  # fmt: skip


def test_quality_lies_over_throughput_with_the_picks_marked() -> None:
    device = device_of(best=10.0, pick=9.6, paper=8.0)
    device["settings"][1]["kl"] = 0.0
    figure = draw(tuning.quality(result_of(device, device_of(best=3.0, pick=3.0))))
    left, right = figure.axes
    marked = {
        line.get_marker(): tuple(np.asarray(line.get_xydata())[0])
        for line in left.get_lines() if line.get_markersize() > 10
    }  # fmt: skip
    assert marked == {"*": (10.0, 1e-7), "o": (9.6, 0.01), "s": (8.0, 0.01)}
    assert [text.get_text() for text in left.texts] == ["floor: 0.1 nats"]
    title = left.get_title("left") + left.get_title()
    assert title == "eMMC (simulated): run again, pick 64% of best"
    assert "This machine's disk" in (right.get_title("left") + right.get_title())
    assert left.get_ylim()[1] > 0.1
    plt.close("all")


def test_without_quality_there_is_no_figure_of_it() -> None:
    device = device_of(best=10.0, pick=9.6)
    for each in device["settings"]:
        each["kl"] = None
    result = result_of(device)
    assert list(charts_of(result, "x")) == ["x-predicted"]
    with pytest.raises(ConfigError, match="random weights"):
        draw(tuning.quality(result))
    assert list(charts_of(result_of(device_of(best=1.0)), "x")) == ["x", "x-predicted"]
