"""Figures of accuracy: loss by budget, score by task, every method, needles, the front."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from penstock.evaluate.figure_style import (
    FAINT,
    INK,
    SERIES,
    model_of,
    short_setting,
    short_tokens,
)
from penstock.evaluate.result import Result
from research.figures.chart import (
    Axis,
    Chart,
    Mark,
    Name,
    Panel,
    Row,
    alternating,
    bars,
    downwards,
    intervals,
    line,
    note,
    required,
    rule,
)

MANY_SETTINGS = 8
"""More settings than this are drawn by method instead of as bars by task."""
_LEGEND_COLUMNS = 4
_OURS, _REFERENCE = "kvswap", "full"
_BOLD = {"fontweight": "bold"}


# Results ------------------------------------------------------------------------------------------


def by_length(result: Result) -> list[Result]:
    """Split an accuracy result by the length of its prompts, shortest first.

    Returns:
        One result for each length, its `settings["tokens"]` that length; the result itself where
        neither cells nor summary say for which length they are.
    """
    lengths = sorted({length for row in result.figures["summary"] if (length := _length(row))})
    if not lengths:
        return [result]
    return [
        replace(
            result,
            settings={**result.settings, "tokens": length},
            figures={
                **result.figures,
                **{
                    name: [row for row in result.figures[name] if _length(row) in (length, None)]
                    for name in ("cells", "summary")
                },
            },
        )
        for length in lengths
    ]


def answered_in_part(result: Result) -> set[str]:
    """Settings that answered fewer tasks than the one with the most: not for comparing means."""
    tasks = {row["setting"]: row.get("tasks") or 0 for row in result.figures["summary"]}
    most = max(tasks.values(), default=0)
    return {setting for setting, count in tasks.items() if 0 < count < most}


def compares_methods(result: Result) -> bool:
    """Whether a result is of many methods rather than of a few settings."""
    return any(len(one.figures["summary"]) > MANY_SETTINGS for one in by_length(result))


def _length(row: Row) -> int | None:
    """The prompt length of a cell or a summary; a cell's "tokens" are those it decoded."""
    length = row.get("length", row.get("tokens") if "task" not in row else None)
    return None if length is None else int(length)


def _answered(result: Result) -> list[Row]:
    return [cell for cell in result.figures["cells"] if cell["scores"]]


def _label(result: Result) -> str:
    settings = result.settings
    return f"{settings['tokens']:,} tokens, {settings['samples']} samples a task"


# Few settings -------------------------------------------------------------------------------------


def by_budget(results: Sequence[Result]) -> Chart:
    """Points lost to full attention over the budget, a line for each prompt length."""
    single = [one for result in results for one in by_length(result)]
    single.sort(key=lambda one: int(one.settings["tokens"]))
    drawn = required([(one, found) for one in single if (found := budget_points(one))],
                     "no result has kvswap at a budget beside full attention")  # fmt: skip
    marks = []
    for number, (one, points) in enumerate(drawn):
        shares, losses, errors = np.transpose(points)
        marks.append(intervals(shares, losses, below=errors, above=errors, marker="o", markersize=6,
                               capsize=3, color=SERIES[number % len(SERIES)], label=_label(one))
        )  # fmt: skip
    ticks = sorted({share for _, points in drawn for share, _, _ in points}, reverse=True)
    ends = [loss + side * error for _, points in drawn for _, loss, error in points
            for side in (-1, 1)]  # fmt: skip
    marks += [rule(0, color=INK, linewidth=0.9),
              note("full attention", (1.0, 0), offset=(0, 5), ha="right",
                   within=("axes fraction", "data"))]  # fmt: skip
    panel = Panel(
        marks=marks, legend={"loc": "lower left", "fontsize": 11},
        x=Axis(log=10, ticks=ticks, names=[f"1/{1 / share:.0f}" for share in ticks],
               low=max(ticks) * 1.25, high=min(ticks) / 1.25,
               label="KV memory as a share of the full cache (less memory to the right)"),
        y=Axis(low=max(5.0, 1.05 * max(ends)), high=min(-0.8, 1.05 * min(ends)),
               label="points lost"),
    )  # fmt: skip
    return Chart(title="What a memory budget costs: KVSwap, mean over the tasks", look=_BOLD,
                 size=(7.5, 4.6), panels=[[panel]])  # fmt: skip


