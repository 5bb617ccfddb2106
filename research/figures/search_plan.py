"""Figure of `search.plan`: bytes of each step along a request, and of the request (Fig. 7)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES
from penstock.evaluate.result import Result
from research.search.plan import FIG_7_CONVENTION, FIG_7_GIB

_GIB = 2**30
_FIG_7 = {"model": "opt-6.7b", "beams": 64, "prompt_tokens": 128, "tokens": 1920, "memory": "7GiB"}
Row = dict[str, Any]


def draw_search_plan(result: Result) -> Figure:
    """On the left bytes of each step, on the right totals by convention, and the paper's.

    Raises:
        ConfigError: the result has no rows.
    """
    rows = result.figures.get("rows", [])
    if not rows:
        raise ConfigError("this result has no rows")
    settings = result.settings
    figure = Figure(figsize=(12.4, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    shown = [row for row in rows if row["convention"] in (None, FIG_7_CONVENTION)]
    _steps(left, shown)
    is_fig_7 = all(settings.get(name) == value for name, value in _FIG_7.items())
    _totals(right, rows, FIG_7_GIB if is_fig_7 else {})
    figure.suptitle(
        f"What a request loads, by Eq. 1-5: {settings['model']}, {settings['beams']} beams, prompt "
        f"{settings['prompt_tokens']:,}, {settings['tokens']:,} new tokens,\n"
        f"{settings['memory']} of fast memory; nothing was run, and no block is shared",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _steps(axes: Axes, rows: Sequence[Row]) -> None:
    """A staircase for each strategy, on a log scale, over stretches of the longest step; one that
    loads nothing is left out."""
    stretch = max(row["step_tokens"] for row in rows)
    for row, colour in zip(rows, (FAINT, *SERIES), strict=False):
        at = np.arange(0, len(row["starts"]), max(1, stretch // row["added_over"]))
        size = np.add.reduceat(np.array(row["loaded_bytes"], dtype=np.float64), at) / _GIB
        starts = np.array(row["starts"])[at]
        x = np.append(starts, row["starts"][-1] + row["added_over"])
        y = np.where(size > 0, size, np.nan)
        axes.stairs(y, x, baseline=None, color=colour, linewidth=2, label=_name(row))
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_title(f"Along the request, every {stretch} tokens")
    axes.set_xlabel("tokens of a beam")
    axes.set_ylabel("GiB loaded (log scale)")
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=10, loc="lower right")


def _totals(axes: Axes, rows: Sequence[Row], paper: dict[int, int]) -> None:
    """Bars of totals under the figure's convention; in them, what the others give."""
    shown = [row for row in rows if row["convention"] in (None, FIG_7_CONVENTION)]
    for place, (row, colour) in enumerate(zip(shown, (FAINT, *SERIES), strict=False)):
        total = row["total_bytes"] / _GIB
        axes.bar(place, total, width=0.8, color=colour)
        text = f"{total:,.0f}"
        if row["step_tokens"] in paper:
            text += f"\n(paper: {paper[row['step_tokens']]:,})"
        axes.annotate(text, (place, total), xytext=(0, 4), textcoords="offset points",
                      ha="center", fontsize=9.5, color=INK)  # fmt: skip
        others = [
            f"{_CONVENTIONS[other['convention']]}\n{other['total_bytes'] / _GIB:,.0f}"
            for other in rows
            if other["step_tokens"] == row["step_tokens"] and other["convention"] in _CONVENTIONS
        ]  # fmt: skip
        axes.annotate("\n".join(others), (place, total), xytext=(0, -6), color="white",
                      textcoords="offset points", ha="center", va="top", fontsize=8.5)  # fmt: skip
    axes.set_yscale("log")
    low = min(row["total_bytes"] for row in shown) / _GIB
    axes.set_ylim(max(low, 1) / 20, 4 * max(row["total_bytes"] for row in shown) / _GIB)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xticks(range(len(shown)), [_name(row).replace(" ", "\n", 1) for row in shown])
    axes.tick_params(axis="x", length=0)
    axes.set_title("The request, lengths at a step's end")
    axes.set_ylabel("GiB loaded (log scale)")
    axes.grid(axis="y", color=GRID, linewidth=0.8)


_CONVENTIONS = {"start": "at its start:", "literal": "as printed:"}
"""Other conventions than the figure's, as they are spoken of."""


def _name(row: Row) -> str:
    return f"steps of {row['step_tokens']}" if row["step_tokens"] else "token by token"
