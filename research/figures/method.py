"""Figures that compare many methods: points lost at each budget, with intervals."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import GRID, INK, SERIES, short_setting, short_tokens
from penstock.evaluate.result import Result
from research.figures.result_lengths import answered_in_part, by_length

MANY_SETTINGS = 8
"""More settings than this are drawn by method instead of as bars by task."""
_Point = tuple[str, str, Any]
"""Method, budget and summary."""


def compares_methods(result: Result) -> bool:
    """Whether a result is of many methods rather than of a few settings."""
    if result.kind != "accuracy":
        return False
    return any(len(one.figures["summary"]) > MANY_SETTINGS for one in by_length(result))


def draw_methods(result: Result) -> Figure:
    """Points lost to full attention: methods down, best first, a colour for each budget.

    A panel for each prompt length, the methods in the same order.

    Raises:
        ConfigError: no setting of a limited budget was answered.
    """
    drawn = [(one, found) for one in by_length(result) if (found := _points(one))]
    if not drawn:
        raise ConfigError("no method of this result has a loss at a budget")
    points = [point for _, found in drawn for point in found]
    budgets = list(dict.fromkeys(budget for _, budget, _ in points))
    names = _best_first(points, budgets)
    figure = Figure(
        figsize=(8.6 if len(drawn) == 1 else 2.2 + 3.6 * len(drawn), 0.38 * len(names) + 2.0),
        layout="constrained",
    )
    panels = figure.subplots(1, len(drawn), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (one, found) in zip(panels, drawn, strict=True):
        _methods_panel(axes, found, names, budgets, answered_in_part(one))
        if len(drawn) > 1:
            axes.set_title(f"{short_tokens(one.settings['tokens'])} tokens")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    figure.supxlabel("points lost to full attention, mean over tasks (less is better)", fontsize=11)
    settings = drawn[0][0].settings
    answered = [cell for one, _ in drawn for cell in one.figures["cells"] if cell["scores"]]
    tasks = len({cell["task"] for cell in answered})
    fewest = min(len(cell["scores"]) for cell in answered)
    length = f", {settings['tokens']:,} tokens" if len(drawn) == 1 else ""
    figure.suptitle(
        f"Every method at the same memory{length}\n{tasks} tasks of {fewest} samples or more; "
        f"95 % intervals; no dot: {_why_missing(drawn)}",
        fontsize=11, fontweight="bold", x=0.01, ha="left",
    )  # fmt: skip
    panels[-1].legend(frameon=False, loc="upper right", fontsize=10)
    return figure


def _why_missing(drawn: Sequence[tuple[Result, Sequence[_Point]]]) -> str:
    """Why some methods have no dot, and what a hollow one is."""
    results = [one for one, _ in drawn]
    none = [s for one in results for s in one.figures["summary"] if s["loss"] is None]
    run = all(s.get("refused") for s in none)
    hollow = "\nhollow: not all tasks answered" if any(map(answered_in_part, results)) else ""
    return f"does not fit{'' if run else ', or not run'}{hollow}"


def _methods_panel(
    axes: Axes, points: Sequence[_Point], names: Sequence[str], budgets: Sequence[str],
    unfinished: set[str],
) -> None:  # fmt: skip
    for number, budget in enumerate(budgets):
        mine = [(names.index(name), s) for name, b, s in points if b == budget]
        places = [place + 0.16 * (number - (len(budgets) - 1) / 2) * 2 for place, _ in mine]
        losses = [s["loss"] for _, s in mine]
        below = [max(0.0, s["loss"] - s["loss_low"]) for _, s in mine]
        above = [max(0.0, s["loss_high"] - s["loss"]) for _, s in mine]
        axes.errorbar(
            losses, places, xerr=[below, above], fmt="o", markersize=6, capsize=3,
            color=SERIES[number % len(SERIES)], label=f"{budget} of the full cache",
        )  # fmt: skip
        hollow = [
            (s["loss"], place)
            for place, (_, s) in zip(places, mine, strict=True)
            if s["setting"] in unfinished
        ]
        axes.plot(
            [loss for loss, _ in hollow], [place for _, place in hollow], "o", markersize=3.4,
            color="white", zorder=3,
        )  # fmt: skip
    axes.axvline(0, color=INK, linewidth=0.9)
    axes.grid(axis="both", color=GRID, linewidth=0.7)


def _best_first(points: Sequence[_Point], budgets: Sequence[str]) -> list[str]:
    """Methods by their mean loss at the first budget, then at the next."""

    def losses(name: str) -> list[float]:
        of_budget = [
            [s["loss"] for n, b, s in points if (n, b) == (name, budget)] for budget in budgets
        ]
        return [sum(found) / len(found) if found else 200.0 for found in of_budget]

    return sorted(sorted({name for name, _, _ in points}), key=losses)


def _points(result: Result) -> list[_Point]:
    """Method, budget and summary of every answered setting with a budget."""
    found: list[_Point] = []
    summaries: Sequence[Any] = result.figures["summary"]
    for summary in summaries:
        name, at, budget = short_setting(summary["setting"]).partition("@")
        if at and summary["loss"] is not None:
            found.append((name, budget, summary))
    return found
