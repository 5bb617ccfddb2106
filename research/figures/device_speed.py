"""Figures of `device_tier.speed`: tokens per second and GPU memory by batch, and a layer's time."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, short_tokens
from penstock.evaluate.result import Result

_COLOURS = ("#0b6e99", "#c96a2b", "#4b8b3b", "#7a4fa3", "#b5375a", "#80624d", "#5b616b", "#3d9c98")
_METHODS = ("louiskv", "arkvale", "full-dynamic", "kvswap", "quest", "full-static", "flexgen")
"""They have the same colours in all figures."""
_PARTS = ("#c96a2b", "#e3b34c", "#9db6c4", "#7fae73", "#d5d8dd")
_LEFT_OUT = "stream of the bench"
_WIDTH = 0.84
"""Of the bars of one batch together."""
_CUT = 4.0
"""Bars longer than this many times the median one are cut."""
_LOG_FROM = 20.0
"""Bars whose longest is this many times the shortest stand on a log scale, others on zero."""
Row = dict[str, Any]


def draw_device_speed(result: Result) -> Figure:
    """Tokens per second, and GPU memory beside the weights; a column of panels for each pattern.

    Raises:
        ConfigError: no row was measured.
    """
    rows = [row for row in result.figures["rows"] if "error" not in row]
    if not any("tokens_per_s" in row for row in rows):
        raise ConfigError("no row of this result was measured")
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    colours = _colours(methods)
    figure = Figure(figsize=(1.2 + 4.4 * len(patterns), 7.8), layout="constrained")
    panels = figure.subplots(2, len(patterns), squeeze=False, sharey="row")
    for column, pattern in enumerate(patterns):
        here = [row for row in rows if row["pattern"] == pattern]
        upper, lower = panels[0][column], panels[1][column]
        upper.set_title(spoken_pattern(pattern))
        _bars(upper, here, methods, colours, _rate)
        _bars(lower, here, methods, colours, _memory)
        lower.set_xlabel("batch")
        if gains := _gains(here):
            upper.set_xlabel("batch, and louiskv's rate over arkvale's")
            names = [label.get_text() for label in upper.get_xticklabels()]
            labels = [f"{name}\n{gains[int(name)]:.2f}x" if int(name) in gains else name
                      for name in names]  # fmt: skip
            upper.set_xticks(range(len(names)), labels)
    _scale(panels[0], rows, _rate, "tokens per second")
    _scale(panels[1], rows, _memory, "GPU memory, GiB")
    handles = [panels[0][0].bar(0, 0, color=colours[name], label=name) for name in methods]
    figure.legend(
        handles, methods, frameon=False, loc="outside lower center",
        ncols=_legend_columns(methods, figure.get_figwidth()),
    )  # fmt: skip
    title = device_title(result, "Decoding in the device tier", figure.get_figwidth())
    if any("skipped" in row for row in rows):
        title += "; x: does not fit"
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure


def _legend_columns(names: Sequence[str], inches: float) -> int:
    """As many as fit side by side, four at most; a letter of a legend is a tenth of an inch."""
    widest = 0.1 * max(map(len, names)) + 0.7
    return max(1, min(4, len(names), int(inches / widest)))


def _colours(methods: Sequence[str]) -> dict[str, str]:
    """A colour for each method: its own, or what nobody has where it comes more than once."""
    own = dict(zip(_METHODS, _COLOURS, strict=False))
    found: dict[str, str] = {}
    for name in methods:
        colour = own.get(_policy_name(name))
        if colour is None or colour in found.values():
            used = {*found.values(), *(own.get(_policy_name(other)) for other in methods)}
            free = [one for one in _COLOURS if one not in used]
            colour = free[0] if free else _COLOURS[len(found) % len(_COLOURS)]
        found[name] = colour
    return found


def _policy_name(method: str) -> str:
    """Without budget, options and flags."""
    return re.split("[@:!]", method)[0]


def _gains(rows: Sequence[Row]) -> dict[int, float]:
    """LouisKV's tokens per second over ArkVale's, by batch, where both come once."""
    gains = {}
    for batch in {row["batch"] for row in rows}:
        rates = [
            [rate for row in rows if row["batch"] == batch and _policy_name(row["method"]) == name
             and (rate := _rate(row)) is not None]
            for name in ("louiskv", "arkvale")
        ]  # fmt: skip
        if [len(some) for some in rates] == [1, 1]:
            gains[batch] = rates[0][0] / rates[1][0]
    return gains


def _scale(
    panels: Sequence[Axes], rows: Sequence[Row], value: Callable[[Row], float | None], said: str
) -> None:
    """A log scale where bars differ by much; on it, bars that are nearly alike would not be."""
    values = [number for row in rows if (number := value(row))]
    log = bool(values) and max(values) > _LOG_FROM * min(values)
    for axes in panels:
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,g}"))
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.margins(y=0.16)
    panels[0].set_ylabel(f"{said} (log scale)" if log else said)


def _rate(row: Row) -> float | None:
    value = row.get("tokens_per_s")
    return None if value is None else float(value)


def _memory(row: Row) -> float | None:
    held = row.get("memory", {}).get("held")
    return held / 2**30 if held else None


def _bars(
    axes: Axes,
    rows: Sequence[Row],
    methods: Sequence[str],
    colours: dict[str, str],
    value: Callable[[Row], float | None],
) -> None:
    """Bars of all methods side by side for each batch; a cross where a method did not run."""
    batches = sorted({row["batch"] for row in rows})
    width = _WIDTH / len(methods)
    for number, name in enumerate(methods):
        for row in (row for row in rows if row["method"] == name):
            place = batches.index(row["batch"]) + (number - (len(methods) - 1) / 2) * width
            height = value(row)
            if height is not None:
                axes.bar(place, height, width=0.92 * width, color=colours[name])
                axes.annotate(
                    f"{height:,.0f}" if height >= 100 else f"{height:.3g}", (place, height),
                    xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7.5, color=INK,
                    rotation=90 if len(methods) * len(batches) > 12 else 0, va="bottom",
                )  # fmt: skip
            elif "skipped" in row:
                axes.annotate(
                    "x", (place, 0.015), xycoords=("data", "axes fraction"), ha="center",
                    color=colours[name], fontsize=10, fontweight="bold",
                )  # fmt: skip
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlim(-0.55, len(batches) - 0.45)


def has_device_breakdown(result: Result) -> bool:
    """Whether any row says where a layer's time goes."""
    return any(row.get("breakdown") for row in result.figures["rows"])


