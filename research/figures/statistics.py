"""The figure of `python -m research.statistics`: sparsity, locality, rank and prediction."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES
from penstock.evaluate.result import Result
from research.statistics.series import column

_LAYERS = "viridis"
_MARKERS = "os^D"


def draw_statistics(result: Result) -> Figure:
    """Four panels: probability over tokens, reuse by layer, recall over rank, prediction by layer.

    Raises:
        ConfigError: the result has no figures.
    """
    figures = result.figures
    if not figures.get("layers"):
        raise ConfigError("no layer of this result was measured")
    figure = Figure(figsize=(10.5, 8.2), layout="constrained")
    (top_left, top_right), (low_left, low_right) = figure.subplots(2, 2)
    _mass_panel(top_left, figures)
    _reuse_panel(top_right, figures)
    _rank_panel(low_left, figures)
    _prediction_panel(low_right, figures)
    for axes in (top_left, top_right, low_left, low_right):
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    low_right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1f}"))
    low_right.set_ylim(min(0.0, low_right.dataLim.y0 - 0.02), 1.02)  # cosines may be negative
    figure.suptitle(_title(result), fontsize=12, x=0.01, ha="left")
    return figure


def _mass_panel(axes: Axes, figures: dict[str, Any]) -> None:
    mass, layers = figures["mass"], figures["layers"]
    parts, curves = mass["parts"], mass["mass_together"]
    shades = matplotlib.colormaps[_LAYERS](np.linspace(0.05, 0.9, len(layers)))
    named = {0, len(layers) // 2, len(layers) - 1}
    for number, (layer, curve) in enumerate(zip(layers, curves, strict=True)):
        axes.plot(
            parts, curve, color=shades[number], linewidth=1.2,
            label=f"layer {layer}" if number in named else None,
        )  # fmt: skip
    mean = np.mean(np.array(curves, dtype=float), axis=0)
    axes.plot(parts, mean, color=INK, linewidth=2.6, label="mean")
    axes.set_xscale("log")
    axes.set_xticks([0.001, 0.01, 0.05, 0.2, 0.5], ["0.1%", "1%", "5%", "20%", "50%"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("best tokens, share of all (log scale)")
    axes.set_title("Attention on the best tokens")
    axes.legend(frameon=False, fontsize=9.5, loc="lower right")


def _reuse_panel(axes: Axes, figures: dict[str, Any]) -> None:
    groups, reuse, layers = figures["overlap"][-1], figures["reuse"], figures["layers"]
    shades = matplotlib.colormaps["Blues"](np.linspace(0.4, 0.95, len(reuse["sizes"])))
    for place, size in reversed(list(enumerate(reuse["sizes"]))):
        axes.plot(
            layers, _numbers(column(reuse["hit_rate"], place)), color=shades[place],
            marker=_MARKERS[place % len(_MARKERS)], markersize=5,
            label="the step before (1x)" if size == 1 else f"buffer of {size:g}x",
        )  # fmt: skip
    axes.axhline(groups["chance"], color=FAINT, linestyle="--", linewidth=1.2, label="random sets")
    _by_layer(axes)
    count = groups["count"]
    axes.set_title(f"Of the best {count} groups of 4, already there", pad=42)
    axes.legend(
        frameon=False, fontsize=9.5, ncols=3, loc="lower left", bbox_to_anchor=(-0.02, 0.99),
        borderaxespad=0.2, columnspacing=1.2,
    )  # fmt: skip


def _rank_panel(axes: Axes, figures: dict[str, Any]) -> None:
    low = figures["low_rank"]
    ranks = low["ranks"]
    kinds = [("after_rope", "after RoPE"), ("before_rope", "before RoPE")]
    for number, (kind, name) in enumerate(kinds):
        if kind not in low:
            continue
        by_layer = np.array(
            [[at[-1] for at in by_rank] for by_rank in low[kind]["recall_together"]], dtype=float
        )  # fmt: skip
        colour = SERIES[number]
        axes.fill_between(
            ranks, by_layer.min(axis=0), by_layer.max(axis=0), color=colour, alpha=0.15, linewidth=0
        )  # fmt: skip
        axes.plot(
            ranks, by_layer.mean(axis=0), color=colour, marker=_MARKERS[number], linewidth=2.2,
            label=f"found, {name}",
        )  # fmt: skip
        energy = np.mean(np.array(low[kind]["energy"], dtype=float), axis=0)
        axes.plot(ranks, energy, color=colour, linestyle=":", linewidth=1.6,
                  label=f"energy, {name}")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(f"rank of the joint keys, of {low['width']} (band: all layers)")
    axes.set_title(f"Top {low['counts'][-1]} found with low-rank keys")
    axes.legend(frameon=False, fontsize=9.5, loc="lower right")


def _prediction_panel(axes: Axes, figures: dict[str, Any]) -> None:
    found, layers = figures["prediction"], figures["layers"]
    count = found["counts"][-1]
    lines = [
        ("cosine of the inputs", found["input_cosine"], FAINT),
        ("cosine of the queries", found["cosine"], SERIES[0]),
        (f"top {count} found, share", [row[-1] for row in found["recall_together"]], SERIES[1]),
    ]
    for number, (name, values, colour) in enumerate(lines):
        axes.plot(
            layers, _numbers(values), color=colour, marker=_MARKERS[number], label=name,
            linewidth=2.2 if number else 1.5,
        )  # fmt: skip
    _by_layer(axes)
    axes.set_title("Predicted from the layer before")
    axes.legend(frameon=False, fontsize=9.5, loc="lower right")


def _by_layer(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    axes.set_xlabel("layer")


def _numbers(values: Sequence[float | None]) -> list[float]:
    """NaN, which is not drawn, where there is nothing."""
    return [np.nan if value is None else value for value in values]


def _title(result: Result) -> str:
    tokens = result.figures["prompt_tokens"]
    length = f"{tokens[0]:,}" if len(tokens) == 1 else f"{len(tokens)} x {max(tokens):,}"
    return (
        f"Full attention of {result.settings['model']}: {length} tokens of prompt, "
        f"{result.figures['steps']} decode steps"
    )
