"""The figure of drift in `clusters`: how far the output's keys are from the prompt's, by layer."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, short_tokens
from penstock.evaluate.result import Result


def draw_cluster_drift(result: Result) -> Figure:
    """Three panels over the place in the output: keys outside, their distance, the mean's shift.

    Raises:
        ConfigError: no layer was measured.
    """
    drift = result.figures.get("drift")
    if not drift:
        raise ConfigError("no layer of this result was measured")
    figure = Figure(figsize=(13.2, 4.5), layout="constrained")
    outside, distance, shift = figure.subplots(1, 3)
    ends = np.array(drift["part_ends"])
    places = ends - np.diff(ends, prepend=0) / 2
    for axes, name in ((outside, "outside"), (distance, "distance"), (shift, "shift")):
        _by_layer(axes, places, drift[name], result.figures["layers"])
        axes.set_xlabel("token of the output")
        axes.set_xlim(0, ends[-1])
        axes.set_ylim(bottom=0)
    calm = drift["outside_prompt"]
    outside.axhspan(min(calm), max(calm), color=FAINT, alpha=0.25, linewidth=0)
    outside.annotate(
        "held-out tokens of the prompt, all layers", (ends[-1], min(calm)), xytext=(-2, -3),
        textcoords="offset points", va="top", ha="right", fontsize=9, color=INK,
    )  # fmt: skip
    outside.set_ylim(0, 1.02)
    outside.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    outside.set_title("Keys farther from the nearest cluster\nof the prompt than any of its own")
    distance.axhline(1.0, color=FAINT, linestyle="--", linewidth=1.2)
    distance.set_title("Squared distance from the nearest\n(1: a held-out token of the prompt)")
    shift.set_title("Shift of the mean key\n(1: a prompt key's own distance from it)")
    distance.legend(frameon=False, fontsize=9, loc="lower right", ncols=2)
    figure.suptitle(_title(result, "generated keys leave the prompt's clusters"),
                    fontsize=12, x=0.01, ha="left")  # fmt: skip
    return figure


def _by_layer(axes: Axes, places: Any, rows: list[list[float]], layers: list[int]) -> None:
    shades = matplotlib.colormaps["viridis"](np.linspace(0.05, 0.9, len(layers)))
    named = {0, len(layers) // 2, len(layers) - 1}
    for number, row in enumerate(rows):
        axes.plot(places, row, color=shades[number], linewidth=1.4, marker="o", markersize=3,
                  label=f"layer {layers[number]}" if number in named else None)  # fmt: skip
    axes.plot(places, np.mean(rows, axis=0), color=INK, linewidth=2.6, label="mean")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _title(result: Result, what: str) -> str:
    found = result.figures
    return (
        f"{found['model']}, {short_tokens(found['prompt_tokens'])} tokens of prompt: {what}"
    )  # fmt: skip
