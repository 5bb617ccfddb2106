"""The figure of `device_tier.speed --ablation`: a decode step with and without each part."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES
from penstock.evaluate.result import Result
from research.figures.device_speed import device_title, spoken_pattern

_WORDS = {
    "arkvale": "ArkVale: pages, at every step",
    "louiskv:boundaries=every!torch": "LouisKV at every step, plain torch",
    "louiskv!torch": "at boundaries, plain torch",
    "louiskv:boundaries=every": "at every step, own kernels",
    "louiskv": "at boundaries, own kernels",
    "louiskv!eager": "the same, launched by Python",
}
"""Methods of `device_tier.methods.ABLATION` in words, in the order in which parts are added."""
Row = dict[str, Any]


def draw_device_ablation(result: Result) -> Figure:
    """Milliseconds of a step by variant, a panel for each pattern and batch.

    Raises:
        ConfigError: no row was measured.
    """
    rows = [row for row in result.figures["rows"] if "answer_mean_ms" in row]
    if not rows:
        raise ConfigError("no row of this result was measured")
    spots = list(dict.fromkeys((row["pattern"], row["batch"]) for row in rows))
    groups = [_ordered([row for row in rows if (row["pattern"], row["batch"]) == spot])
              for spot in spots]  # fmt: skip
    figure = Figure(
        figsize=(9.0, 1.9 + 0.44 * sum(map(len, groups)) + 0.5 * len(groups)), layout="constrained"
    )
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=[*map(len, groups)])
    for axes, (pattern, batch), group in zip(panels[:, 0], spots, groups, strict=True):
        axes.set_title(f"{spoken_pattern(pattern)}, batch {batch}")
        _panel(axes, group)
    panels[-1][0].set_xlabel("milliseconds of a decode step (its speed; steps that retrieve)")
    title = device_title(result, "What each part of LouisKV is worth")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """As parts are added; methods that have no words come last."""
    order = list(_WORDS)
    known = [row for row in rows if row["method"] in _WORDS]
    known.sort(key=lambda row: order.index(row["method"]))
    return [*known, *(row for row in rows if row["method"] not in _WORDS)]


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Bars, and each one's speed against ArkVale's where that was measured."""
    bases = [row["answer_mean_ms"] for row in rows if row["method"] == "arkvale"]
    for place, row in enumerate(rows):
        ours, time = row["method"].startswith("louiskv"), row["answer_mean_ms"]
        axes.barh(place, time, height=0.66, color=SERIES[0 if ours else 1])
        shares = [spot["retrieval_share"] for spot in row["places"]]
        said = [f"{bases[0] / time:.2f}x ArkVale"] if bases and ours else []
        said.append(f"{sum(shares) / len(shares):.0%} retrieve")
        axes.annotate(
            f"{time:.1f} ms ({'; '.join(said)})", (time, place), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=9.5, color=INK,
        )  # fmt: skip
    axes.set_yticks(
        range(len(rows)), [_WORDS.get(row["method"], str(row["method"])) for row in rows]
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.64 * max(row["answer_mean_ms"] for row in rows))
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["bottom"].set_color(FAINT)