def budget_points(result: Result) -> list[tuple[float, float, float]]:
    """Budget share, loss and its error of the plain kvswap settings, largest budget first."""
    points = []
    for summary in result.figures["summary"]:
        policy, _, budget = summary["setting"].partition("@")
        top, slash, bottom = budget.partition("/")
        if policy == _OURS and slash and bottom.isdigit() and summary["loss"] is not None:
            points.append((int(top) / int(bottom), summary["loss"], summary["loss_error"] or 0.0))
    return sorted(points, reverse=True)


def tasks(result: Result) -> Chart:
    """Mean score by task, a bar for each setting, a panel for each prompt length."""
    single = required([one for one in by_length(result) if _answered(one)],
                      "no cell of this result was measured")  # fmt: skip
    return Chart(
        title="Score by task" + model_of(result), look=_BOLD, legend={"ncols": _LEGEND_COLUMNS},
        size=(9.5, 1.1 + 3.6 * len(single)), panels=[[_tasks_panel(one)] for one in single],
    )  # fmt: skip


def _tasks_panel(result: Result) -> Panel:
    cells = _answered(result)
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    settings = list(dict.fromkeys(cell["setting"] for cell in cells))
    width = 0.8 / len(settings)
    shades = matplotlib.colormaps["viridis"](np.linspace(0.15, 0.85, len(settings)))
    marks = []
    for number, setting in enumerate(settings):
        mine = [cell for cell in cells if cell["setting"] == setting]
        at = [tasks.index(cell["task"]) + alternating(len(settings), number, width)
              for cell in mine]  # fmt: skip
        scores = [100 * float(np.mean(cell["scores"])) for cell in mine]
        marks.append(bars(at, scores, width=width, label=short_setting(setting),
                          color=shades[number]))  # fmt: skip
    return Panel(
        title=_label(result), marks=marks,
        x=Axis(names=[task.replace("_", "\n") for task in tasks], size=9.5),
        y=Axis(label="score, %", low=0, high=104),
    )  # fmt: skip


# Many methods -------------------------------------------------------------------------------------

_Point = tuple[str, str, Any]
"""Method, budget and summary."""


def methods(result: Result) -> Chart:
    """Points lost to full attention: methods down, best first, a colour for each budget.

    A panel for each prompt length, the methods in the same order.
    """
    drawn = required([(one, found) for one in by_length(result) if (found := _points(one))],
                     "no method of this result has a loss at a budget")  # fmt: skip
    points = [point for _, found in drawn for point in found]
    budgets = list(dict.fromkeys(budget for _, budget, _ in points))
    names = _best_first(points, budgets)
    several = len(drawn) > 1
    panels = [
        Panel(title=_tokens_title(one) if several else "", grid="both", y=downwards(names),
              marks=list(_methods_marks(found, names, budgets, answered_in_part(one))),
              legend={"loc": "upper right"} if one is drawn[-1][0] else None)
        for one, found in drawn
    ]  # fmt: skip
    answered = [cell for one, _ in drawn for cell in _answered(one)]
    tasks = len({cell["task"] for cell in answered})
    fewest = min(len(cell["scores"]) for cell in answered)
    length = "" if several else f", {drawn[0][0].settings['tokens']:,} tokens"
    return Chart(
        title=f"Every method at the same memory{length}\n{tasks} tasks of {fewest} samples or "
              f"more; 95 % intervals; no dot: {_why_missing([one for one, _ in drawn])}",
        look={"fontsize": 11, **_BOLD}, share=(True, True), panels=[panels],
        size=(2.2 + 3.6 * len(drawn) if several else 8.6, 0.38 * len(names) + 2.0),
        xlabel="points lost to full attention, mean over tasks (less is better)",
    )  # fmt: skip


def _tokens_title(result: Result) -> str:
    return f"{short_tokens(result.settings['tokens'])} tokens"


