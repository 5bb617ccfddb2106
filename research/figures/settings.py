"""Figures of KVSwap's settings: tokens/s over the batch (A), at the best batch (B), by parts."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from penstock.evaluate.figure_style import FAINT, short_tokens
from penstock.evaluate.result import Result
from research.figures.chart import (
    Axis,
    Chart,
    Mark,
    Panel,
    Row,
    alternating,
    bars,
    downwards,
    line,
    note,
    required,
    stacked,
)
from research.figures.label_places import spread
from research.settings.rows import (
    SettingRow,
    budget_words,
    budgets_of,
    colours_of,
    device_title,
    is_ours,
    names_of,
    setting_rows,
    short_number,
    title_lines,
)

_MARKERS = "osv^DPXphd<>"
_LETTER = 6.2
"""Width of a letter in the names at the ends of the lines, in points."""
_LINE_GAP = 12.5
"""Between the names of two lines, in points."""
_OURS = ("#0b6e99", "#56a8cc", "#a9d3e6")
_OTHERS = ("#7d8792", "#b3bac3", "#d9dde2")
"""By budget, the largest first."""


def throughput(result: Result) -> Chart:
    """Whole-model throughput of either setting, a panel for each device and context."""
    every = setting_rows(result)
    rows = required([row for row in every if row["rate"]], "no row of this result was measured")
    if result.settings.get("setting") == "B":
        return _best_case(result, every, rows)
    contexts = sorted({row["context"] for row in rows})
    names = names_of(every)
    wide = 10.2 if len(contexts) > 1 else 7.6
    letters = _LETTER / 72 * (max(map(len, names)) + 6)
    share = min(0.6, letters / ((wide - 0.8) / len(contexts)))
    batches = sorted({row["batch"] for row in rows})
    axis = Axis(
        names=[str(batch) for batch in batches],
        low=-0.25,
        high=-0.25 + (len(batches) - 0.5) / (1 - share),
    )  # room for the names
    panels = [
        [Panel(title=_spot(device, context), marks=_lines(here, names, batches), x=axis,
               y=Axis(log=10, margin=0.13))
         for context in contexts for here in [_at(rows, device, context)]]
        for device in dict.fromkeys(row["device"] for row in rows)
    ]  # fmt: skip
    lines = title_lines(result, every)
    if any(row["is_predicted"] for row in rows):
        lines.append("hollow: not run, predicted from what would be read")
    return Chart(
        title="\n".join(lines), size=(wide, 1.3 + 3.4 * len(panels)), panels=panels,
        share=(True, True), xlabel="batch", finish=_name_lines,
        ylabel="tokens per second, whole model (log scale)",
    )  # fmt: skip


def _spot(device: str, context: int) -> str:
    return f"{device_title(device)}, {short_tokens(context)} tokens"


def _at(rows: Sequence[SettingRow], device: str, context: int) -> list[SettingRow]:
    return [row for row in rows if (row["device"], row["context"]) == (device, context)]


def _lines(rows: Sequence[SettingRow], names: Sequence[str], batches: Sequence[int]) -> list[Mark]:
    colours, marks = colours_of(names), []
    for number, name in enumerate(names):
        mine = sorted((row for row in rows if row["name"] == name), key=lambda row: row["batch"])
        if not mine:
            continue
        first = number == 0 and is_ours(name)
        marker = _MARKERS[number % len(_MARKERS)]
        marks.append(line(
            [batches.index(row["batch"]) for row in mine], [row["rate"] for row in mine],
            color=colours[name], marker=marker, linewidth=2.8 if first else 1.5, label=name,
            markersize=7 if first else 5.5, markeredgecolor="white", markeredgewidth=0.7,
            zorder=3 if first else 2,
        ))  # fmt: skip
        hollow = [(batches.index(row["batch"]), row["rate"]) for row in mine if row["is_predicted"]]
        marks.append(_rings(hollow, marker, colours[name]))
    return marks


def _rings(spots: Sequence[tuple[float, float]], marker: str, colour: str) -> Mark:
    x, y = zip(*spots, strict=True) if spots else ((), ())
    return lambda axes: (
        spots
        and axes.scatter(x, y, s=32, marker=marker, facecolor="white", edgecolor=colour, zorder=4)
    )


def _name_lines(figure: Figure) -> None:
    """Write every line's name to the right of the lines, at about the height of its end."""
    for axes in figure.axes:
        if lines := axes.get_lines():
            _names_at_ends(axes, lines)


