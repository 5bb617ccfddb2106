"""HillInfer's figures 4 and 8: how tokens change their tier, and who is important how often."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, short_tokens
from penstock.evaluate.result import Result
from research.near_storage.premises import IMPORTANT, SECONDARY, UNIMPORTANT
from research.near_storage.table import PAPER_MOVED

_TIERS = (
    (IMPORTANT, "important (best 20 %)", "#b03a48"),
    (SECONDARY, "secondary (60 %)", "#c9ccd2"),
    (UNIMPORTANT, "unimportant (last 20 %)", "#5b8fb0"),
)
_NAMES = {"premises": "whole", "short_premises": "short"}


def draw_near_counts(result: Result) -> Figure:
    """Steps of each token in each tier, tokens by share of important steps, and what moves.

    Raises:
        ConfigError: premises were not measured.
    """
    found = {name: result.figures[name] for name in _NAMES if name in result.figures}
    if not found:
        raise ConfigError("this result of near_storage placement has no premises")
    counted = [part for part in found.values() if "counts" in part]
    figure = Figure(figsize=(13.2, 8.2 if counted else 4.4), layout="constrained")
    if counted:
        grid = figure.add_gridspec(2, 2)
        _tokens(figure.add_subplot(grid[0, :]), counted[0], len(result.figures["layers"]))
        rest = [figure.add_subplot(grid[1, place]) for place in range(2)]
    else:
        rest = list(figure.subplots(1, 2))
    _tenths(rest[0], found)
    _moves(rest[1], found)
    for axes in rest:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    figure.suptitle(
        f"Who is important on {result.figures['model']} ({result.figures['output']}), "
        f"{short_tokens(result.figures['prompt_tokens'])} tokens of prompt",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _tokens(axes: Axes, part: dict[str, Any], layers: int) -> None:
    """Stacked bars by position, the mean of the layers."""
    counts = np.array(part["counts"], dtype=float) / layers
    under = np.zeros(len(counts))
    for tier, label, colour in _TIERS:
        axes.bar(range(len(counts)), counts[:, tier], bottom=under, width=1.0, color=colour,
                 label=label)  # fmt: skip
        under += counts[:, tier]
    axes.axvline(part["prompt_tokens"] - 0.5, color=INK, linewidth=1, linestyle="--")
    axes.annotate("output", (part["prompt_tokens"], under.max()), xytext=(3, 4), fontsize=9,
                  textcoords="offset points", color=INK)  # fmt: skip
    axes.set_xlim(-0.5, len(counts) - 0.5)
    axes.set_ylim(0, 1.22 * under.max())
    axes.set_xlabel("token")
    axes.set_ylabel("decode steps")
    axes.set_title(
        f"Steps in each tier, {part['prompt_tokens']:,} tokens of prompt, "
        f"{part['output_tokens']:,} of output, mean of the layers (fig. 8)"
    )
    axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=3)


def _tenths(axes: Axes, found: dict[str, dict[str, Any]]) -> None:
    """Tokens by the share of their steps in which they are important."""
    places = np.arange(10)
    width = 0.8 / (2 * len(found))
    for number, (name, part) in enumerate(found.items()):
        for side, kind in enumerate(("prompt", "output")):
            colour = SERIES[side] if name == "premises" else ("#7fb2c9", "#e6b391")[side]
            axes.bar(places + (2 * number + side) * width - 0.4 + width / 2,
                     part["important_shares"][kind], width=width, color=colour,
                     label=f"{kind}, {_NAMES[name]} text ({part['prompt_tokens']:,} + "
                           f"{part['output_tokens']:,})")  # fmt: skip
    axes.set_xticks(places, [f"{10 * place}-{10 * place + 10}" for place in places], fontsize=9)
    axes.set_xlabel("% of its steps that a token is important in")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("Tokens by how often they are important")
    axes.legend(frameon=False, fontsize=9)


def _moves(axes: Axes, found: dict[str, dict[str, Any]]) -> None:
    """Share of the cache into or out of the last tier at each step."""
    low, high = PAPER_MOVED
    for number, (name, part) in enumerate(found.items()):
        axes.plot(part["moved_storage"], color=SERIES[number], linewidth=1.3,
                  label=f"{_NAMES[name]} text, into or out of the last fifth")  # fmt: skip
        axes.plot(part["moved_any"], color=SERIES[number], linewidth=1, linestyle=":",
                  label=f"{_NAMES[name]} text, into any other tier")  # fmt: skip
    part = next(iter(found.values()))
    axes.axhspan(low, high, color=FAINT, alpha=0.16, linewidth=0,
                 label=f"paper (fig. 4): {low:.0%} to {high:.0%}")  # fmt: skip
    axes.axhline(part["chance_storage"], color=INK, linewidth=1, linestyle="--",
                 label="last fifth, ranks by chance")  # fmt: skip
    axes.set_ylim(0, 0.9)
    axes.set_xlabel("decode step")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("Share of the cache that changes its tier at a step")
    axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)
