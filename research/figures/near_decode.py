"""Figures of `near_storage.decode`: step times and memory by method; step time by hot pool."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, short_tokens
from penstock.evaluate.result import Result
from research.clusters.end_to_end_table import device_name
from research.near_storage.decode_cases import OURS, PLAIN, SPLIT, without_budget
from research.near_storage.decode_table import GOAL, beta_of, measured, name_of

_COLOURS = {
    OURS: SERIES[0], PLAIN: "#3d9c98", f"{OURS}:devices=2": "#6b8fd6", f"{OURS}:bits=4": "#b5375a",
    "infinigen": SERIES[1], "leoam": SERIES[2], "h2o": SERIES[3], "flexgen": "#a58b3f",
    "full": FAINT,
}  # fmt: skip
Row = dict[str, Any]


def near_decode_figures(result: Result, name: str) -> dict[str, Callable[[Result], Figure]]:
    """What a result has enough rows for, by the figures' names."""
    out: dict[str, Callable[[Result], Figure]] = {}
    if measured(result.figures.get("rows", [])):
        out[name] = draw_near_decode
    if result.figures.get("splits"):
        out[f"{name}-split"] = draw_near_split
    return out


# Main ---------------------------------------------------------------------------------------------


def draw_near_decode(result: Result) -> Figure:
    """A column for each device: step time for each share, then memory at the longest length.

    Step times are lines over the lengths; bars where there is one length only.

    Raises:
        ConfigError: no row was measured.
    """
    rows = measured(result.figures.get("rows", []))
    if not rows:
        raise ConfigError("this result of near_storage decode has no methods")
    devices = list(dict.fromkeys(row["device"] for row in rows))
    ratios = sorted({row["ratio"] for row in rows}, reverse=True)
    tall = len(ratios) + 1
    figure = Figure(figsize=(3.0 + 5.4 * len(devices), 1.6 + 4.3 * tall), layout="constrained")
    panels = figure.subplots(tall, len(devices), squeeze=False)
    for column, device in enumerate(devices):
        here = [row for row in rows if row["device"] == device]
        for line, ratio in enumerate(ratios):
            some = [row for row in here if row["ratio"] == ratio and not row["hot"]]
            axes, lengths = panels[line][column], {row["length"] for row in some}
            title = f"{device_name(device)}: a step, {ratio:.0%} selected"
            if len(lengths) == 1:
                title = title.replace("a step", f"a step, ms, {short_tokens(*lengths)}")
                _bars(axes, [row for row in here if row["ratio"] == ratio])
            elif some:
                _steps(axes, some)
                axes.set_ylabel("" if column else "milliseconds (log scale)")
            axes.set_title(title)
        longest = max(row["length"] for row in here)
        last = [row for row in here if row["ratio"] == ratios[0] and row["length"] == longest]
        _memory(panels[-1][column], last)
        panels[-1][column].set_title(
            f"{device_name(device)}: memory, MiB, {short_tokens(longest)}, {ratios[0]:.0%}"
        )
    handles: dict[str, Any] = {}
    for axes in panels.ravel():
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside lower center",
                  ncols=min(6, 2 + len(devices)) if len(handles) > 5 else 3,
                  fontsize=10)  # fmt: skip
    figure.suptitle(
        f"HillInfer's decode steps on {result.figures['model']}, equal numbers of selected tokens"
        + ("\n" if len(devices) == 1 else ", ")
        + f"a budget of {result.settings.get('memory')} of the full cache",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _steps(axes: Axes, rows: Sequence[Row]) -> None:
    """Lines of all methods over the lengths."""
    for method in dict.fromkeys(row["method"] for row in rows):
        line = sorted((row["length"], row["mean_ms"]) for row in rows if row["method"] == method)
        plain = without_budget(method)
        axes.plot(*np.transpose(line), marker="o", markersize=4.5, color=_COLOURS.get(plain, INK),
                  label=name_of({"method": method}), linewidth=2.4 if plain == OURS else 1.4,
                  zorder=3 if plain == OURS else 2)  # fmt: skip
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xticks(lengths, [short_tokens(length) for length in lengths])
    axes.set_xlabel("tokens of prompt and output")
    axes.grid(color=GRID, linewidth=0.8)


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    """A bar for each method of one length; a line from the fastest round to the slowest."""
    for place, row in enumerate(rows):
        plain = without_budget(row["method"])
        axes.barh(place, row["mean_ms"], color=_COLOURS.get(plain, INK))
        ends = (min(row["round_ms"]), max(row["round_ms"]))
        axes.plot(ends, [place, place], color=INK, linewidth=1.2, marker="|", markersize=6,
                  label=None if place else "fastest to slowest round")  # fmt: skip
        axes.annotate(f"{row['mean_ms']:.0f} ms, {row['tokens_per_s']:.1f} tokens/s",
                      (max(row["mean_ms"], ends[1]), place), xytext=(6, 0), va="center",
                      textcoords="offset points", fontsize=8.5, color=INK)  # fmt: skip
    axes.set_yticks(range(len(rows)), [_bar_name(row) for row in rows], fontsize=9)
    axes.set_xlim(0, 1.3 * axes.get_xlim()[1])  # room for what is written at the longest bar
    axes.invert_yaxis()
    axes.grid(axis="x", color=GRID, linewidth=0.8)


def _bar_name(row: Row) -> str:
    return name_of(row) + (f", {row['hot']:,} hot" if row["hot"] else "")


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    """Bars: what the main process grew by, what it shares with devices, and the devices' own; the
    ledger's figure as a mark."""
    parts = (("main process", "grown_bytes", SERIES[0]), ("shared", "shared_bytes", SERIES[2]))
    names = []
    for place, row in enumerate(rows):
        names.append(_bar_name(row))
        left = 0.0
        for label, field, colour in parts:
            width = max(0.0, row[field]) / 2**20
            axes.barh(place, width, left=left, color=colour, label=None if place else label)
            left += width
        axes.annotate(f"{left:.0f}", (0, place), xytext=(5, 0), textcoords="offset points",
                      ha="left", va="center", fontsize=8.5, color="white")  # fmt: skip
        devices = sum(row["device_bytes"]) / 2**20
        axes.barh(place, devices, left=left, color=GRID, hatch="//", edgecolor=FAINT,
                  label=None if place else "device processes")  # fmt: skip
        axes.plot([row["ledger_bytes"] / 2**20] * 2, [place - 0.4, place + 0.4], color=INK,
                  linewidth=1.8, label=None if place else "the ledger says")  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", color=GRID, linewidth=0.8)


# Split --------------------------------------------------------------------------------------------


def draw_near_split(result: Result) -> Figure:
    """Step time over beta on each device, as the paper's figure 16b; the solved beta and Eq. 4's.

    Raises:
        ConfigError: no hot pools of several sizes were measured.
    """
    found = result.figures.get("splits")
    if not found:
        raise ConfigError("this result of near_storage decode has no hot pools of several sizes")
    figure = Figure(figsize=(1.4 + 6.0 * len(found), 6.0), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, one in zip(panels, found, strict=True):
        rows = [
            row for row in measured(result.figures["rows"], SPLIT)
            if all(row[name] == one[name] for name in ("device", "length", "ratio"))
        ]  # fmt: skip
        _split(axes, one, rows)
        axes.set_title(
            f"{device_name(one['device'])}: {short_tokens(one['length'])} tokens, "
            f"{one['ratio']:.0%} selected"
        )
        axes.set_xlabel("beta: hot tokens per cold token (log scale)")
    panels[0].set_ylabel("a step, ms (median)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, names, frameon=False, loc="outside lower center", fontsize=10,
        ncols=1 if len(panels) == 1 else 3,
    )  # fmt: skip
    figure.suptitle(
        f"Where the hot pool ends, {result.figures['model']} (fig. 16b); rates measured in the "
        "same run", fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _split(axes: Axes, one: Row, rows: Sequence[Row]) -> None:
    fixed = sorted((row for row in rows if row["hot"]), key=lambda row: row["hot"])
    total, least = one["total_tokens"], one["best"]["ms"]
    betas = [beta_of(row["hot"], total) for row in fixed]
    times = [row["median_ms"] for row in fixed]
    axes.axhspan(least, (1 + GOAL) * least, color=GRID, alpha=0.7, linewidth=0,
                 label=f"within {GOAL:.0%} of the least")  # fmt: skip
    axes.plot(betas, times, marker="o", markersize=5, color=SERIES[0], linewidth=2,
              label="measured, hot pool of that size")  # fmt: skip
    for row, beta in zip(fixed, betas, strict=True):
        last = row is fixed[-1]  # the lines of what was solved are often there
        axes.annotate(
            f"{row['hit_rate']:.0%} hot", (beta, row["median_ms"]),
            xytext=(-8, -12) if last else (5, 6), textcoords="offset points",
            ha="right" if last else "left", fontsize=8.5, color=FAINT,
        )  # fmt: skip
    axes.axvline(one["solved"]["beta"], color=SERIES[1], linewidth=1.6,
                 label="solved while decoding")  # fmt: skip
    axes.plot([one["solved"]["beta"]], [one["solved_ms"]], marker="D", markersize=8,
              color=SERIES[1], linestyle="", label="the row that solves it itself")  # fmt: skip
    axes.axvline(one["eq4"]["beta"], color=SERIES[3], linewidth=1.4, linestyle="--",
                 label="Eq. 4 from the same rates, within memory")  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(betas[::2], [f"{beta:.2g}" for beta in betas[::2]])
    axes.set_ylim(0, 1.12 * max(*times, one["solved_ms"]))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.annotate(
        f"over the least: solved {one['latency_off']:+.0%} (its own row "
        f"{one['own_latency_off']:+.0%}), Eq. 4 {one['eq4_latency_off']:+.0%}",
        (0.02, 0.04), xycoords="axes fraction", ha="left", fontsize=9.5, color=INK,
    )  # fmt: skip
