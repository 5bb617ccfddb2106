"""Figures of `clusters.end_to_end`: DynaKV's speed-ups, step times, bandwidth, and its cache."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, short_tokens
from penstock.evaluate.result import Result
from research.clusters.end_to_end_run import CACHE
from research.clusters.end_to_end_table import (
    BOTH,
    FLASH,
    LRU,
    NO_CLUSTERS,
    OURS,
    PAPER_BANDWIDTHS,
    PAPER_LENGTHS,
    PAPER_MEMORY,
    PAPER_POLICY,
    PAPER_SPEEDUPS,
    PAPER_STEPS,
    POLICY,
    VIRTUAL,
    cache_bytes,
    device_name,
    measured,
    name_of,
)

_COLOURS = {
    OURS: SERIES[0], NO_CLUSTERS: SERIES[1], "pqcache": SERIES[2], "clusterkv": SERIES[3],
    "dynakv:layout=tokens": "#b5375a", "dynakv:update=static": "#3d9c98", "full": FAINT,
}  # fmt: skip
_WIDTH = 0.8
"""Of the bars of one group together."""
Row = dict[str, Any]


def cluster_speed_figures(result: Result, name: str) -> dict[str, Callable[[Result], Figure]]:
    """What a result has enough rows for, by the figures' names."""
    out: dict[str, Callable[[Result], Figure]] = {}
    if any(one["method"] in PAPER_SPEEDUPS for one in result.figures.get("speedups", [])):
        out[name] = draw_cluster_speed
    if measured(result.figures.get("rows", []), CACHE):
        out[f"{name}-cache"] = draw_cluster_cache
    return out


