"""A figure said as data, panels of marks on axes, and the one function that draws it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any, TypeVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK
from research.figures.label_places import LEADER, Box, leader_of, place_labels

Row = dict[str, Any]
Look = dict[str, Any]
"""How something looks, in matplotlib's words."""
Mark = Callable[[Axes], object]
"""Draws itself into a panel; what has a `label` comes into the legend, once."""
Found = TypeVar("Found")

PERCENT, POWERS = "percent", "powers"
"""Forms of numbers: shares, and powers of ten."""
_POINTS = 72
"""Of an inch."""


def required(found: Found | None, why: str) -> Found:
    """What was measured.

    Raises:
        ConfigError: there is nothing.
    """
    if not found:
        raise ConfigError(why)
    return found


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a panel.

    Attributes:
        label: what it measures.
        log: base of a logarithmic scale; 0 for a linear one.
        low, high: its ends, where the marks do not say; a `high` below `low` turns it round.
        room: how much longer it is than the marks take, for what stands above them.
        ticks: where ticks stand; without, at 0, 1, 2, ... where there are `names`.
        names: what stands at the ticks.
        form: of the numbers: `PERCENT`, `POWERS`, or as in `format`.
        whole: ticks are whole numbers.
        fine: a logarithmic axis has ticks at 1, 2 and 5.
        margin: left free, as a share.
        size: of the names, in points.
        bare: no tick marks.
    """

    label: str = ""
    log: int = 0
    low: float | None = None
    high: float | None = None
    room: float = 1.0
    ticks: Sequence[float] | None = None
    names: Sequence[str] | None = None
    form: str = ""
    whole: bool = False
    fine: bool = False
    margin: float | None = None
    size: float | None = None
    bare: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes and what is on it.

    Attributes:
        grid: of which axis lines are drawn: "x", "y", "both" or "".
        legend: look of a legend of its own, where it has one.
        named: texts beside dots, which are moved where nothing lies under them.
        pad: above the title's foot, in points.
        wide: takes the whole row.
        frame: all four sides have a line, in this colour; "none" for none at all.
    """

    marks: Sequence[Mark]
    title: str = ""
    x: Axis = Axis()
    y: Axis = Axis()
    grid: str = "y"
    legend: Look | None = None
    named: "Sequence[Name]" = ()
    pad: float | None = None
    wide: bool = False
    frame: str | None = None


@dataclass(frozen=True, kw_only=True)
class Name:
    """A text that belongs to a dot.

    Attributes:
        leader: a line joins it with its dot, where it is far.
    """

    text: str
    x: float
    y: float
    look: Look = field(default_factory=dict)
    leader: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure: panels in rows.

    Attributes:
        size: width and height, in inches.
        panels: by row; the last row may be shorter.
        share: whether panels have the x axis, and the y axis, alike: all of them, those of a "row"
            or of a "col".
        legend: look of a legend of all panels, below them.
        keys: what the legend has besides the marks.
        xlabel, ylabel: of all panels together.
        look: of the title.
        more: adds to the figure before its layout is known.
        finish: adds to it when its layout is known.
    """

    title: str
    size: tuple[float, float]
    panels: Sequence[Sequence[Panel]]
    share: tuple[bool | str, bool | str] = (False, False)
    widths: Sequence[float] | None = None
    heights: Sequence[float] | None = None
    legend: Look | None = None
    keys: Sequence[Artist] = ()
    xlabel: str = ""
    ylabel: str = ""
    look: Look = field(default_factory=dict)
    more: Callable[[Figure], None] | None = None
    finish: Callable[[Figure], None] | None = None


# Marks --------------------------------------------------------------------------------------------


def line(x: Any, y: Any, **look: Any) -> Mark:
    """A line or dots; `look` as of `Axes.plot`."""
    return lambda axes: axes.plot(x, y, **look)


def intervals(
    x: Any, y: Any, *, below: Any = None, above: Any = None, left: Any = None, right: Any = None,
    **look: Any,
) -> Mark:  # fmt: skip
    """Dots with their intervals, up and down by `below` and `above`, or to `left` and `right`."""
    yerr = None if below is None else [below, above]
    xerr = None if left is None else [left, right]
    return lambda axes: axes.errorbar(x, y, yerr=yerr, xerr=xerr, **look)


def bars(
    at: Any, sizes: Any, *, texts: Sequence[str] = (), text: Look | None = None,
    inside: bool = False, flat: bool = False, base: Any = None, ends: Any = None,
    width: float = 0.8, **look: Any,
) -> Mark:  # fmt: skip
    """Bars, and what is written at their ends.

    Args:
        at: places along the axis.
        texts: one for each bar, or none; `text` is their look.
        inside: the texts stand in the bars' middles.
        flat: the bars lie, from left to right.
        base: where they begin, if not at zero.
        ends: where the texts stand, if not at the bars' ends.
    """
    at, sizes = np.atleast_1d(at), np.atleast_1d(np.asarray(sizes, dtype=float))
    starts = np.zeros(len(at)) if base is None else np.broadcast_to(base, at.shape)
    stops = starts + sizes if ends is None else np.atleast_1d(ends)
    spots = starts + sizes / 2 if inside else stops

    def draw(axes: Axes) -> None:
        if flat:
            axes.barh(at, sizes, left=starts, height=width, **look)
        else:
            axes.bar(at, sizes, bottom=starts, width=width, **look)
        for place, spot, said in zip(at, spots, texts, strict=False):
            xy = (spot, place) if flat else (place, spot)
            note(said, xy, **{**_beside(flat, inside), **(text or {})})(axes)

    return draw


def _beside(flat: bool, inside: bool) -> Look:
    """Where a bar's text stands."""
    if inside:
        return {"offset": (0, 0), "ha": "center", "va": "center"}
    return {"offset": (5, 0), "ha": "left", "va": "center"} if flat else {"offset": (0, 3)}


