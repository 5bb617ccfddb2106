"""Figures that compare many methods: points lost at each budget, with intervals."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from penstock.bench.result import Result
from penstock.core.errors import ConfigError

MANY_SETTINGS = 8
"""More settings than this are drawn by method instead of as bars by task."""
_BUDGETS = ("#0b6e99", "#c96a2b", "#4b8b3b", "#7a4fa3")


def compares_methods(result: Result) -> bool:
    """Whether a result is of many methods rather than of a few settings."""
    return result.kind == "accuracy" and len(result.figures["summary"]) > MANY_SETTINGS


def draw_methods(result: Result) -> Figure:
    """Points lost to full attention: methods down, best first, a colour for each budget.

    Raises:
        ConfigError: no setting of a limited budget was answered.
    """
    points = _points(result)
    budgets = list(dict.fromkeys(budget for _, budget, _ in points))
    if not points:
        raise ConfigError("no method of this result has a loss at a budget")
    losses_of = {(name, budget): summary["loss"] for name, budget, summary in points}
    names = sorted(
        sorted({name for name, _, _ in points}),
        key=lambda name: [losses_of.get((name, budget), 200.0) for budget in budgets],
    )
    figure = Figure(figsize=(8.6, 0.38 * len(names) + 1.7), layout="constrained")
    axes = figure.subplots()
    for number, budget in enumerate(budgets):
        mine = [(names.index(name), s) for name, b, s in points if b == budget]
        places = [place + 0.16 * (number - (len(budgets) - 1) / 2) * 2 for place, _ in mine]
        losses = [s["loss"] for _, s in mine]
        below = [max(0.0, s["loss"] - s["loss_low"]) for _, s in mine]
        above = [max(0.0, s["loss_high"] - s["loss"]) for _, s in mine]
        axes.errorbar(
            losses, places, xerr=[below, above], fmt="o", markersize=6, capsize=3,
            color=_BUDGETS[number % len(_BUDGETS)], label=f"{budget} of the full cache",
        )  # fmt: skip
    axes.axvline(0, color="#30343b", linewidth=0.9)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="both", color="#e4e6ea", linewidth=0.7)
    axes.set_xlabel("points lost to full attention, mean over tasks (less is better)")
    settings = result.settings
    answered = [cell for cell in result.figures["cells"] if cell["scores"]]
    tasks = len({cell["task"] for cell in answered})
    fewest = min(len(cell["scores"]) for cell in answered)
    axes.set_title(
        f"Every method at the same memory, {settings['tokens']:,} tokens\n{tasks} tasks of "
        f"{fewest} samples or more; 95 % intervals; no dot: does not fit",
        fontsize=11,
    )
    axes.legend(frameon=False, loc="upper right", fontsize=10)
    return figure


def _points(result: Result) -> list[tuple[str, str, Any]]:
    """Method, budget and summary of every answered setting with a budget."""
    found: list[tuple[str, str, Any]] = []
    summaries: Sequence[Any] = result.figures["summary"]
    for summary in summaries:
        name, at, budget = summary["setting"].partition("@")
        if at and summary["loss"] is not None:
            found.append((name, budget, summary))
    return found
