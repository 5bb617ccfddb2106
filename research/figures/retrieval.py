"""Figures of when and of what LouisKV retrieves: score over retrievals, and units by task."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import PercentFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, model_of, short_tokens
from penstock.evaluate.result import Result
from penstock.methods.louiskv.policy import LouisKV
from research.figures.label_places import Box, place_labels
from research.figures.retrieval_points import Panel, Point, panels_of

_LINES = (
    ("tau", "semantic boundaries, by \u03c4", "o"), ("stride", "fixed stride, in steps", "s"),
)  # fmt: skip
_POINTS_OF_AN_INCH = 72
_ALWAYS = (
    ("every", "its units, at every step", "D", SERIES[0]), ("quest", "quest", "^", SERIES[2]),
    ("arkvale", "arkvale", "v", SERIES[3]),
)  # fmt: skip
_UNITS = (
    ("every", "clusters and segments", SERIES[0]), ("pages", "pages, by their means", SERIES[1]),
    ("quest", "quest (pages, by bounds)", SERIES[2]),
    ("arkvale", "arkvale (pages, by volumes)", SERIES[3]),
)  # fmt: skip


def draw_retrievals(result: Result) -> Figure:
    """Mean score over the share of steps that retrieve; a panel for each length and budget.

    Semantic boundaries (by tau) and fixed strides are lines: at the same place on the x axis they
    retrieve equally often.

    Raises:
        ConfigError: nothing can be compared.
    """
    panels = _drawn(result)
    figure = Figure(figsize=(1.2 + 4.7 * len(panels), 5.2), layout="constrained")
    for axes, panel in zip(_row(figure, len(panels)), panels, strict=True):
        _retrievals_panel(axes, panel)
        axes.set_title(_panel_title(panel))
        axes.set_xlabel("steps that retrieve, all layers together")
    figure.axes[0].set_ylabel("score, mean over tasks, %")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, ncols=3, loc="outside lower center", fontsize=10
    )  # fmt: skip
    title = "LouisKV: retrieving at semantic boundaries, at fixed strides, and always"
    _head(figure, panels, title, f"{model_of(result)}; thin bars are 95 % intervals")
    figure.draw_without_rendering()  # the layout is known from here on
    for axes in figure.axes:
        _place_names(axes)
    return figure


def _place_names(axes: Axes) -> None:
    """Put the names of dots where neither dots nor lines are."""
    points = _POINTS_OF_AN_INCH / axes.figure.dpi
    names = [text for text in axes.texts if isinstance(text, Annotation)]
    dots = [tuple(axes.transData.transform(name.xy) * points) for name in names]
    boxes = [name.get_window_extent() for name in names]
    sizes = [(box.width * points, box.height * points) for box in boxes]
    room = axes.get_window_extent()
    inside = Box(room.x0 * points, room.y0 * points, room.x1 * points, room.y1 * points)
    taken = []
    for line in axes.get_lines():
        corners = line.get_transform().transform(line.get_xydata()) * points
        taken += [Box(x - 4.5, y - 4.5, x + 4.5, y + 4.5) for x, y in corners]
        for start, end in pairwise(corners if line.get_linestyle() != "None" else []):
            for x, y in np.linspace(start, end, max(2, int(np.abs(end - start).max() / 3))):
                taken.append(Box(x - 1, y - 1, x + 1, y + 1))
    for name, dot, place in zip(
        names, dots, place_labels(dots, sizes, inside, taken=taken), strict=True
    ):
        name.set_position((place.left - dot[0], place.bottom - dot[1]))


def _retrievals_panel(axes: Axes, panel: Panel) -> None:
    if panel.full is not None:
        axes.axhline(panel.full, color=INK, linewidth=1.1, linestyle="--", label="full attention")
    for number, (family, label, marker) in enumerate(_LINES):
        points = panel.family(family)
        _dots(axes, points, color=SERIES[number], marker=marker, label=label, linestyle="-")
        for point in points:
            name = axes.annotate(
                _name(point), (point.share, point.score.value), fontsize=9, color=SERIES[number],
                xytext=(0, 0), textcoords="offset points", ha="left", va="bottom", zorder=5,
            )  # fmt: skip
            name.set_in_layout(False)
    always = [(name, *rest) for name, *rest in _ALWAYS if panel.family(name)]
    for place, (family, label, marker, colour) in enumerate(always):
        points = panel.family(family)
        _dots(
            axes, points, color=colour, marker=marker, label=label, linestyle="",
            shift=0.025 * (place - (len(always) - 1) / 2),
        )  # fmt: skip
    axes.set_xlim(0, 1.06)
    axes.set_ylim(-9, 110)
    axes.set_yticks(range(0, 101, 20))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(color=GRID, linewidth=0.7)


def _dots(
    axes: Axes, points: Sequence[Point], *, color: str, marker: str, label: str, linestyle: str,
    shift: float = 0.0,
) -> None:  # fmt: skip
    if not points:
        return
    x = [point.share + shift for point in points]
    y = [point.score.value for point in points]
    below = [point.score.value - point.score.low for point in points]
    above = [point.score.high - point.score.value for point in points]
    axes.errorbar(x, y, yerr=[below, above], fmt="none", ecolor=color, alpha=0.4, capsize=2)
    axes.plot(
        x, y, color=color, marker=marker, markersize=6.5, linestyle=linestyle, label=label,
        clip_on=False, zorder=4,
    )  # fmt: skip


def _name(point: Point) -> str:
    assert isinstance(point.policy, LouisKV)
    stride = point.policy.stride
    return f"{point.policy.tau:g}" if stride is None else f"{stride}"


def draw_units(result: Result) -> Figure:
    """Score by task of what can be retrieved at every step: LouisKV's units, and pages.

    Raises:
        ConfigError: nothing can be compared.
    """
    panels = _drawn(result)
    figure = Figure(figsize=(9.5, 0.9 + 3.0 * len(panels)), layout="constrained")
    column = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(column, panels, strict=True):
        shown = [(name, *rest) for name, *rest in _UNITS if panel.family(name)]
        width = 0.8 / max(1, len(shown))
        for place, (family, label, colour) in enumerate(shown):
            point = panel.family(family)[0]
            x = np.arange(len(panel.tasks)) + (place + 0.5) * width - 0.4
            y = [point.by_task[task] for task in panel.tasks]
            axes.bar(x, y, 0.94 * width, color=colour, label=label)
            for at, value in zip(x, y, strict=True):
                axes.annotate(
                    f"{value:.0f}", (at, value), xytext=(0, 2), textcoords="offset points",
                    ha="center", fontsize=9, color=INK if value else FAINT,
                )  # fmt: skip
        names = [task.replace("_", "\n") for task in panel.tasks]
        axes.set_xticks(range(len(panel.tasks)), names, fontsize=9.5)
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 25))
        axes.set_ylabel("score, %")
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.set_title(_panel_title(panel))
    handles, labels = column[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=4, loc="outside lower center", fontsize=10)
    _head(figure, panels, "What is retrieved, when every step retrieves", model_of(result))
    return figure


def _drawn(result: Result) -> list[Panel]:
    panels = panels_of(result)
    if not panels:
        raise ConfigError("no two settings of this result answered the same task")
    return panels


def _row(figure: Figure, count: int) -> list[Axes]:
    return list(figure.subplots(1, count, sharey=True, squeeze=False)[0])


def _panel_title(panel: Panel) -> str:
    rest = "".join(f", {name}={value}" for name, value in panel.rest)
    return f"{panel.budget} of {short_tokens(panel.tokens)} tokens selected{rest}"


def _head(figure: Figure, panels: Sequence[Panel], title: str, more: str) -> None:
    tasks = {task for panel in panels for task in panel.tasks}
    samples = min(panel.samples for panel in panels)
    number = f"{len(tasks)} task{'s' if len(tasks) > 1 else ''} of {samples} samples"
    figure.suptitle(f"{title}\n{number}{more}", fontsize=11, fontweight="bold", x=0.01, ha="left")