def stacked(
    parts: Iterable[tuple[str, Any, str]], *, flat: bool = True, width: float = 0.66, **look: Any
) -> list[Mark]:
    """Bars of several parts, one after the other at 0, 1, 2, ...

    Args:
        parts: label, sizes [bars] and colour of each.
    """
    found: list[Mark] = []
    under: Any = 0.0
    for label, sizes, colour in parts:
        sizes = np.asarray(sizes, dtype=float)
        found.append(bars(np.arange(len(sizes)), sizes, base=under, flat=flat, width=width,
                          color=colour, label=label, **look))  # fmt: skip
        under = under + sizes
    return found


def note(
    text: str, at: tuple[float, float], *, offset: tuple[float, float] = (0, 0),
    within: Any = "data", **look: Any,
) -> Mark:  # fmt: skip
    """A text, so many points from a place.

    Args:
        within: what the place's numbers are of, as matplotlib's `xycoords`.
    """
    look = {"ha": "center", "fontsize": 9, "color": INK, **look}
    return lambda axes: axes.annotate(
        text, at, xytext=offset, xycoords=within, textcoords="offset points", **look
    )


def rule(at: float, *, across: bool = True, **look: Any) -> Mark:
    """A line from side to side, or from bottom to top."""
    look = {"color": FAINT, "linewidth": 1.0, **look}
    return lambda axes: (axes.axhline if across else axes.axvline)(at, **look)


def band(low: float, high: float, *, across: bool = True, **look: Any) -> Mark:
    """A stripe from side to side, or from bottom to top."""
    look = {"color": GRID, "linewidth": 0, **look}
    return lambda axes: (axes.axhspan if across else axes.axvspan)(low, high, **look)


def dash(place: float, height: float, half: float, **look: Any) -> Mark:
    """A short line across a bar: what it is to be compared with."""
    look = {"color": INK, "linewidth": 1.6, "linestyle": "--", **look}
    return line([place - half, place + half], [height, height], **look)


def downwards(names: Sequence[str], **more: Any) -> Axis:
    """The axis of lying bars, the first at the top."""
    return Axis(names=names, low=len(names) - 0.4, high=-0.6, **more)


