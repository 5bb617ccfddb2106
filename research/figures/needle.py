"""Needle-in-a-haystack heat maps: a panel for each setting, lengths across, depths down."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, short_tokens
from penstock.evaluate.result import Result

_COLOURS = "viridis"
_FEW_CELLS = 80
"""Panels of at most this many cells have numbers in them."""
_ACROSS = 4


def draw_needles(result: Result) -> Figure:
    """Share of needles found, one scale of colours from 0 to 100 % for all panels.

    Raises:
        ConfigError: nothing was answered.
    """
    cells = result.figures["cells"]
    if not any(cell["scores"] for cell in cells):
        raise ConfigError("no cell of this result was measured")
    lengths = sorted({cell["tokens"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    settings = list(dict.fromkeys(cell["setting"] for cell in cells))
    across = min(_ACROSS, len(settings))
    down = -(-len(settings) // across)
    figure = Figure(
        figsize=(
            max(8.6, 1.7 + across * max(1.75, 0.48 * len(lengths))),
            1.5 + down * (0.9 + 0.36 * max(4, len(depths))),
        ),
        layout="constrained",
    )
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes, setting in zip(panels.flat, settings, strict=False):
        mine = [cell for cell in cells if cell["setting"] == setting]
        _panel(axes, mine, lengths, depths)
        axes.set_title(setting.replace("@", " at "), fontsize=11)
    for axes in panels.flat[len(settings) :]:
        axes.axis("off")
    figure.supxlabel("tokens of the prompt", fontsize=11)
    figure.supylabel("depth of the needle, %", fontsize=11)
    scale = ScalarMappable(Normalize(0, 100), _COLOURS)
    bar = figure.colorbar(scale, ax=panels, aspect=18, fraction=0.06, pad=0.015)
    bar.set_label("needles found, %")
    bar.outline.set_visible(False)
    figure.suptitle(_title(result), fontsize=12, fontweight="bold", x=0.01, ha="left")
    return figure


def _title(result: Result) -> str:
    counts = sorted({len(cell["scores"]) for cell in result.figures["cells"] if cell["scores"]})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    plural = "" if samples == "1" else "s"
    title = f"Needle in a haystack ({result.settings['task']}), {samples} sample{plural} a cell"
    if any(cell["refused"] for cell in result.figures["cells"]):
        title += "\nhatched: no cache of this length fits the budget"
    return title


def _panel(
    axes: Axes, cells: Sequence[dict[str, Any]], lengths: Sequence[int], depths: Sequence[float]
) -> None:
    scores = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        row, column = depths.index(cell["depth"]), lengths.index(cell["tokens"])
        if cell["scores"]:
            scores[row, column] = 100 * float(np.mean(cell["scores"]))
        elif cell["refused"]:
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="#f1f2f4", edgecolor=FAINT,
                          hatch="////", linewidth=0)
            )  # fmt: skip
    colours = matplotlib.colormaps[_COLOURS]
    axes.imshow(scores, cmap=colours, vmin=0, vmax=100, aspect="auto", interpolation="nearest")
    if scores.size <= _FEW_CELLS:
        for (row, column), score in np.ndenumerate(scores):
            if not np.isnan(score):
                dark = sum(colours(score / 100)[:3]) < 1.35
                axes.text(column, row, f"{score:.0f}", ha="center", va="center", fontsize=9.5,
                          color="white" if dark else "black")  # fmt: skip
    axes.set_xticks(range(len(lengths)), [short_tokens(tokens) for tokens in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
    axes.set_xticks(np.arange(len(lengths) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(depths) - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.set_axisbelow(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
