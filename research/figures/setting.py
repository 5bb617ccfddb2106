"""Throughput in KVSwap's setting A: lines over the batch, a panel for each device and context."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import GRID, short_tokens
from penstock.evaluate.result import Result
from research.figures.best_case import draw_best_case
from research.figures.label_places import spread
from research.settings.rows import (
    SettingRow,
    colours_of,
    device_title,
    is_ours,
    names_of,
    setting_rows,
    title_lines,
)

_MARKERS = "osv^DPXphd<>"
_LETTER = 6.2
"""Width of a letter in the names at the ends of the lines, in points."""
_LINE_GAP = 12.5
"""Between the names of two lines, in points."""


def draw_setting(result: Result) -> Figure:
    """Whole-model throughput of either setting.

    Raises:
        ConfigError: no row was measured.
    """
    if result.settings.get("setting") == "B":
        return draw_best_case(result)
    every = setting_rows(result)
    rows = [row for row in every if row["rate"]]
    if not rows:
        raise ConfigError("no row of this result was measured")
    devices = list(dict.fromkeys(row["device"] for row in rows))
    contexts = sorted({row["context"] for row in rows})
    batches = sorted({row["batch"] for row in rows})
    names = names_of(every)
    wide = 10.2 if len(contexts) > 1 else 7.6
    letters = _LETTER / 72 * (max(map(len, names)) + 6)
    share = min(0.6, letters / ((wide - 0.8) / len(contexts)))
    figure = Figure(figsize=(wide, 1.3 + 3.4 * len(devices)), layout="constrained")
    panels = figure.subplots(len(devices), len(contexts), squeeze=False, sharex=True, sharey=True)
    for line, device in zip(panels, devices, strict=True):
        for axes, context in zip(line, contexts, strict=True):
            here = [r for r in rows if (r["device"], r["context"]) == (device, context)]
            axes.set_title(f"{device_title(device)}, {short_tokens(context)} tokens")
            _lines_panel(axes, here, names, batches)
            _leave_room(axes, len(batches), share)
    figure.supxlabel("batch", fontsize=11)
    figure.supylabel("tokens per second, whole model (log scale)", fontsize=11)
    lines = title_lines(result, every)
    if any(row["is_predicted"] for row in rows):
        lines.append("hollow: not run, predicted from what would be read")
    figure.suptitle("\n".join(lines), fontsize=12, x=0.01, ha="left")
    figure.draw_without_rendering()  # the layout is known from here on
    figure.set_layout_engine("none")
    for axes in panels.flat:
        _name_lines(axes)
    return figure


def _lines_panel(
    axes: Axes, rows: Sequence[SettingRow], names: Sequence[str], batches: Sequence[int]
) -> None:
    colours = colours_of(names)
    for number, name in enumerate(names):
        mine = sorted((row for row in rows if row["name"] == name), key=lambda row: row["batch"])
        if not mine:
            continue
        first = number == 0 and is_ours(name)
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(
            [batches.index(row["batch"]) for row in mine], [row["rate"] for row in mine],
            color=colours[name], marker=marker,
            linewidth=2.8 if first else 1.5, markersize=7 if first else 5.5, label=name,
            markeredgecolor="white", markeredgewidth=0.7, zorder=3 if first else 2,
        )  # fmt: skip
        predicted = [row for row in mine if row["is_predicted"]]
        axes.scatter(
            [batches.index(row["batch"]) for row in predicted], [row["rate"] for row in predicted],
            s=32, marker=marker, facecolor="white", edgecolor=colours[name], zorder=4,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.margins(y=0.13)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.grid(axis="y", which="major", color=GRID, linewidth=0.9)
    axes.grid(axis="y", which="minor", color=GRID, linewidth=0.4)


def _leave_room(axes: Axes, batches: int, share: float) -> None:
    """Keep a share of the width free for the names."""
    width = (batches - 1 + 0.5) / (1 - share)
    axes.set_xlim(-0.25, -0.25 + width)


def _name_lines(axes: Axes) -> None:
    """Write every line's name to the right of the lines, at about the height of its end."""
    lines = axes.get_lines()
    if not lines:
        return
    ends = [np.asarray(line.get_xydata())[-1:] for line in lines]
    heights = [float(axes.transData.transform(end)[0, 1]) for end in ends]
    gap = _LINE_GAP * axes.figure.dpi / 72
    low, high = axes.get_window_extent().y0 + gap / 2, axes.get_window_extent().y1 - gap / 2
    last = float(max(axes.get_xticks()))
    beyond = last + 0.07 * (axes.get_xlim()[1] + 0.25)
    to_data = axes.transData.inverted()
    for line, end, place in zip(lines, ends, spread(heights, gap, low, high), strict=True):
        name = str(line.get_label())
        axes.annotate(
            name, tuple(end[0]), xytext=(beyond, to_data.transform([[0.0, place]])[0, 1]),
            textcoords="data", va="center", color=line.get_color(), annotation_clip=False,
            fontsize=10 if is_ours(name) else 9.5,
            fontweight="bold" if is_ours(name) else "normal",
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.7,
                        "alpha": 0.6, "shrinkA": 0, "shrinkB": 5, "relpos": (0.0, 0.5)},
        )  # fmt: skip