def _names_at_ends(axes: Axes, lines: Sequence[Line2D]) -> None:
    ends = [np.asarray(line.get_xydata())[-1:] for line in lines]
    heights = [float(axes.transData.transform(end)[0, 1]) for end in ends]
    gap = _LINE_GAP * axes.figure.dpi / 72
    low, high = axes.get_window_extent().y0 + gap / 2, axes.get_window_extent().y1 - gap / 2
    beyond = float(max(axes.get_xticks())) + 0.07 * (axes.get_xlim()[1] + 0.25)
    to_data = axes.transData.inverted()
    for one, end, place in zip(lines, ends, spread(heights, gap, low, high), strict=True):
        name = str(one.get_label())
        axes.annotate(
            name, tuple(end[0]), xytext=(beyond, to_data.transform([[0.0, place]])[0, 1]),
            textcoords="data", va="center", color=one.get_color(), annotation_clip=False,
            fontsize=10 if is_ours(name) else 9.5,
            fontweight="bold" if is_ours(name) else "normal",
            arrowprops={"arrowstyle": "-", "color": one.get_color(), "linewidth": 0.7,
                        "alpha": 0.6, "shrinkA": 0, "shrinkB": 5, "relpos": (0.0, 0.5)},
        )  # fmt: skip


def _best_case(result: Result, every: list[SettingRow], rows: list[SettingRow]) -> Chart:
    """A bar for each method and budget, and on each the largest batch that the budget allows."""
    contexts = sorted({row["context"] for row in rows})
    budgets = list(dict.fromkeys(row["budget"] for row in every))
    names = names_of(sorted(every, key=lambda row: -(row["rate"] or 0.0)))
    devices = list(dict.fromkeys(row["device"] for row in rows))
    panels = []
    for device in devices:
        most = max(row["rate"] for row in rows if row["device"] == device)
        label = "tokens per second, whole model" if device == devices[-1] else ""
        panels.append([
            Panel(title=_spot(device, context), grid="x", y=downwards(names),
                  marks=_best_bars(_at(every, device, context), names, budgets),
                  x=Axis(low=0, high=1.4 * most, label=label))
            for context in contexts
        ])  # fmt: skip
    lines = [*title_lines(result, every), "b: the largest batch that the budget allows"]
    if any(row["is_predicted"] for row in rows):
        lines[-1] += "; about: not run, predicted from what would be read"
    keys = [Patch(color=_OTHERS[number % len(_OTHERS)], label=budget_words(budget))
            for number, budget in enumerate(budgets)]  # fmt: skip
    high = 0.9 + (0.12 + 0.22 * len(budgets)) * len(names)
    return Chart(
        title="\n".join(lines), size=(10.2, 1.3 + high * len(devices)), panels=panels,
        share=("row", True), keys=keys, legend={"ncols": 3} if len(budgets) > 1 else None,
    )  # fmt: skip


def _best_bars(
    rows: Sequence[SettingRow], names: Sequence[str], budgets: Sequence[str]
) -> list[Mark]:
    width, marks = 0.84 / len(budgets), []
    for number, budget in enumerate(budgets):
        for name_place, name in enumerate(names):
            place = name_place + alternating(len(budgets), number, width)
            mine = [row for row in rows if (row["name"], row["budget"]) == (name, budget)]
            known = [row for row in mine if row["rate"]]
            if not known:
                marks.append(note("does not fit" if mine else "not run", (0, place), offset=(5, 0),
                                  ha="left", va="center", color=FAINT))  # fmt: skip
                continue
            row = max(known, key=lambda row: int(row["batch"]))
            about = "about " if row["is_predicted"] else ""
            shades = _OURS if is_ours(name) else _OTHERS
            marks.append(bars(
                place, row["rate"], flat=True, width=0.92 * width, linewidth=0, edgecolor="white",
                color=shades[number % len(shades)], hatch="////" if row["is_predicted"] else None,
                texts=[f"{about}{short_number(row['rate'])}  (b = {row['batch']})"],
                text={"color": "black", "fontweight": "bold" if is_ours(name) else "normal"},
            ))  # fmt: skip
    return marks


