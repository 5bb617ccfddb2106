"""Figure of `tuning.predict` and `tuning.sweep`: predicted against measured tokens/s."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, model_of, short_tokens
from penstock.evaluate.result import Result
from research.tuning.summary import MOST_WORST_ERROR, errors_of

Row = dict[str, Any]
_MARKS = "os^D"


def rows_by_device(result: Result) -> dict[str, list[Row]]:
    """What was predicted and measured; empty devices are left out."""
    if "rows" in result.figures:
        rows: list[Row] = result.figures["rows"]
        names = dict.fromkeys(row["device"] for row in rows)
        return {name: [row for row in rows if row["device"] == name] for name in names}
    devices: dict[str, Row] = result.figures.get("devices", {})
    return {name: device["settings"] for name, device in devices.items() if device["settings"]}


def draw_predictions(result: Result) -> Figure:
    """A dot for each configuration, on logarithmic axes, with the diagonal and a band of 25 %.

    Settings that the tuner had run itself are hollow; they do not count in the errors.

    Raises:
        ConfigError: nothing was measured.
    """
    by_device = rows_by_device(result)
    if not by_device:
        raise ConfigError(f"this result of {result.kind} has no rows")
    figure = Figure(figsize=(7.2, 7.0), layout="constrained")
    axes = figure.subplots()
    handles = []
    for number, (name, rows) in enumerate(by_device.items()):
        colour, mark = SERIES[number % len(SERIES)], _MARKS[number % len(_MARKS)]
        _dots(axes, rows, colour, mark)
        handles.append(
            Line2D([], [], marker=mark, color=colour, linestyle="none", markersize=7,
                   label=_label(result, name, rows))
        )  # fmt: skip
    values = [
        row[key] for rows in by_device.values() for row in rows
        for key in ("tokens_per_s", "predicted_tokens_per_s")
    ]  # fmt: skip
    _frame(axes, min(values) / 1.3, max(values) * 1.3)
    if any(row["of_tuner"] for rows in by_device.values() for row in rows):
        handles.append(
            Line2D([], [], marker="o", color=FAINT, markerfacecolor="white", linestyle="none",
                   markersize=7, label="run by the tuner itself")
        )  # fmt: skip
    axes.legend(handles=handles, frameon=False, loc="best", fontsize=10)
    figure.suptitle(_title(result, by_device), fontsize=12, x=0.01, ha="left")
    return figure


def _dots(axes: Axes, rows: Sequence[Row], colour: str, mark: str) -> None:
    for of_tuner in (False, True):
        mine = [row for row in rows if row["of_tuner"] == of_tuner]
        axes.plot(
            [row["tokens_per_s"] for row in mine], [row["predicted_tokens_per_s"] for row in mine],
            mark, color=colour, markersize=5.5, alpha=1.0 if of_tuner else 0.6, zorder=3,
            markerfacecolor="white" if of_tuner else colour,
            markeredgewidth=1.3 if of_tuner else 0.0,
        )  # fmt: skip


def _frame(axes: Axes, low: float, high: float) -> None:
    """Equal logarithmic axes, the diagonal, and the band that the worst error may fill."""
    ends = np.array([low, high])
    axes.fill_between(
        ends, ends * (1 - MOST_WORST_ERROR), ends * (1 + MOST_WORST_ERROR), color=FAINT,
        alpha=0.15, linewidth=0, zorder=1,
    )  # fmt: skip
    axes.plot(ends, ends, color=INK, linewidth=1.1, zorder=2)
    start = 1.5 * low
    axes.annotate(
        f"±{MOST_WORST_ERROR:.0%}", (start, start * (1 - MOST_WORST_ERROR)), fontsize=9.5,
        xytext=(6, -3), textcoords="offset points", va="top", color="#5b616b",
    )  # fmt: skip
    for axis, scale, limit in (
        (axes.xaxis, axes.set_xscale, axes.set_xlim), (axes.yaxis, axes.set_yscale, axes.set_ylim)
    ):  # fmt: skip
        scale("log")
        limit(low, high)
        axis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 2, 3, 4, 6, 8))
        )
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
        axis.set_tick_params(which="minor", length=0)
    axes.set_aspect("equal")
    axes.set_xlabel("measured tokens/s (log scale)")
    axes.set_ylabel("predicted tokens/s (log scale)")
    axes.grid(color=GRID, linewidth=0.8)


def _label(result: Result, name: str, rows: Sequence[Row]) -> str:
    title = result.figures["devices"][name]["title"]
    shown = "this machine's disk" if name == "real" else title
    shown += " (simulated)" if name not in ("real", "memory") else ""
    errors = errors_of(row for row in rows if not row["of_tuner"])
    if not errors["count"]:
        return shown
    return (
        f"{shown}: {errors['count']}, error median {errors['median']:.1%}, "
        f"worst {errors['worst']:.1%}"
    )


def _title(result: Result, by_device: dict[str, list[Row]]) -> str:
    new = errors_of(row for rows in by_device.values() for row in rows if not row["of_tuner"])
    settings = result.settings
    batches = settings["batches"] if "batches" in settings else [settings["batch"]]
    contexts = settings["contexts"] if "contexts" in settings else [settings["context"]]
    batch = ", ".join(str(count) for count in batches)
    context = ", ".join(short_tokens(tokens) for tokens in contexts)
    errors = f": median error {new['median']:.1%}, worst {new['worst']:.1%}" if new["count"] else ""
    return (
        f"Predicted against measured tokens/s{model_of(result)}\n"
        f"batch {batch}; {context} tokens; memory {settings['memory']}\n"
        f"{new['count']} configurations that the tuner never ran{errors}"
    )
