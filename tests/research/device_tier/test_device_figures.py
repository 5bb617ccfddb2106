"""Figures of the device tier: the right bar at the right place, and nothing made larger."""

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.device_tier.methods import ABLATION
from research.figures import device_tier
from research.figures.chart import draw
from research.figures.report import charts_of

RESULTS = Path(__file__).parents[3] / "benchmarks/results"


def row(method: str, ms: float, batch: int = 1, held: int = 0) -> dict[str, Any]:
    return {
        "pattern": "32256/512", "batch": batch, "method": method, "answer_mean_ms": ms,
        "tokens_per_s": 1e3 * batch / ms, "memory": {"held": held},
        "places": [{"retrieval_share": 0.25}, {"retrieval_share": 0.75}],
    }  # fmt: skip


def speed(rows: list[dict[str, Any]], **settings: Any) -> Result:
    settings = {"config": "tiny", "on": "cuda", "segment": 8, "sameness": 0.9, **settings}
    return Result(
        kind="device_tier.speed", command="", settings=settings, seed=0, machine={"gpu": "some"},
        libraries={}, commit="", date="", figures={"rows": rows},
    )  # fmt: skip


def colours(figure: Figure) -> dict[str, Any]:
    return {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(
            figure.legends[0].get_texts(), figure.legends[0].get_patches(), strict=True
        )
    }


def tick_labels(axes: Any, which: str) -> list[str]:
    return [label.get_text() for label in getattr(axes, f"get_{which}ticklabels")()]


def test_a_method_has_one_colour_in_all_figures() -> None:
    first = colours(draw(device_tier.speed(speed([row("louiskv", 8), row("arkvale", 11)]))))
    other = colours(draw(device_tier.speed(speed([row("kvswap", 30), row("louiskv@4GiB", 8)]))))
    assert first["louiskv"] == other["louiskv@4GiB"]
    assert len({first["louiskv"], first["arkvale"], other["kvswap"]}) == 3
    names = ["louiskv:tau=0.9", "louiskv", "arkvale", "louiskv!torch", "something"]
    many = colours(draw(device_tier.speed(speed([row(name, 8) for name in names]))))
    assert len(set(many.values())) == len(names)
    assert many["louiskv:tau=0.9"] == first["louiskv"]
    assert many["arkvale"] == first["arkvale"]


def test_a_title_stays_inside_a_narrow_figure() -> None:
    result = speed([row("louiskv", 8)], config="llama-3.1-8b", segment=16, stays=[0.59, 0.71])
    result.machine["gpu"] = "NVIDIA H100 80GB HBM3"
    figure = draw(device_tier.speed(result))
    figure.canvas.draw()
    title = figure.get_suptitle()
    assert "llama-3.1-8b,\nNVIDIA H100" in title
    [box] = [text.get_window_extent() for text in figure.texts if text.get_text() == title]
    assert box.x1 < figure.bbox.x1
    assert "0.59 of one stay at a turn, 0.71 at a step" in title
    result.machine["gpu"] = "NVIDIA H200"
    assert "llama-3.1-8b, NVIDIA H200" in draw(device_tier.speed(result)).get_suptitle()
    result.settings["stays"] = None
    assert "stay" not in draw(device_tier.speed(result)).get_suptitle()


@pytest.mark.parametrize("name", ["arkvale", "louiskv:predict=true", "louiskv:boundaries=every"])
def test_the_legend_lies_within_the_figure(name: str) -> None:
    figure = draw(device_tier.speed(speed([row(f"{name}{number}", 8) for number in range(5)])))
    figure.draw_without_rendering()
    legend, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert whole.x0 <= legend.x0 < legend.x1 <= whole.x1


def test_gains_stand_below_their_batch() -> None:
    rows = [row("louiskv", 8, 1), row("arkvale", 12, 1), row("louiskv", 10, 4), row("quest", 8, 4)]
    upper, lower = draw(device_tier.speed(speed(rows))).axes
    assert tick_labels(upper, "x") == ["1\n1.50x", "4"]
    assert tick_labels(lower, "x") == ["1", "4"]
    upper, _ = draw(device_tier.speed(speed([row("quest", 8), row("arkvale", 12)]))).axes
    assert tick_labels(upper, "x") == ["1"]
    # Of two variants neither is the one that is compared.
    twice = [row("louiskv", 8), row("louiskv!torch", 60), row("arkvale", 12)]
    assert tick_labels(draw(device_tier.speed(speed(twice))).axes[0], "x") == ["1"]


def test_bars_that_are_nearly_alike_stand_on_zero() -> None:
    rows = [row("louiskv", 8, held=11 << 30), row("arkvale", 170, held=12 << 30)]
    upper, lower = draw(device_tier.speed(speed(rows))).axes
    assert (upper.get_yscale(), lower.get_yscale()) == ("log", "linear")
    assert "log" in upper.get_ylabel()
    assert lower.get_ylabel() == "GPU memory, GiB"
    assert lower.get_ylim()[0] == 0
    assert {text.get_text() for text in lower.texts} == {"11", "12"}


def test_an_ablation_has_its_own_figure() -> None:
    times = dict(zip(ABLATION, (12.0, 60.0, 50.0, 8.0, 90.0, 10.0), strict=True))
    result = speed([row(name, ms) for name, ms in times.items()], ablation=True)
    assert list(charts_of(result, "one")) == ["one"]
    with pytest.raises(ConfigError, match="no row"):
        charts_of(speed([], ablation=False), "one")
    [axes] = draw(device_tier.ablation(result)).axes
    widths = [bar.get_width() for container in axes.containers for bar in container]
    assert widths == [12.0, 60.0, 50.0, 10.0, 8.0, 90.0], "as parts are added"
    assert tick_labels(axes, "y")[0] == "ArkVale: pages, at every step"
    said = [text.get_text() for text in axes.texts]
    assert said[0] == "12.0 ms (50% retrieve)"
    assert said[4] == "8.0 ms (1.50x ArkVale; 50% retrieve)"
    assert (
        len(draw(device_tier.ablation(speed([row("louiskv", 8), row("louiskv", 9, 2)]))).axes) == 2
    )
    with pytest.raises(ConfigError):
        draw(
            device_tier.ablation(
                speed([{"pattern": "1/1", "batch": 1, "method": "x", "error": "no"}])
            )
        )


@pytest.mark.skipif(not RESULTS.is_dir(), reason="not in a checkout")
def test_committed_results_can_be_drawn() -> None:
    paths = sorted(RESULTS.glob("device-tier-*.json"))
    assert len(paths) >= 7
    for path in paths:
        result = Result.load(path)
        assert re.search(r" (-o|--out(put)?) PATH\b", result.command), "no path of the machine"
        for row in result.figures["rows"]:
            assert "error" not in row, path.name
        for chart in charts_of(result, path.stem).values():
            assert draw(chart).axes
