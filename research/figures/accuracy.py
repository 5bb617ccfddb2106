"""Figures of the accuracy benchmark for a few settings: loss over budget, and score by task."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import GRID, INK, SERIES, model_of, short_setting
from penstock.evaluate.result import Result
from research.figures.result_lengths import by_length

_LEGEND_COLUMNS = 4


def draw_accuracy(results: Sequence[Result]) -> Figure:
    """Points lost to full attention over the budget, a line for each prompt length.

    Raises:
        ConfigError: no result has a loss at a budget.
    """
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    ticks: dict[float, str] = {}
    single = [one for result in results for one in by_length(result)]
    for i, result in enumerate(sorted(single, key=lambda r: int(r.settings["tokens"]))):
        points = budget_points(result)
        if not points:
            continue
        shares = [share for share, _, _, _ in points]
        axes.errorbar(
            shares, [loss for _, loss, _, _ in points],
            yerr=[error for _, _, error, _ in points], marker="o", markersize=6, capsize=3,
            color=SERIES[i % len(SERIES)], label=_label(result),
        )  # fmt: skip
        ticks |= {share: name for share, _, _, name in points}
    if not ticks:
        raise ConfigError("no result has kvswap at a budget beside full attention")
    axes.axhline(0, color=INK, linewidth=0.9)
    axes.annotate(
        "full attention", (1.0, 0), xytext=(0, 5), textcoords="offset points", ha="right",
        xycoords=("axes fraction", "data"), fontsize=9,
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), [f"1/{1 / share:.0f}" for share in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlim(max(ticks) * 1.25, min(ticks) / 1.25)
    low, high = axes.get_ylim()
    axes.set_ylim(max(high, 5.0), min(low, -0.8))
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_xlabel("KV memory as a share of the full cache (less memory to the right)")
    axes.set_ylabel("points lost")
    axes.set_title("What a memory budget costs: KVSwap, mean over the tasks")
    axes.legend(frameon=False, loc="lower left")
    return figure


def budget_points(result: Result) -> list[tuple[float, float, float, str]]:
    """Budget share, loss, its error and name of the plain kvswap settings, largest budget first."""
    points = []
    for summary in result.figures["summary"]:
        name = summary["setting"]
        policy, _, budget = name.partition("@")
        top, slash, bottom = budget.partition("/")
        if policy != "kvswap" or not slash or not bottom.isdigit() or summary["loss"] is None:
            continue
        share = int(top) / int(bottom)
        points.append((share, summary["loss"], summary["loss_error"] or 0.0, name))
    return sorted(points, reverse=True)


def draw_tasks(result: Result) -> Figure:
    """Mean score by task, a bar for each setting, a panel for each prompt length.

    Raises:
        ConfigError: nothing was answered.
    """
    single = [one for one in by_length(result) if any(c["scores"] for c in one.figures["cells"])]
    if not single:
        raise ConfigError("no cell of this result was measured")
    figure = Figure(figsize=(9.5, 0.6 + 3.8 * len(single)), layout="constrained")
    panels = figure.subplots(len(single), 1, squeeze=False)[:, 0]
    for number, (axes, one) in enumerate(zip(panels, single, strict=True)):
        _tasks_panel(axes, one, legend=number == 0)
    return figure


def _tasks_panel(axes: Axes, result: Result, *, legend: bool) -> None:
    cells = [cell for cell in result.figures["cells"] if cell["scores"]]
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    settings = list(dict.fromkeys(cell["setting"] for cell in cells))
    width = 0.8 / len(settings)
    shades = matplotlib.colormaps["viridis"](np.linspace(0.15, 0.85, len(settings)))
    for i, setting in enumerate(settings):
        at = {cell["task"]: cell for cell in cells if cell["setting"] == setting}
        here = [n for n, task in enumerate(tasks) if task in at]
        values = [100 * float(np.mean(at[tasks[n]]["scores"])) for n in here]
        axes.bar(np.array(here) + (i + 0.5) * width - 0.4, values, width,
                 label=short_setting(setting), color=shades[i])  # fmt: skip
    axes.set_xticks(range(len(tasks)), [task.replace("_", "\n") for task in tasks], fontsize=9.5)
    axes.set_ylabel("score, %")
    axes.set_ylim(0, 104)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    rows = -(-len(settings) // _LEGEND_COLUMNS)
    pad = 12 + 18 * rows if legend else 8
    axes.set_title(f"Score by task{model_of(result)}, {_label(result)}", pad=pad)
    if legend:
        axes.legend(frameon=False, ncols=min(_LEGEND_COLUMNS, len(settings)), loc="lower left",
                    bbox_to_anchor=(0, 1), fontsize=9.5)  # fmt: skip


def _label(result: Result) -> str:
    settings = result.settings
    return f"{settings['tokens']:,} tokens, {settings['samples']} samples a task"