def _why_missing(results: Sequence[Result]) -> str:
    """Why some methods have no dot, and what a hollow one is."""
    none = [s for one in results for s in one.figures["summary"] if s["loss"] is None]
    run = all(s.get("refused") for s in none)
    hollow = "\nhollow: not all tasks answered" if any(map(answered_in_part, results)) else ""
    return f"does not fit{'' if run else ', or not run'}{hollow}"


def _methods_marks(
    points: Sequence[_Point], names: Sequence[str], budgets: Sequence[str], unfinished: set[str]
) -> Iterator[Mark]:
    for number, budget in enumerate(budgets):
        mine = [(names.index(name), s) for name, b, s in points if b == budget]
        places = [place + alternating(len(budgets), number, 0.32) for place, _ in mine]
        losses = [s["loss"] for _, s in mine]
        yield intervals(
            losses, places, left=[max(0.0, s["loss"] - s["loss_low"]) for _, s in mine],
            right=[max(0.0, s["loss_high"] - s["loss"]) for _, s in mine], fmt="o", markersize=6,
            capsize=3, color=SERIES[number % len(SERIES)], label=f"{budget} of the full cache",
        )  # fmt: skip
        hollow = [
            (loss, place)
            for loss, place, (_, s) in zip(losses, places, mine, strict=True)
            if s["setting"] in unfinished
        ]
        yield line(*zip(*hollow, strict=True) if hollow else ((), ()), marker="o", linestyle="",
                   markersize=3.4, color="white", zorder=3)  # fmt: skip
    yield rule(0, across=False, color=INK, linewidth=0.9)


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
    for summary in result.figures["summary"]:
        name, at, budget = short_setting(summary["setting"]).partition("@")
        if at and summary["loss"] is not None:
            found.append((name, budget, summary))
    return found


# Needles ------------------------------------------------------------------------------------------

_COLOURS = "viridis"
_FEW_CELLS = 80
"""Panels of at most this many cells have numbers in them."""
_ACROSS = 4