def draw_device_breakdown(result: Result) -> Figure:
    """A layer's time in a decode step by its parts, at each pattern's largest common batch.

    Raises:
        ConfigError: no row has a breakdown.
    """
    rows = [row for row in result.figures["rows"] if row.get("breakdown")]
    if not rows:
        raise ConfigError("no row of this result has a breakdown")
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    shown = {pattern: _largest_common(rows, pattern) for pattern in patterns}
    heights = [len(some) for some in shown.values()]
    figure = Figure(figsize=(9.0, 2.0 + 0.44 * sum(heights) + 0.5 * len(heights)),
                    layout="constrained")  # fmt: skip
    panels = figure.subplots(len(patterns), 1, squeeze=False, height_ratios=heights)
    for axes, pattern in zip(panels[:, 0], patterns, strict=True):
        axes.set_title(f"{spoken_pattern(pattern)}, batch {shown[pattern][0]['batch']}")
        _stacked(axes, shown[pattern])
    cut = any(text.get_text().startswith("//") for axes in panels[:, 0] for text in axes.texts)
    panels[-1][0].set_xlabel(
        "device time of one layer in a decode step, us (share of select and gather"
        f"{'; //: cut' if cut else ''})"
    )
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=len(names))
    title = device_title(result, "Where a layer's time goes, launches not counted")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure


def _largest_common(rows: Sequence[Row], pattern: str) -> list[Row]:
    """The rows of the batch that most methods were measured at; among equals the largest."""
    here = [row for row in rows if row["pattern"] == pattern]
    batches = [row["batch"] for row in here]
    batch = max(batches, key=lambda b: (batches.count(b), b))
    return [row for row in here if row["batch"] == batch]


def _stacked(axes: Axes, rows: Sequence[Row]) -> None:
    names = [name for name in rows[0]["breakdown"]["layer_ms"] if name != _LEFT_OUT]
    starts = np.zeros(len(rows))
    for name, colour in zip(names, _PARTS, strict=False):
        widths = np.array([1e3 * row["breakdown"]["layer_ms"][name] for row in rows])
        axes.barh(range(len(rows)), widths, left=starts, height=0.66, color=colour, label=name)
        starts += widths
    limit = 1.12 * max(end for end in starts if end <= _CUT * float(np.median(starts)))
    for place, (row, end) in enumerate(zip(rows, starts, strict=True)):
        cut = "// " if end > limit else ""
        axes.annotate(
            f"{cut}{end:,.0f} us ({row['breakdown']['retrieval_share']:.0%})",
            (min(end, limit), place), xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=9.5, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, limit)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["bottom"].set_color(FAINT)


def spoken_pattern(pattern: str) -> str:
    """ "32,256 in, 16K out" for "32256/16384"."""
    prompt, output = (int(word) for word in pattern.split("/"))
    return f"{short_tokens(prompt)} in, {short_tokens(output)} out"


def device_title(result: Result, what: str, inches: float = 20.0) -> str:
    """What was measured of which model where, and what the selecting queries were.

    Args:
        inches: that a line may have; a letter is a tenth of one.
    """
    settings = result.settings
    layers = f", {settings['layers']} layers" if settings.get("layers") else ""
    where = result.machine.get("gpu") if settings.get("on") == "cuda" else "CPU"
    name = f"{what}: {settings['config']}{layers},"
    between = " " if len(f"{name} {where}") <= 10 * inches else "\n"
    title = (
        f"{name}{between}{where}\n"
        "random weights; queries that select are drawn:\n"
        f"segments of {settings['segment']} steps, cosine {settings['sameness']:g} within"
    )
    if settings.get("stays") is None:
        return title
    turn, step = settings["stays"]
    return f"{title}; selections stated:\n{turn:g} of one stay at a turn, {step:g} at a step"
