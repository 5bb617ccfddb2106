"""Where a decode step's time goes in one transformer block: a stacked bar for each method."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import GRID
from penstock.evaluate.result import Result
from research.settings.rows import budgets_of, device_title, is_ours, setting_rows, short_number

_PARTS = ("#c96a2b", "#e3b34c", "#9db6c4", "#7fae73", "#a68bc2", "#c98a9d")
_CUT = 3.0
"""Bars longer than this many times the median one are cut, a little beyond the next."""


def has_breakdown(result: Result) -> bool:
    """Whether any row of setting A says where its time goes; in B batches differ by method."""
    return result.settings.get("setting") != "B" and any(
        _parts(row) for row in result.figures["rows"]
    )


def draw_breakdown(result: Result) -> Figure:
    """Latency of one block by its parts, stacked bars, the slowest method first.

    Of the device, context and batch that most methods have been measured at; among equals of the
    first device, then the longest context and the largest batch.

    Raises:
        ConfigError: no row has a breakdown.
    """
    rows = [row for row in setting_rows(result) if _parts(row)]
    if not rows:
        raise ConfigError("no row of this result has a breakdown")
    devices = list(dict.fromkeys(row["device"] for row in rows))
    spots = [(row["device"], row["context"], row["batch"]) for row in rows]
    spot = max(spots, key=lambda s: (spots.count(s), -devices.index(s[0]), s[1], s[2]))
    shown = [row for row, own in zip(rows, spots, strict=True) if own == spot]
    shown.sort(key=lambda row: -sum(_parts(row).values()))
    figure = Figure(figsize=(8.6, 1.9 + 0.42 * len(shown)), layout="constrained")
    axes = figure.subplots()
    _breakdown_bars(axes, shown)
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown])
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if is_ours(label.get_text()) else "normal")
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel("time in one transformer block at one decode step, ms (//: the bar goes on)")
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    device, context, batch = spot
    figure.suptitle(
        f"Where the time goes: {device_title(device)}, {context:,} tokens, batch {batch}\n"
        f"{result.settings['config']}, KV budget {budgets_of(shown)}",
        fontsize=12, fontweight="bold", x=0.01, ha="left",
    )  # fmt: skip
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=len(names))
    return figure


def _breakdown_bars(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    totals = [sum(_parts(row).values()) for row in rows]
    limit = _axis_end(totals)
    fullest = sorted((_parts(row) for row in rows), key=len, reverse=True)
    names = list(dict.fromkeys(name for parts in fullest for name in parts))
    starts = np.zeros(len(rows))
    for name, colour in zip(names, _PARTS, strict=False):
        widths = np.array([_parts(row).get(name, 0.0) for row in rows])
        axes.barh(range(len(rows)), widths, left=starts, height=0.66, color=colour, label=name)
        for place, (start, width) in enumerate(zip(starts, widths, strict=True)):
            seen = min(start + width, limit) - start
            if seen > 0.07 * limit:
                axes.text(start + seen / 2, place, short_number(width), ha="center", va="center",
                          fontsize=9.5)  # fmt: skip
        starts += widths
    for place, total in enumerate(totals):
        cut = total > limit * 1.001
        end = limit if cut else total
        if cut:
            axes.text(0.975 * limit, place, "//", ha="center", va="center", fontsize=14,
                      color="white", fontweight="bold")  # fmt: skip
        axes.annotate(f"{short_number(total)} ms", (end, place), xytext=(5, 0), va="center",
                      textcoords="offset points", fontsize=9.5, annotation_clip=False)  # fmt: skip
    axes.set_xlim(0, limit)


def _axis_end(totals: Sequence[float]) -> float:
    """Where the axis ends: at the longest bar, or beyond the last one that need not be cut."""
    whole = [total for total in totals if total <= _CUT * float(np.median(totals))]
    return max(totals) if len(whole) == len(totals) else 1.35 * max(whole)


def _parts(row: dict[str, Any]) -> dict[str, float]:
    return dict(row.get("breakdown_ms") or {})
