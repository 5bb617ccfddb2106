"""Curves of a run: loss by task, and accuracy at a glance, over the tokens seen."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.evaluate.figure_style import FAINT, GRID, INK, STYLE
from training.prose_settings import PROSE

_FLOOR = 1e-5


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the figure of a run's log as SVG."""
    steps = [record for record in records if record["kind"] == "train"]
    glances = [record for record in records if record["kind"] == "glance" and record["exact"]]
    tasks = list(dict.fromkeys(task for record in steps for task in record["by_task"]))
    shades = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(tasks)))
    colour = dict(zip(tasks, shades, strict=True))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 7.6), layout="constrained")
        losses, exact = figure.subplots(2, 1, sharex=True)
        _draw_losses(losses, steps, colour)
        tokens_at = {record["step"]: record["tokens"] / 1e6 for record in steps}
        _draw_exact(exact, glances, tokens_at, colour)
        for number, at in enumerate(sitting_starts(records)):
            for axes in (losses, exact):
                label = "a new sitting" if number == 0 else None
                axes.axvline(at, color=FAINT, linewidth=0.9, linestyle="--", label=label)
        figure.legend(*losses.get_legend_handles_labels(), loc="outside right upper",
                      frameon=False, fontsize=9)  # fmt: skip
        figure.savefig(path, metadata={"Date": None})


def sitting_starts(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Where later sittings began, in million tokens."""
    starts, tokens = [], 0
    for record in records:
        if record["kind"] == "begin" and tokens:
            starts.append(tokens / 1e6)
        tokens = record.get("tokens", tokens)
    return starts


def _draw_losses(axes: Axes, steps: Sequence[Mapping[str, Any]], colour: dict[str, Any]) -> None:
    for task, shade in colour.items():
        points = [(s["tokens"] / 1e6, s["by_task"][task]) for s in steps if task in s["by_task"]]
        x, y = zip(*points, strict=True)
        axes.plot(x, np.maximum(y, _FLOOR), color=shade, linewidth=1, label=task)
    axes.set_yscale("log")
    prose = "; prose: on every token" if PROSE in colour else ""
    axes.set_ylabel("nats a token")
    axes.set_title(f"Loss on answers by task{prose}", color=INK)
    axes.grid(color=GRID, linewidth=0.7)


def _draw_exact(
    axes: Axes, glances: Sequence[Mapping[str, Any]], tokens_at: dict[int, float],
    colour: dict[str, Any],
) -> None:  # fmt: skip
    for task, shade in colour.items():
        points = []
        for glance in glances:
            found = [one["exact"] for one in glance["exact"] if one["task"] == task]
            if found and glance["step"] in tokens_at:
                points.append((tokens_at[glance["step"]], 100 * sum(found) / len(found)))
        if points:
            axes.plot(*zip(*points, strict=True), color=shade, marker="o", markersize=3)
    axes.set_ylim(-3, 103)
    axes.set_xlabel("million tokens")
    axes.set_ylabel("exact match, %")
    axes.set_title("A few fresh samples during training, means over lengths", color=INK)
    axes.grid(color=GRID, linewidth=0.7)