def needles(result: Result) -> Chart:
    """Share of needles found, one scale of colours from 0 to 100 % for all panels."""
    cells = result.figures["cells"]
    answered = required(_answered(result), "no cell of this result was measured")
    lengths = sorted({cell["tokens"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    settings = list(dict.fromkeys(cell["setting"] for cell in cells))
    across = min(_ACROSS, len(settings))
    panels = [
        Panel(
            title=setting.replace("@", " at "), grid="", frame="none",
            marks=[_grid([cell for cell in cells if cell["setting"] == setting], lengths, depths)],
            x=Axis(names=[short_tokens(tokens) for tokens in lengths], bare=True),
            y=Axis(names=[f"{100 * depth:.0f}" for depth in depths], bare=True),
        )
        for setting in settings
    ]  # fmt: skip
    rows = [panels[first : first + across] for first in range(0, len(panels), across)]
    counts = sorted({len(cell["scores"]) for cell in answered})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    title = (f"Needle in a haystack ({result.settings['task']}), {samples} "
             f"sample{'' if samples == '1' else 's'} a cell")  # fmt: skip
    if any(cell["refused"] for cell in cells):
        title += "\nhatched: no cache of this length fits the budget"
    return Chart(
        title=title, look=_BOLD, share=(True, True), panels=rows, xlabel="tokens of the prompt",
        ylabel="depth of the needle, %", more=_colour_scale,
        size=(max(8.6, 1.7 + across * max(1.75, 0.48 * len(lengths))),
              1.5 + len(rows) * (0.9 + 0.36 * max(4, len(depths)))),
    )  # fmt: skip


def _colour_scale(figure: Figure) -> None:
    bar = figure.colorbar(ScalarMappable(Normalize(0, 100), _COLOURS), ax=figure.axes, aspect=18,
                          fraction=0.06, pad=0.015)  # fmt: skip
    bar.set_label("needles found, %")
    bar.outline.set_visible(False)


def _grid(cells: Sequence[Row], lengths: Sequence[int], depths: Sequence[float]) -> Mark:
    scores = np.full((len(depths), len(lengths)), np.nan)
    refused = []
    for cell in cells:
        row, column = depths.index(cell["depth"]), lengths.index(cell["tokens"])
        if cell["scores"]:
            scores[row, column] = 100 * float(np.mean(cell["scores"]))
        elif cell["refused"]:
            refused.append((column - 0.5, row - 0.5))
    colours = matplotlib.colormaps[_COLOURS]

    def draw_grid(axes: Axes) -> None:
        for corner in refused:
            axes.add_patch(Rectangle(corner, 1, 1, facecolor="#f1f2f4", edgecolor=FAINT,
                                     hatch="////", linewidth=0))  # fmt: skip
        axes.imshow(scores, cmap=colours, vmin=0, vmax=100, aspect="auto", interpolation="nearest")
        for (row, column), score in np.ndenumerate(scores):
            if scores.size <= _FEW_CELLS and not np.isnan(score):
                dark = sum(colours(score / 100)[:3]) < 1.35
                axes.text(column, row, f"{score:.0f}", ha="center", va="center", fontsize=9.5,
                          color="white" if dark else "black")  # fmt: skip
        axes.set_xticks(np.arange(len(lengths) - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(len(depths) - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.set_axisbelow(False)

    return draw_grid


# Front --------------------------------------------------------------------------------------------

_TICKS = (1, 2, 4, 6, 8, 10, 13, 17, 22, 28, 34, 45, 60, 80, 110, 150, 200, 300, 500, 1000)
"""Of the memory axis: one over these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One method at one budget.

    Attributes:
        method: the policy's name.
        budget: as it was asked for, "1/13".
        share: fast memory that was used, as a share of the full cache.
        score: mean over the tasks, %.
        in_part: other settings answered more tasks; beside them the score means little.
    """

    method: str
    budget: str
    share: float
    score: float
    in_part: bool = False


def dots_of(result: Result) -> list[Dot]:
    """Every answered setting with a budget, in the result's order.

    The full cache is not taken for larger than full attention's, which answers the same batches:
    older results have it multiplied by the heads, for methods that select per head.
    """
    summaries = result.figures["summary"]
    reference: Row = next((s for s in summaries if s["setting"] == _REFERENCE), {})
    unfinished = answered_in_part(result)
    dots = []
    for summary in summaries:
        method, at, budget = short_setting(summary["setting"]).partition("@")
        if not at or summary.get("mean") is None or not summary.get("ledger_bytes"):
            continue
        sizes = [each.get("full_cache_bytes") for each in (reference, summary)]
        dots.append(Dot(
            method=method, budget=budget, score=100 * summary["mean"],
            share=summary["ledger_bytes"] / min(filter(None, sizes)),
            in_part=summary["setting"] in unfinished,
        ))  # fmt: skip
    return dots


def front_of(dots: Sequence[Dot]) -> list[Dot]:
    """The dots that no other beats in memory or score without losing in the other.

    Returns:
        By rising memory, and so by rising score; of equal dots all. None that has not answered
        all tasks.
    """
    dots = [dot for dot in dots if not dot.in_part]
    front = [
        dot
        for dot in dots
        if not any(
            other.share <= dot.share
            and other.score >= dot.score
            and (other.share, other.score) != (dot.share, dot.score)
            for other in dots
        )
    ]
    return sorted(front, key=lambda dot: dot.share)


def has_front(result: Result) -> bool:
    """Whether a result compares several methods at a budget."""
    return any(len({dot.method for dot in dots_of(one)}) > 1 for one in by_length(result))


def pareto(result: Result) -> Chart:
    """Mean score over fast memory, a panel for each prompt length; the front as a step line."""
    drawn = required([(one, dots) for one in by_length(result) if (dots := dots_of(one))],
                     "no method of this result was answered at a budget")  # fmt: skip
    every = [dot for _, dots in drawn for dot in dots]
    budgets = list(dict.fromkeys(dot.budget for dot in every))
    low, high = min(dot.share for dot in every) / 1.5, max(dot.share for dot in every) * 1.6
    ticks = [1 / n for n in _TICKS if low <= 1 / n <= high]
    several = len(drawn) > 1
    panels = [
        Panel(
            title=_tokens_title(one) if several else "", grid="both", named=_names(dots),
            marks=list(_front_marks(dots, budgets, high, one)),
            x=Axis(log=10, low=low, high=high, ticks=ticks,
                   names=[f"1/{1 / tick:.0f}" for tick in ticks],
                   label="fast memory, as a share of the full cache (log scale)"),
            y=Axis(low=-7, high=108, label="mean score, %" if one is drawn[0][0] else ""),
        )
        for one, dots in drawn
    ]  # fmt: skip
    dots_keys = [
        Line2D([], [], marker="o", linestyle="none", markersize=7,
               color=SERIES[number % len(SERIES)], label=f"budget {budget} of the full cache")
        for number, budget in enumerate(budgets)
    ]  # fmt: skip
    front = Line2D([], [], color=INK, linewidth=1.4, alpha=0.75, label="front: best for its memory")
    length = "" if several else f", {drawn[0][0].settings['tokens']:,} tokens"
    return Chart(
        title=f"Accuracy against memory{model_of(result)}{length}\n"
              + _what_was_asked([one for one, _ in drawn]),
        look=_BOLD, share=(True, True), panels=[panels], keys=[*dots_keys, front],
        size=(5.6 * len(drawn) if several else 8.6, 6.0),
        legend={"ncols": len(budgets) + 1, "fontsize": 10},
    )  # fmt: skip


def _front_marks(
    dots: Sequence[Dot], budgets: Sequence[str], right: float, result: Result
) -> Iterator[Mark]:
    front = front_of(dots)
    best = max((dot.score for dot in front), default=np.nan)
    yield line([*(dot.share for dot in front), right], [*(dot.score for dot in front), best],
               drawstyle="steps-post", color=INK, linewidth=1.4, alpha=0.75, zorder=1.5
    )  # fmt: skip
    for summary in result.figures["summary"]:
        if summary["setting"] == _REFERENCE and summary["mean"] is not None:
            score = 100 * float(summary["mean"])
            yield rule(score, linestyle=(0, (4, 3)), linewidth=1.1)
            yield note("full attention, all in memory", (0.0, score), offset=(4, 3), ha="left",
                       within=("axes fraction", "data"), color="#5b616b")  # fmt: skip
    for dot in dots:
        ours = dot.method == _OURS
        colour = SERIES[budgets.index(dot.budget) % len(SERIES)]
        yield line(
            dot.share, dot.score, marker="D" if ours else "o", markersize=9 if ours else 6.5,
            color="white" if dot.in_part else colour, zorder=3,
            markeredgecolor=colour if dot.in_part else "white",
            markeredgewidth=1.6 if dot.in_part else 0.8,
        )  # fmt: skip


def _names(dots: Sequence[Dot]) -> list[Name]:
    """A text for every dot, or one for several that lie on each other, ours and the best first."""
    together: dict[tuple[str, float, float], list[str]] = {}
    for dot in dots:
        spot = (dot.budget, round(dot.share, 4), round(dot.score, 1))
        together.setdefault(spot, []).append(dot.method)
    spots = sorted(together.items(), key=lambda item: (_OURS not in item[1], -item[0][2]))
    return [
        Name(text=", ".join(methods) if len(methods) < 3 else "\n".join(methods), x=share, y=score,
             leader=True,
             look={"fontsize": 9.5, "fontweight": "bold" if _OURS in methods else "normal"})
        for (_, share, score), methods in spots
    ]  # fmt: skip


def _what_was_asked(results: Sequence[Result]) -> str:
    answered = [cell for one in results for cell in _answered(one)]
    tasks = len({cell["task"] for cell in answered})
    counts = {len(cell["scores"]) for cell in answered}
    if not counts:
        return "mean over tasks"
    samples = f"{min(counts)} samples{' or more' if len(counts) > 1 else ''}"
    hollow = "; hollow: not all tasks answered" if any(map(answered_in_part, results)) else ""
    return f"mean over {tasks} task{'' if tasks == 1 else 's'} of {samples}{hollow}"
