"""Figures of the throughput benchmark: step times by row, with the floor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import GRID, INK
from penstock.evaluate.result import Result

MOST_LINEAR_SPREAD = 20
"""Bars stand on zero unless the slowest row takes more than this times the fastest's."""
_COLOURS = {"ours": "#0b6e99", "memory": "#8a8f98", "flexgen": "#c96a2b", "floor": "#b9bec6"}


def draw_throughput(result: Result) -> Figure:
    """Step times by row, one panel for each batch size, the floor as a line.

    Raises:
        ConfigError: the result has no measured row.
    """
    rows = [row for row in result.figures["rows"] if row["figures"].get("median_ms")]
    batches = sorted({row["batch"] for row in rows})
    if not rows:
        raise ConfigError("no row of this result was measured")
    most = max(sum(row["batch"] == batch for row in rows) for batch in batches)
    figure = Figure(figsize=(9.5, (0.36 * most + 1.1) * len(batches) + 0.9), layout="constrained")
    panels = figure.subplots(len(batches), 1, squeeze=False)[:, 0]
    medians = [row["figures"]["median_ms"] for row in rows]
    is_log = max(medians) > MOST_LINEAR_SPREAD * min(medians)
    for panel, batch in zip(panels, batches, strict=True):
        _throughput_panel(panel, [row for row in rows if row["batch"] == batch], is_log=is_log)
        panel.set_title(f"batch {batch}", pad=18)
    scale = " (log scale)" if is_log else ""
    panels[-1].set_xlabel(f"time of one decode step, ms{scale}; whiskers: 10th, 90th percentile")
    settings = result.settings
    figure.suptitle(
        f"{settings['config']}, {settings['context']:,} tokens of context, KV budget "
        f"{settings['memory']} of the full cache\n{_machine(result)}",
        fontsize=12,
    )
    return figure


def _throughput_panel(panel: Axes, rows: Sequence[dict[str, Any]], *, is_log: bool) -> None:
    rows = rows[::-1]
    places = np.arange(len(rows))
    medians = np.array([row["figures"]["median_ms"] for row in rows])
    low = medians - np.array([row["figures"]["p10_ms"] for row in rows])
    high = np.array([row["figures"]["p90_ms"] for row in rows]) - medians
    if is_log:
        panel.set_xscale("log")
    panel.grid(axis="x", which="both", color=GRID, linewidth=0.7)
    floors = [row["figures"]["median_ms"] for row in rows if row["is_floor"]]
    start = min(medians) / 2 if is_log else 0.0
    bars = panel.barh(
        places, medians - start, left=start, height=0.68,
        color=[_colour(row) for row in rows],
        xerr=np.stack([low.clip(0), high.clip(0)]),
        error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 2.5},
    )  # fmt: skip
    for bar, row in zip(bars, rows, strict=True):
        if row["simulated"]:
            bar.set_hatch("////")
            bar.set_edgecolor("white")
    for place, row in zip(places, rows, strict=True):
        figures = row["figures"]
        label = f"{figures['median_ms']:,.0f} ms, {figures['tokens_per_s']:.1f} tokens/s"
        panel.annotate(
            label, (figures["p90_ms"], float(place)), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=9.5,
        )  # fmt: skip
    if floors:
        panel.axvline(min(floors), color=INK, linestyle=(0, (4, 3)), linewidth=1.1)
        panel.annotate(
            "floor: 400 tokens of context", (min(floors), 1.0), xytext=(4, 1),
            xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=9,
        )  # fmt: skip
    most = max(row["figures"]["p90_ms"] for row in rows)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.set_yticks(places, [_row_label(row) for row in rows])
    panel.set_ylim(-0.6, len(rows) - 0.4)
    if not is_log:
        panel.set_xlim(0.0, 1.35 * most)
        return
    wide = most > 100 * start
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlim(start, start * (most / start) ** 1.5)


def _row_label(row: dict[str, Any]) -> str:
    return f"{row['name']}*" if row["synthetic_stream"] else str(row["name"])


def _colour(row: dict[str, Any]) -> str:
    if row["is_floor"]:
        return _COLOURS["floor"]
    if row["name"].startswith("flexgen"):
        return _COLOURS["flexgen"]
    return _COLOURS["ours" if row["name"].startswith("kvswap") else "memory"]


def _machine(result: Result) -> str:
    machine = result.machine
    rows = result.figures["rows"]
    real = [row["figures"].get("is_direct") for row in rows if not row["simulated"]]
    direct = " with direct I/O" if True in real and False not in real else ""
    cores = f"{machine['cores']} cores"
    if int(machine["threads"] or 0) < int(machine["cores"] or 0):
        cores = f"{machine['threads']} threads on {machine['cores']} cores"
    where = f"{machine['cpu']}, {cores}, {machine['disk']}{direct}"
    notes = []
    if any(row["simulated"] for row in rows):
        notes.append("hatched: simulated device")
    if any(row["synthetic_stream"] for row in rows):
        notes.append("*: synthetic stream of selections")
    return "\n".join(filter(None, [where, "; ".join(notes)]))