def grouped(
    heights: Sequence[Sequence[float | None]], labels: Sequence[str], colours: Sequence[str], *,
    texts: Sequence[Sequence[str]] = (), width: float = 0.8, fill: float = 0.92, **look: Any,
) -> list[Mark]:  # fmt: skip
    """Bars side by side in groups at 0, 1, 2, ...

    Args:
        heights: None where there is no bar. [series][groups]
        labels, colours: of the series.
        texts: at their ends. [series][groups]
        width: of a group.
        fill: a bar's share of its place.
    """
    marks, step = [], width / max(1, len(heights))
    for number, (mine, label, colour) in enumerate(zip(heights, labels, colours, strict=True)):
        there = [group for group, height in enumerate(mine) if height is not None]
        at = [group + alternating(len(heights), number, step) for group in there]
        said = [texts[number][group] for group in there] if texts else ()
        marks.append(bars(at, [mine[group] for group in there], texts=said, width=fill * step,
                          label=label, color=colour, **look))  # fmt: skip
    return marks


def curves(
    rows: Sequence[Row], by: str, x: str, y: str, looks: Callable[[Any], Look]
) -> list[Mark]:
    """A line for each value of a field, over another field.

    Args:
        looks: how the line of a value looks.
    """
    marks = []
    for value in dict.fromkeys(row[by] for row in rows):
        points = sorted((row[x], row[y]) for row in rows if row[by] == value)
        marks.append(line(*zip(*points, strict=True), **{"marker": "o", **looks(value)}))
    return marks


def alternating(count: int, number: int, width: float) -> float:
    """How far from a group's middle its bar of a number stands, of `count` in all."""
    return (number - (count - 1) / 2) * width


# Drawing ------------------------------------------------------------------------------------------


def draw(chart: Chart) -> Figure:
    """Draw a figure."""
    figure = Figure(figsize=chart.size, layout="constrained")
    columns = max(map(len, chart.panels))
    sharex, sharey = chart.share
    subplots: Any = figure.subplots
    grid = subplots(
        len(chart.panels), columns, squeeze=False, sharex=sharex, sharey=sharey,
        width_ratios=chart.widths, height_ratios=chart.heights,
    )  # fmt: skip
    drawn: list[tuple[Axes, Panel]] = []
    for place, (spots, panels) in enumerate(zip(grid, chart.panels, strict=True)):
        if panels[0].wide:
            whole = spots[0].get_gridspec()[place, :]
            for spot in spots:
                spot.remove()
            spots = [figure.add_subplot(whole)]
        for axes, panel in zip_longest(spots, panels):
            if panel is None:
                axes.axis("off")
                continue
            _draw_panel(axes, panel)
            drawn.append((axes, panel))
    if chart.xlabel:
        figure.supxlabel(chart.xlabel, fontsize=11)
    if chart.ylabel:
        figure.supylabel(chart.ylabel, fontsize=11)
    figure.suptitle(chart.title, **{"fontsize": 12, "x": 0.01, "ha": "left", **chart.look})
    if chart.legend is not None:
        handles = {str(key.get_label()): key for key in chart.keys}
        handles |= _handles([axes for axes, _ in drawn])
        figure.legend(list(handles.values()), list(handles),
                      **{"frameon": False, "loc": "outside lower center", **chart.legend}
        )  # fmt: skip
    if chart.more:
        chart.more(figure)
    if chart.finish or any(panel.named for _, panel in drawn):
        figure.draw_without_rendering()  # the layout is known from here on
        figure.set_layout_engine("none")
        for axes, panel in drawn:
            _move_apart(axes, panel.named)
        if chart.finish:
            chart.finish(figure)
    return figure


