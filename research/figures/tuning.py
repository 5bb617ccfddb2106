"""Figures of the tuner: predicted against measured tokens/s, and quality against speed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from penstock.evaluate.figure_style import FAINT, INK, SERIES, model_of, short_tokens
from penstock.evaluate.result import Result
from research.figures.chart import (
    POWERS,
    Axis,
    Chart,
    Mark,
    Panel,
    Row,
    line,
    note,
    required,
    rule,
)
from research.tuning.setting_runs import MOST_WORST_ERROR, errors_of

_MARKERS = "os^D"


# Predictions --------------------------------------------------------------------------------------


def predictions(result: Result) -> Chart:
    """A dot for each configuration, on logarithmic axes, with the diagonal and a band of 25 %.

    Settings that the tuner had run itself are hollow; they do not count in the errors.
    """
    by_device = required(_by_device(result), f"this result of {result.kind} has no rows")
    every = [row for rows in by_device.values() for row in rows]
    values = [row[key] for row in every for key in ("tokens_per_s", "predicted_tokens_per_s")]
    low, high = min(values) / 1.3, max(values) * 1.3
    marks, keys = [_frame(low, high)], []
    for number, (name, rows) in enumerate(by_device.items()):
        colour, marker = SERIES[number % len(SERIES)], _MARKERS[number % len(_MARKERS)]
        keys.append((marker, colour, colour, _label(result, name, rows)))
        for of_tuner in (False, True):
            mine = [row for row in rows if row["of_tuner"] == of_tuner]
            marks.append(line(
                [row["tokens_per_s"] for row in mine],
                [row["predicted_tokens_per_s"] for row in mine], marker=marker, linestyle="",
                color=colour, markersize=5.5, alpha=1.0 if of_tuner else 0.6, zorder=3,
                markerfacecolor="white" if of_tuner else colour,
                markeredgewidth=1.3 if of_tuner else 0.0,
            ))  # fmt: skip
    if any(row["of_tuner"] for row in every):
        keys.append(("o", FAINT, "white", "run by the tuner itself"))
    marks += [line([], [], linestyle="", marker=marker, color=colour, markerfacecolor=inner,
                   markersize=7, label=label) for marker, colour, inner, label in keys]  # fmt: skip
    axis = Axis(log=10, low=low, high=high, form="g", label="measured tokens/s (log scale)")
    panel = Panel(marks=marks, x=axis, y=replace(axis, label="predicted tokens/s (log scale)"),
                  grid="both", legend={"loc": "best", "fontsize": 10})  # fmt: skip

    def few_ticks(figure: Figure) -> None:
        [axes] = figure.axes
        for of in (axes.xaxis, axes.yaxis):
            of.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else
                                            (1, 2, 3, 4, 6, 8)))  # fmt: skip
            of.set_tick_params(which="minor", length=0)
        axes.set_aspect("equal")

    return Chart(title=_prediction_title(result, every), size=(7.2, 7.0), panels=[[panel]],
                 more=few_ticks)  # fmt: skip


def _by_device(result: Result) -> dict[str, list[Row]]:
    """What was predicted and measured; empty devices are left out."""
    if "rows" in result.figures:
        rows: list[Row] = result.figures["rows"]
        names = dict.fromkeys(row["device"] for row in rows)
        return {name: [row for row in rows if row["device"] == name] for name in names}
    devices: dict[str, Row] = result.figures.get("devices", {})
    return {name: device["settings"] for name, device in devices.items() if device["settings"]}


def _frame(low: float, high: float) -> Mark:
    """The diagonal, and the band that the worst error may fill."""
    ends, start = np.array([low, high]), 1.5 * low

    def draw(axes: Axes) -> None:
        axes.fill_between(ends, ends * (1 - MOST_WORST_ERROR), ends * (1 + MOST_WORST_ERROR),
                          color=FAINT, alpha=0.15, linewidth=0, zorder=1)  # fmt: skip
        axes.plot(ends, ends, color=INK, linewidth=1.1, zorder=2)
        note(f"±{MOST_WORST_ERROR:.0%}", (start, start * (1 - MOST_WORST_ERROR)), offset=(6, -3),
             ha="left", va="top", fontsize=9.5, color="#5b616b")(axes)  # fmt: skip

    return draw


def _label(result: Result, name: str, rows: Sequence[Row]) -> str:
    shown = _device(name, result.figures["devices"][name], "this machine's disk")
    errors = errors_of(row for row in rows if not row["of_tuner"])
    if not errors["count"]:
        return shown
    return (f"{shown}: {errors['count']}, error median {errors['median']:.1%}, "
            f"worst {errors['worst']:.1%}")  # fmt: skip


def _device(name: str, device: Row, disk: str) -> str:
    if name == "real":
        return disk
    return str(device["title"]) + (" (simulated)" if name != "memory" else "")


def _prediction_title(result: Result, rows: Sequence[Row]) -> str:
    new, settings = errors_of(row for row in rows if not row["of_tuner"]), result.settings
    batches = settings["batches"] if "batches" in settings else [settings["batch"]]
    contexts = settings["contexts"] if "contexts" in settings else [settings["context"]]
    errors = f": median error {new['median']:.1%}, worst {new['worst']:.1%}" if new["count"] else ""
    return (
        f"Predicted against measured tokens/s{model_of(result)}\n"
        f"batch {', '.join(map(str, batches))}; {', '.join(map(short_tokens, contexts))} tokens; "
        f"memory {settings['memory']}\n"
        f"{new['count']} configurations that the tuner never ran{errors}"
    )


# Quality ------------------------------------------------------------------------------------------

_LEAST_KL = 1e-7
"""Drawn for what is not told from full attention."""
_ROLES = {
    "best": ("*", 17, INK, "best of the sweep"), "pick": ("o", 14, SERIES[1], "the tuner's pick"),
    "paper": ("s", 12, SERIES[3], "the paper's own search"),
}  # fmt: skip
"""Marker, size, colour, and what it is called."""


def quality(result: Result) -> Chart:
    """A panel for each device: KL on held-out text over tokens/s, colours by group size."""
    devices: dict[str, Row] = result.figures.get("devices", {})
    rows = [row for device in devices.values() for row in device["settings"]]
    # Models with random weights are not held to full attention.
    required([row for row in rows if row.get("kl") is not None],
             "this result has no quality: its model has random weights")  # fmt: skip
    groups = sorted({row["group_tokens"] for row in rows})
    shades = colormaps["viridis"](np.linspace(0.0, 0.92, len(groups)))
    colours: dict[int, Any] = dict(zip(groups, map(tuple, shades), strict=True))
    floor, settings = result.figures["floor"], result.settings
    top = 4 * max(floor, *(row["kl"] for row in rows))
    limit = [rule(floor, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1),
             note(f"floor: {floor:g} nats", (0.0, floor), offset=(5, 4), ha="left", color="#5b616b",
                  within=("axes fraction", "data"))]  # fmt: skip
    panels: list[Panel] = []
    for name, device in devices.items():
        share = device["summary"]["share_again"]["pick"]
        again = "" if share is None else f": run again, pick {share:.0%} of best"
        panels.append(Panel(
            title=_device(name, device, "This machine's disk") + again, grid="both",
            marks=_dots(device["settings"], colours) + limit,
            x=Axis(low=0, label="measured tokens/s"),
            y=Axis(log=10, high=top, form=POWERS,
                   label="" if panels else "KL from full attention, nats (log scale)"),
        ))  # fmt: skip
    keys = [Line2D([], [], marker="o", linestyle="none", markersize=6, color=colour,
                   label=f"G={group}") for group, colour in colours.items()]  # fmt: skip
    keys += [Line2D([], [], marker=marker, linestyle="none", markersize=size * 0.7, color=colour,
                    markerfacecolor="none", markeredgewidth=1.8, label=label)
             for marker, size, colour, label in _ROLES.values()]  # fmt: skip
    return Chart(
        title=f"Every setting that fits{model_of(result)}: {settings['batch']} x "
              f"{settings['context']:,} tokens, memory {settings['memory']}\n"
              "quality on documents that nothing was tuned on; to the right is faster, below is "
              "better",
        size=(1.6 + 4.6 * len(panels), 5.6), panels=[panels], share=(False, True), keys=keys,
        legend={"ncols": len(keys), "fontsize": 10},
    )  # fmt: skip


def _dots(rows: Sequence[Row], colours: dict[int, Any]) -> list[Mark]:
    marks = []
    for row in rows:
        place = row["tokens_per_s"], max(row["kl"], _LEAST_KL)
        marks.append(line(*place, marker="o", markersize=5, color=colours[row["group_tokens"]],
                          alpha=0.75, markeredgewidth=0, zorder=2))  # fmt: skip
        for role in row["roles"]:
            marker, size, colour, _ = _ROLES[role]
            marks.append(line(*place, marker=marker, markersize=size, markerfacecolor="none",
                              zorder=4, markeredgecolor=colour, markeredgewidth=1.8))  # fmt: skip
    return marks
