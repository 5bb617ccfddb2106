"""Accuracy against memory: every method and budget as a dot, the Pareto front as a step line."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import (
    FAINT,
    GRID,
    INK,
    SERIES,
    model_of,
    short_setting,
    short_tokens,
)  # fmt: skip
from penstock.evaluate.result import Result
from research.figures.label_places import LEADER, Box, leader_of, place_labels
from research.figures.result_lengths import answered_in_part, by_length

_OURS = "kvswap"
_REFERENCE = "full"
_TICKS = (1, 2, 4, 6, 8, 10, 13, 17, 22, 28, 34, 45, 60, 80, 110, 150, 200, 300, 500, 1000)
"""Of the memory axis: one over these."""
_POINT = 1 / 72


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
    reference: dict[str, Any] = next((s for s in summaries if s["setting"] == _REFERENCE), {})
    unfinished = answered_in_part(result)
    dots = []
    for summary in summaries:
        method, at, budget = short_setting(summary["setting"]).partition("@")
        sizes = [each.get("full_cache_bytes") for each in (reference, summary)]
        if not at or summary.get("mean") is None or not summary.get("ledger_bytes"):
            continue
        share = summary["ledger_bytes"] / min(filter(None, sizes))
        dots.append(
            Dot(
                method=method, budget=budget, share=share, score=100 * summary["mean"],
                in_part=summary["setting"] in unfinished,
            )
        )  # fmt: skip
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


def draw_pareto(result: Result) -> Figure:
    """Mean score over fast memory, a panel for each prompt length.

    Raises:
        ConfigError: no setting with a budget was answered.
    """
    drawn = [(one, dots) for one in by_length(result) if (dots := dots_of(one))]
    if not drawn:
        raise ConfigError("no method of this result was answered at a budget")
    budgets = list(dict.fromkeys(dot.budget for _, dots in drawn for dot in dots))
    figure = Figure(
        figsize=(8.6 if len(drawn) == 1 else 5.6 * len(drawn), 6.0), layout="constrained"
    )
    panels = figure.subplots(1, len(drawn), sharex=True, sharey=True, squeeze=False)[0]
    shares = [dot.share for _, dots in drawn for dot in dots]
    ends = (min(shares) / 1.5, max(shares) * 1.6)
    notes = []
    for axes, (one, dots) in zip(panels, drawn, strict=True):
        _panel(axes, dots, budgets, ends, _reference_score(one))
        notes.append(_names_beside(axes, dots))
        axes.set_xlabel("fast memory, as a share of the full cache (log scale)")
        if len(drawn) > 1:
            axes.set_title(f"{short_tokens(one.settings['tokens'])} tokens")
    panels[0].set_ylabel("mean score, %")
    panels[0].set_ylim(-7, 108)
    length = f", {drawn[0][0].settings['tokens']:,} tokens" if len(drawn) == 1 else ""
    asked = _what_was_asked([one for one, _ in drawn])
    figure.suptitle(
        f"Accuracy against memory{model_of(result)}{length}\n{asked}",
        fontsize=12, fontweight="bold", x=0.01, ha="left",
    )  # fmt: skip
    figure.legend(handles=_legend(budgets), frameon=False, loc="outside lower center",
                  ncols=len(budgets) + 1, fontsize=10)  # fmt: skip
    figure.draw_without_rendering()  # the layout is known from here on
    figure.set_layout_engine("none")
    for axes, texts in zip(panels, notes, strict=True):
        _move_apart(axes, texts)
    return figure


def _reference_score(result: Result) -> float | None:
    for summary in result.figures["summary"]:
        if summary["setting"] == _REFERENCE and summary["mean"] is not None:
            return 100 * float(summary["mean"])
    return None


def _panel(
    axes: Axes, dots: Sequence[Dot], budgets: Sequence[str], ends: tuple[float, float],
    reference: float | None,
) -> None:  # fmt: skip
    axes.set_xscale("log")
    left, right = ends
    front = front_of(dots)
    axes.plot(
        [*(dot.share for dot in front), right],
        [*(dot.score for dot in front), max((dot.score for dot in front), default=np.nan)],
        drawstyle="steps-post", color=INK, linewidth=1.4, alpha=0.75, zorder=1.5,
    )  # fmt: skip
    if reference is not None:
        axes.axhline(reference, color=FAINT, linestyle=(0, (4, 3)), linewidth=1.1)
        axes.annotate(
            "full attention, all in memory", (0.0, reference), xytext=(4, 3), fontsize=9,
            xycoords=("axes fraction", "data"), textcoords="offset points", color="#5b616b",
        )  # fmt: skip
    for dot in dots:
        ours = dot.method == _OURS
        colour = SERIES[budgets.index(dot.budget) % len(SERIES)]
        axes.plot(
            dot.share, dot.score, "D" if ours else "o", markersize=9 if ours else 6.5,
            color="white" if dot.in_part else colour, zorder=3,
            markeredgecolor=colour if dot.in_part else "white",
            markeredgewidth=1.6 if dot.in_part else 0.8,
        )  # fmt: skip
    ticks = [1 / n for n in _TICKS if left <= 1 / n <= right]
    axes.set_xticks(ticks, [f"1/{1 / tick:.0f}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(left, right)
    axes.grid(axis="both", color=GRID, linewidth=0.7)


def _names_beside(axes: Axes, dots: Sequence[Dot]) -> list[Annotation]:
    """A text for every dot, or one for several that lie on each other; places come later."""
    together: dict[tuple[str, float, float], list[str]] = {}
    for dot in dots:
        spot = (dot.budget, round(dot.share, 4), round(dot.score, 1))
        together.setdefault(spot, []).append(dot.method)
    spots = sorted(together.items(), key=lambda item: (_OURS not in item[1], -item[0][2]))
    texts = []
    for (_, share, score), methods in spots:
        text = axes.annotate(
            ", ".join(methods) if len(methods) < 3 else "\n".join(methods), (share, score),
            xytext=(0, 0), textcoords="offset points", fontsize=9.5, ha="left", va="bottom",
            fontweight="bold" if _OURS in methods else "normal", annotation_clip=False, zorder=4,
        )  # fmt: skip
        text.set_in_layout(False)
        texts.append(text)
    return texts


def _move_apart(axes: Axes, texts: Sequence[Annotation]) -> None:
    """Give every text its place, and a line to its dot where that is far."""
    points = 1 / (axes.figure.dpi * _POINT)  # of a pixel
    dots = [tuple(axes.transData.transform(text.xy) * points) for text in texts]
    boxes = [text.get_window_extent() for text in texts]
    sizes = [(box.width * points, box.height * points) for box in boxes]
    room = axes.get_window_extent()
    taken = [
        Box(box.x0 * points, box.y0 * points, box.x1 * points, box.y1 * points)
        for other in axes.texts
        if other not in texts
        for box in [other.get_window_extent()]
    ]
    taken += _line_boxes(axes, points)
    inside = Box(room.x0 * points, room.y0 * points, room.x1 * points, room.y1 * points)
    for text, dot, place in zip(
        texts, dots, place_labels(dots, sizes, inside, taken=taken), strict=True
    ):
        text.set_position((place.left - dot[0], place.bottom - dot[1]))
        across, up = leader_of(dot, place)
        if np.hypot(across, up) > LEADER:
            axes.annotate(
                "", text.xy, xytext=(across, up),
                textcoords="offset points", annotation_clip=False, zorder=2,
                arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.8, "shrinkB": 4},
            )  # fmt: skip


def _line_boxes(axes: Axes, points: float) -> list[Box]:
    """What the front and the line of full attention cover, as thin rectangles."""
    boxes = []
    for line in axes.get_lines():
        corners = line.get_transform().transform(line.get_xydata()) * points
        if line.get_drawstyle() == "steps-post":
            turns = np.stack([corners[1:, 0], corners[:-1, 1]], axis=1)
            corners = np.insert(corners, range(1, len(corners)), turns, axis=0)
        for (x0, y0), (x1, y1) in pairwise(corners):
            boxes.append(Box(min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1))
    return boxes


def _what_was_asked(results: Sequence[Result]) -> str:
    answered = [cell for one in results for cell in one.figures["cells"] if cell["scores"]]
    tasks = len({cell["task"] for cell in answered})
    counts = {len(cell["scores"]) for cell in answered}
    if not counts:
        return "mean over tasks"
    samples = f"{min(counts)} samples{' or more' if len(counts) > 1 else ''}"
    hollow = "; hollow: not all tasks answered" if any(map(answered_in_part, results)) else ""
    return f"mean over {tasks} task{'' if tasks == 1 else 's'} of {samples}{hollow}"


def _legend(budgets: Sequence[str]) -> list[Line2D]:
    handles = [
        Line2D([], [], marker="o", linestyle="none", markersize=7,
               color=SERIES[number % len(SERIES)], label=f"budget {budget} of the full cache")
        for number, budget in enumerate(budgets)
    ]  # fmt: skip
    front = Line2D([], [], color=INK, linewidth=1.4, alpha=0.75, label="front: best for its memory")
    return [*handles, front]