def _handles(panels: Iterable[Axes]) -> dict[str, Any]:
    """What a legend has, by label."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for mark in panel.marks:
        mark(axes)
    for which, axis in (("x", panel.x), ("y", panel.y)):
        _scale(axes, which, axis)
    if panel.grid:
        axes.grid(axis=panel.grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    if panel.title:
        axes.set_title(panel.title, pad=panel.pad)
    if panel.frame is not None:
        for spine in axes.spines.values():
            spine.set_visible(panel.frame != "none")
            spine.set_color(panel.frame)
    if panel.legend is not None:
        own = _handles([axes])
        axes.legend(list(own.values()), list(own),
                    **{"frameon": False, "fontsize": 9.5, **panel.legend})  # fmt: skip


def _scale(axes: Axes, which: str, axis: Axis) -> None:
    """Scale, ends, ticks and label of one axis."""
    its: Any = getattr(axes, f"{which}axis")
    limits: Any = getattr(axes, f"set_{which}lim")
    if axis.log:
        getattr(axes, f"set_{which}scale")("log", base=axis.log)
        if axis.fine:
            its.set_major_locator(LogLocator(subs=(1, 2, 5)))
        its.set_minor_formatter(NullFormatter())
    if axis.margin is not None:
        axes.margins(**{which: axis.margin})  # type: ignore[arg-type]
    names = axis.names
    ticks = range(len(names)) if axis.ticks is None and names is not None else axis.ticks
    if ticks is not None:
        getattr(axes, f"set_{which}ticks")(ticks, names)
        if axis.log:
            its.set_minor_locator(NullLocator())
    if axis.whole:
        its.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    if axis.form == PERCENT:
        its.set_major_formatter(PercentFormatter(1.0, decimals=0))
    elif names is None and axis.form != POWERS and (axis.form or axis.log):
        form = axis.form or ",g"
        its.set_major_formatter(FuncFormatter(lambda value, _: format(value, form)))
    if axis.low is not None or axis.high is not None:
        limits(axis.low, axis.high)
    if axis.room != 1.0:
        limits(None, axis.room * limits()[1])
    if axis.size is not None:
        axes.tick_params(axis=which, labelsize=axis.size)  # type: ignore[arg-type]
    if axis.bare:
        axes.tick_params(axis=which, which="both", length=0)  # type: ignore[arg-type]
    if axis.label:
        getattr(axes, f"set_{which}label")(axis.label)


def _move_apart(axes: Axes, names: Sequence[Name]) -> None:
    """Write every name where neither dots nor lines nor other texts are."""
    points = _POINTS / axes.figure.dpi  # of a pixel
    others = [text.get_window_extent() for text in axes.texts]
    texts: list[Annotation] = []
    for name in names:
        text = axes.annotate(
            name.text, (name.x, name.y), xytext=(0, 0), textcoords="offset points", zorder=5,
            **{"ha": "left", "va": "bottom", "annotation_clip": False, "fontsize": 9, **name.look},
        )  # fmt: skip
        text.set_in_layout(False)
        texts.append(text)
    dots = [tuple(axes.transData.transform(text.xy) * points) for text in texts]
    sizes = [(box.width * points, box.height * points)
             for box in (text.get_window_extent() for text in texts)]  # fmt: skip
    taken = [_box(box, points) for box in others] + _covered(axes, points)
    room = _box(axes.get_window_extent(), points)
    places = place_labels(dots, sizes, room, taken=taken) if dots else []
    for name, text, dot, place in zip(names, texts, dots, places, strict=True):
        text.set_position((place.left - dot[0], place.bottom - dot[1]))
        across, up = leader_of(dot, place)
        if name.leader and np.hypot(across, up) > LEADER:
            axes.annotate(
                "", text.xy, xytext=(across, up), textcoords="offset points",
                annotation_clip=False, zorder=2,
                arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.8, "shrinkB": 4},
            )  # fmt: skip


def _box(extent: Any, points: float) -> Box:
    return Box(*(points * side for side in (extent.x0, extent.y0, extent.x1, extent.y1)))


def _covered(axes: Axes, points: float) -> list[Box]:
    """What lines and their markers cover, as small rectangles."""
    boxes = []
    for one in axes.get_lines():
        corners = one.get_transform().transform(one.get_xydata()) * points
        if one.get_marker() not in ("None", None, ""):
            boxes += [Box(x - 4.5, y - 4.5, x + 4.5, y + 4.5) for x, y in corners]
        if one.get_linestyle() == "None":
            continue
        if one.get_drawstyle() == "steps-post":
            turns = np.stack([corners[1:, 0], corners[:-1, 1]], axis=1)
            corners = np.insert(corners, range(1, len(corners)), turns, axis=0)
        for start, end in pairwise(corners):
            for x, y in np.linspace(start, end, max(2, int(np.abs(end - start).max() / 3))):
                boxes.append(Box(x - 1, y - 1, x + 1, y + 1))
    return boxes