def draw_cluster_speed(result: Result) -> Figure:
    """A column for each device: speed-ups, then effective bandwidth, then step time by length.

    Raises:
        ConfigError: DynaKV and another method were not measured beside each other.
    """
    gains, rows = result.figures.get("speedups", []), measured(result.figures.get("rows", []))
    if not gains:
        raise ConfigError("no method of this result was measured beside dynakv")
    devices = list(dict.fromkeys(row["device"] for row in rows))
    figure = Figure(figsize=(1.4 + 6.6 * len(devices), 13.2), layout="constrained")
    panels = figure.subplots(3, len(devices), squeeze=False, sharey="row")
    for column, device in enumerate(devices):
        here = [one for one in gains if one["device"] == device and one["method"] in PAPER_SPEEDUPS]
        name = device_name(device)
        _gains(panels[0][column], here, "mean", PAPER_SPEEDUPS)
        panels[0][column].set_title(f"{name}: times faster, fig. 10b")
        _gains(panels[1][column], here, "bandwidth", PAPER_BANDWIDTHS)
        panels[1][column].set_title(f"{name}: times their effective bandwidth, fig. 10c")
        ratio = _fullest_ratio(rows, device)
        _steps(panels[2][column], [
            row for row in rows if row["device"] == device and row["ratio"] == ratio
        ])  # fmt: skip
        panels[2][column].set_title(f"{name}: a step at {ratio:.0%}, table 6")
    panels[0][0].set_ylabel("geometric mean; line: least to most")
    panels[1][0].set_ylabel("geometric mean over lengths")
    panels[2][0].set_ylabel("milliseconds (log scale)")
    panels[0][0].set_ylim(top=1.25 * panels[0][0].get_ylim()[1])  # room for the legend
    panels[0][0].legend(frameon=False, fontsize=9.5, loc="upper left", ncols=2)
    handles, names = panels[2][0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=4, fontsize=10)
    figure.suptitle(
        f"Decode steps of DynaKV on {result.figures['model']}, equal numbers of selected tokens; "
        f"measured in turn, {result.settings.get('steps')} steps each{_elsewhere(rows)}",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _elsewhere(rows: Sequence[Row]) -> str:
    """Which lengths and ratios another machine measured; nothing where one did it all."""
    places = sorted({(row["length"], row["ratio"]) for row in rows if row.get("machine")})
    spoken = [
        f"{short_tokens(length)} at " + ", ".join(f"{r:.0%}" for n, r in places if n == length)
        for length in dict.fromkeys(length for length, _ in places)
    ]
    return f"\nanother machine measured {'; '.join(spoken)}" if spoken else ""


def _fullest_ratio(rows: Sequence[Row], device: str) -> float:
    """The ratio that most lengths were measured at; among equals the middle one."""
    here = [row for row in rows if row["device"] == device and row["method"] == OURS]
    ratios = sorted({row["ratio"] for row in here})
    lengths = {ratio: sum(row["ratio"] == ratio for row in here) for ratio in ratios}
    best = [ratio for ratio in ratios if lengths[ratio] == max(lengths.values())]
    return float(best[len(best) // 2])


def _gains(axes: Axes, gains: Sequence[Row], field: str, paper: dict[str, float]) -> None:
    """Bars by ratio, a colour for each other method; the paper's averages as dashes."""
    ratios = sorted({one["ratio"] for one in gains})
    width = _WIDTH / len(paper)
    for number, method in enumerate(paper):
        places: list[float] = []
        for one in gains:
            if one["method"] != method or one[field] is None:
                continue
            place = ratios.index(one["ratio"]) + (number - (len(paper) - 1) / 2) * width
            axes.bar(place, one[field], width=0.92 * width, color=_COLOURS[method],
                     label=None if places else f"than {name_of(method)}")  # fmt: skip
            if field == "mean":
                axes.plot([place, place], [one["low"], one["high"]], color=INK, linewidth=1.0)
            axes.annotate(
                f"{one[field]:.2f}", (place, 0), xytext=(0, 4), textcoords="offset points",
                ha="center", fontsize=9.5, color="white",
            )  # fmt: skip
            places.append(place)
        for place in places:
            label = "the paper's" if (method, place) == ("clusterkv", places[0]) else None
            axes.plot([place - width / 2, place + width / 2], [paper[method]] * 2, color=INK,
                      linewidth=1.6, linestyle="--", label=label)  # fmt: skip
    axes.axhline(1, color=FAINT, linewidth=0.9)
    axes.set_xticks(range(len(ratios)), [
        f"{ratio:.0%} selected\n{_spoken_lengths(gains, ratio)}" for ratio in ratios
    ])  # fmt: skip
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def _spoken_lengths(gains: Sequence[Row], ratio: float) -> str:
    """ "1K to 16K" for the lengths that a ratio's means are over."""
    found = sorted({n for one in gains if one["ratio"] == ratio for n in one["lengths"]})
    ends = dict.fromkeys(short_tokens(length) for length in (found[0], found[-1]))
    return " to ".join(ends)


def _steps(axes: Axes, rows: Sequence[Row]) -> None:
    """Lines of all methods; the paper's models and growth with the length itself, faint."""
    for method in dict.fromkeys(row["method"] for row in rows):
        line = sorted((row["length"], row["mean_ms"]) for row in rows if row["method"] == method)
        axes.plot(*np.transpose(line), marker="o", markersize=4.5, label=name_of(method),
                  color=_COLOURS.get(method, INK), linewidth=2.4 if method == OURS else 1.4,
                  zorder=3 if method == OURS else 2)  # fmt: skip
    lengths = sorted({row["length"] for row in rows})
    for number, steps in enumerate(PAPER_STEPS.values()):
        pairs = [pair for pair in zip(PAPER_LENGTHS, steps, strict=True) if pair[0] in lengths]
        if pairs:
            axes.plot(*np.transpose(pairs), color=FAINT, linewidth=0.9, linestyle=":",
                      label=None if number else "the paper's models")  # fmt: skip
    ours = [row for row in rows if row["method"] == OURS]
    first = min(ours, key=lambda row: row["length"])
    axes.plot(lengths, [first["mean_ms"] * n / first["length"] for n in lengths], color=INK,
              linewidth=0.9, linestyle="--", label="in proportion to the length")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xticks(lengths, [short_tokens(length) for length in lengths])
    axes.set_xlabel("tokens of prompt and output")
    axes.grid(color=GRID, linewidth=0.8)


def draw_cluster_cache(result: Result) -> Figure:
    """A column for each device: memory held, then step time, by the slots of the cache.

    Raises:
        ConfigError: no such row was measured.
    """
    rows = measured(result.figures.get("rows", []), CACHE)
    if not rows:
        raise ConfigError("this result has no rows with caches of several sizes")
    devices = list(dict.fromkeys(row["device"] for row in rows))
    figure = Figure(figsize=(1.4 + 8.2 * len(devices), 9.4), layout="constrained")
    panels = figure.subplots(2, len(devices), squeeze=False, sharey="row")
    for column, device in enumerate(devices):
        here = [_with_cache(row, rows) for row in rows if row["device"] == device]
        upper, lower = panels[0][column], panels[1][column]
        _by_slots(upper, here, "cache_bytes", 2**20, "{:.1f}")
        _by_slots(lower, here, "mean_ms", 1.0, "{:.0f}")
        _paper_mark(upper, here, POLICY, "cache_bytes", 2**20 * PAPER_MEMORY,
                    f"the paper's least: 1/{PAPER_MEMORY} of what all layers hold")  # fmt: skip
        _paper_mark(lower, here, LRU, "mean_ms", PAPER_POLICY,
                    f"the paper's best: {PAPER_POLICY}x faster than LRU")  # fmt: skip
        upper.set_title(f"{device_name(device)}: slots, window and index, MiB (all memory)")
        lower.set_title(f"{device_name(device)}: a step, ms (hits)")
        lower.set_xlabel("slots of a layer, in selections (0: nothing stays)")
    named = [axes.get_legend_handles_labels() for axes in (panels[0][0], panels[1][0])]
    handles = {name: one for found in named for one, name in zip(*found, strict=True)}
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside lower center",
                  ncols=2 + (len(devices) > 1), fontsize=10)  # fmt: skip
    first = rows[0]
    figure.suptitle(
        f"DynaKV's cache on {result.figures['model']}, {short_tokens(first['length'])} tokens, "
        f"{first['ratio']:.0%} selected (fig. 14)",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _with_cache(row: Row, rows: Sequence[Row]) -> Row:
    """A row, and what its cache takes without tables and scratch."""
    ours = [
        one for one in rows if one["method"] == POLICY and row["method"] in (FLASH, VIRTUAL, BOTH)
        and (one["device"], one["reuse"]) == (row["device"], row["reuse"])
    ]  # fmt: skip
    return {**row, "cache_bytes": cache_bytes(row, ours[0] if ours else row)}


def _slot_places(rows: Sequence[Row]) -> tuple[list[float], list[str], float]:
    """Sizes of the cache, the methods that have bars, and the width of one."""
    sizes = sorted({row["reuse"] for row in rows})
    methods = [method for method in (POLICY, LRU, FLASH, VIRTUAL, BOTH)
               if any(row["method"] == method for row in rows)]  # fmt: skip
    return sizes, methods, _WIDTH / max(1, len(methods))


def _paper_mark(
    axes: Axes, rows: Sequence[Row], method: str, field: str, unit: float, label: str
) -> None:
    """A dash across a group of bars, where the paper's gain over one of them would be."""
    sizes, _, _ = _slot_places(rows)
    for row in rows:
        if row["method"] == method:
            place, height = sizes.index(row["reuse"]), row[field] / unit
            axes.plot([place - _WIDTH / 2, place + _WIDTH / 2], [height, height], color=INK,
                      linewidth=1.6, linestyle="--", label=label)  # fmt: skip
            label = "_again"


def _by_slots(axes: Axes, rows: Sequence[Row], field: str, unit: float, form: str) -> None:
    kinds = {
        POLICY: ("small ones stay, a share for updated", SERIES[0]),
        LRU: ("LRU", SERIES[1]), FLASH: ("layer-wise representatives, from flash", SERIES[3]),
        VIRTUAL: ("layer-wise slots: two pools, filled ahead", SERIES[2]),
        BOTH: ("both layer-wise", "#b5375a"),
    }  # fmt: skip
    sizes, methods, width = _slot_places(rows)
    for row in rows:
        if row["reuse"] == 0:
            place, colour, label = 0.0, FAINT, "two pools, nothing stays"
        elif row["method"] in kinds:
            label, colour = kinds[row["method"]]
            number = methods.index(row["method"])
            place = sizes.index(row["reuse"]) + (number - (len(methods) - 1) / 2) * width
        else:
            continue
        height = row[field] / unit
        if label in axes.get_legend_handles_labels()[1]:
            label = ""
        axes.bar(place, height, width=0.92 * width, color=colour, label=label or None)
        text = form.format(height)
        if field == "cache_bytes":
            text += f"\n({row['ledger_bytes'] / unit:.1f})"
        if field == "mean_ms" and row["hit_rate"]:
            text += f"\n({row['hit_rate']:.0%})"
        axes.annotate(text, (place, height), xytext=(0, 2), textcoords="offset points",
                      ha="center", fontsize=8.5, color=INK)  # fmt: skip
    axes.set_xticks(range(len(sizes)), [f"{size:g}" for size in sizes])
    axes.margins(y=0.22)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