# By parts -----------------------------------------------------------------------------------------

_PARTS = ("#c96a2b", "#e3b34c", "#9db6c4", "#7fae73", "#a68bc2", "#c98a9d")
_CUT = 3.0
"""Bars longer than this many times the median one are cut, a little beyond the next."""


def breakdown(result: Result) -> Chart:
    """Latency of one block in setting A by its parts, stacked bars, the slowest method first.

    Of the device, context and batch that most methods have been measured at; among equals of the
    first device, then the longest context and the largest batch. In setting B batches differ.
    """
    rows = [row for row in setting_rows(result) if row.get("breakdown_ms")]
    required(
        rows and result.settings.get("setting") != "B", "no row of this result has a breakdown"
    )
    devices = list(dict.fromkeys(row["device"] for row in rows))
    spots = [(row["device"], row["context"], row["batch"]) for row in rows]
    spot = max(spots, key=lambda s: (spots.count(s), -devices.index(s[0]), s[1], s[2]))
    shown = [row for row, own in zip(rows, spots, strict=True) if own == spot]
    shown.sort(key=lambda row: -sum(row["breakdown_ms"].values()))
    totals = [sum(row["breakdown_ms"].values()) for row in shown]
    whole = [total for total in totals if total <= _CUT * float(np.median(totals))]
    limit = max(totals) if len(whole) == len(totals) else 1.35 * max(whole)
    device, context, batch = spot
    panel = Panel(
        marks=_breakdown_marks(shown, totals, limit), grid="x", x=Axis(low=0, high=limit,
        label="time in one transformer block at one decode step, ms (//: the bar goes on)"),
        y=downwards([row["name"] for row in shown]),
    )  # fmt: skip
    return Chart(
        title=f"Where the time goes: {device_title(device)}, {context:,} tokens, batch {batch}\n"
              f"{result.settings['config']}, KV budget {budgets_of(shown)}",
        look={"fontweight": "bold"}, size=(8.6, 1.9 + 0.42 * len(shown)), panels=[[panel]],
        legend={"ncols": len(_PARTS)}, more=_embolden,
    )  # fmt: skip


def _embolden(figure: Figure) -> None:
    for label in figure.axes[0].get_yticklabels():
        label.set_fontweight("bold" if is_ours(label.get_text()) else "normal")


def _breakdown_marks(rows: Sequence[Row], totals: Sequence[float], limit: float) -> list[Mark]:
    fullest = sorted((row["breakdown_ms"] for row in rows), key=len, reverse=True)
    names = list(dict.fromkeys(name for parts in fullest for name in parts))
    sizes = [[row["breakdown_ms"].get(name, 0.0) for row in rows] for name in names]
    marks = stacked(zip(names, sizes, _PARTS, strict=False))
    starts = np.cumsum([[0.0] * len(rows), *sizes], axis=0)
    for start, some in zip(starts, sizes, strict=False):
        for place, (begin, size) in enumerate(zip(start, some, strict=True)):
            seen = min(begin + size, limit) - begin
            if seen > 0.07 * limit:
                marks.append(note(short_number(size), (begin + seen / 2, place), va="center",
                                  fontsize=9.5, color="black"))  # fmt: skip
    for place, total in enumerate(totals):
        if total > limit * 1.001:
            marks.append(_cut_sign(0.975 * limit, place))
        marks.append(note(f"{short_number(total)} ms", (min(total, limit), place), offset=(5, 0),
                          ha="left", va="center", fontsize=9.5, color="black",
                          annotation_clip=False))  # fmt: skip
    return marks


def _cut_sign(x: float, place: int) -> Mark:
    return lambda axes: axes.text(x, place, "//", ha="center", va="center", fontsize=14,
                                  color="white", fontweight="bold")  # fmt: skip
