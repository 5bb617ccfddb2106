"""DynaKV's table 5 and figures 11 to 13, from the measured keys of `clusters`."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, short_tokens
from penstock.evaluate.result import Result
from research.clusters.table import (
    NAMES,
    PAPER_ACCESS,
    access_lengths,
    layout_sum,
    mean_length,
    paper_ratio,
)

_LAYOUTS = {
    "sequence": ("sequence\norder", FAINT), "packed": ("cluster by\ncluster", SERIES[3]),
    "intra": ("pools, any\norder", SERIES[2]), "inter": ("pools by co-\nretrieval", SERIES[0]),
    "gaps": ("same, gaps\nread along", SERIES[1]),
}  # fmt: skip
_COLOURS = {"static": SERIES[1], "local": SERIES[2], "adaptive": SERIES[0], "global": FAINT}


def draw_cluster_costs(result: Result) -> Figure:
    """Four panels: variance and attention found by method, loads by buffer, accesses, movement.

    Raises:
        ConfigError: a part was not measured.
    """
    found = result.figures
    if not all(part in found for part in ("methods", "buffers", "layouts")):
        raise ConfigError("this result lacks methods, buffers or layouts; run all --parts")
    figure = Figure(figsize=(13.2, 9.2), layout="constrained")
    (variance, mass), (loads, accesses) = figure.subplots(2, 2)
    _variance(variance, found["methods"])
    _mass(mass, found["methods"], float(result.settings["top"]))
    _loads(loads, found["buffers"]["rows"])
    _accesses(accesses, found["layouts"])
    for axes in (variance, mass, loads, accesses):
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    figure.suptitle(
        f"Clusters of {found['model']}'s keys, {short_tokens(found['prompt_tokens'])} tokens of "
        f"prompt, {short_tokens(found['output_tokens'])} of output",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _variance(axes: Axes, methods: list[dict[str, Any]]) -> None:
    """Bars, the paper's as marks: both in the variance of adaptive clusters."""
    unit = next(row["by_key"] for row in methods if row["update"] == "adaptive")
    for place, row in enumerate(methods):
        height = row["by_key"] / unit
        axes.bar(place, height, width=0.62, color=_COLOURS[row["update"]])
        axes.annotate(
            f"{height:.2f}", (place, height / 2), xytext=(0, 0), textcoords="offset points",
            ha="center", fontsize=10.5, color="white",
        )  # fmt: skip
        paper = None if row["update"] == "adaptive" else paper_ratio(row["update"])
        if paper is not None:
            axes.plot([place - 0.42, place + 0.42], [paper, paper], color=INK, linewidth=1.6,
                      linestyle="--", label=None if place else "the paper's")  # fmt: skip
    axes.set_xticks(
        range(len(methods)),
        [f"{NAMES[row['update']].replace(' (', chr(10) + '(')}\n{row['clusters']:.0f} clusters"
         for row in methods], fontsize=9.5,
    )  # fmt: skip
    top = max(*(row["by_key"] / unit for row in methods), paper_ratio("static") or 0.0)
    axes.set_ylim(0, 1.15 * top)
    axes.set_title("Variance within clusters at the end (adaptive: 1), table 5")
    axes.legend(frameon=False, fontsize=10, loc="upper right")


def _mass(axes: Axes, methods: list[dict[str, Any]], top: float) -> None:
    rows = [row for row in methods if "mass" in row]
    places = np.arange(len(rows) + 1)
    masses = [*(row["mass"] for row in rows), rows[-1]["best"]]
    colours = [*(_COLOURS[row["update"]] for row in rows), FAINT]
    axes.bar(places, masses, width=0.62, color=colours)
    for place, height in zip(places, masses, strict=True):
        axes.annotate(
            f"{height:.0%}", (place, height), xytext=(0, 3), textcoords="offset points",
            ha="center", fontsize=10, color=INK,
        )  # fmt: skip
    names = [f"{NAMES[row['update']].replace(' (', chr(10) + '(')}\nread {row['read']:.1%}"
             for row in rows]  # fmt: skip
    axes.set_xticks(places, [*names, f"no clusters,\nbest tokens\nread {top:.1%}"], fontsize=9.5)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title(f"Full attention on what the top {top:.0%} of the past holds")


def _loads(axes: Axes, rows: list[dict[str, Any]]) -> None:
    places = range(len(rows))
    base = rows[0]["split_loads_entries"]
    counts = [row["split_loads_entries"] for row in rows]
    axes.bar(places, counts, width=0.62, color=SERIES[0])
    for place, count in zip(places, counts, strict=True):
        less = "" if place == 0 else f"\n{base / count:.1f}x less" if count else "\nnone"
        axes.annotate(
            f"{count:,}{less}", (place, count), xytext=(0, 3), textcoords="offset points",
            ha="center", fontsize=9, color=INK,
        )  # fmt: skip
    axes.set_xticks(places, [str(row["buffer"]) for row in rows])
    axes.set_xlabel("entries of a layer that may wait for the split of their cluster")
    axes.set_ylim(0, 1.15 * max(*counts, 1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    share = base / rows[0]["retrieved_entries"]
    axes.set_title(
        f"Entries loaded only to be split, fig. 11 (paper: up to 2.32x less)\n"
        f"without buffers {share:.2%} of what is retrieved"
    )


def _accesses(axes: Axes, layouts: dict[str, Any]) -> None:
    packed = layout_sum(layouts, "packed", "moved_bytes")
    names = []
    for place, (name, (text, colour)) in enumerate(_LAYOUTS.items()):
        lengths = access_lengths(layouts, name, "access_lengths")
        mean, early = (
            mean_length(found)
            for found in (lengths, access_lengths(layouts, name, "early_lengths"))
        )
        axes.bar(place - 0.19, early, width=0.36, color=colour, alpha=0.45,
                 label=None if place != 1 else "first eighth of the steps")  # fmt: skip
        axes.bar(place + 0.19, mean, width=0.36, color=colour,
                 label=None if place != 1 else "all steps")  # fmt: skip
        for at, value in ((place - 0.19, early), (place + 0.19, mean)):
            axes.annotate(f"{value:.1f}", (at, value), xytext=(0, 3), textcoords="offset points",
                          ha="center", fontsize=9.5, color=INK)  # fmt: skip
        if name in PAPER_ACCESS:
            axes.plot([place - 0.42, place + 0.42], [PAPER_ACCESS[name]] * 2, color=INK,
                      linewidth=1.6, linestyle="--",
                      label="the paper's" if name == "sequence" else None)  # fmt: skip
        moved = layout_sum(layouts, name, "moved_bytes")
        ratio = "" if name == "packed" or not moved else f", 1/{packed / moved:,.0f}"
        names.append(f"{text}\n{_bytes(moved)}\nmoved{ratio}")
    axes.set_xticks(range(len(names)), names, fontsize=9.5)
    axes.set_title("Entries of an access, fig. 12\nbytes moved (of cluster by cluster), fig. 13")
    axes.set_ylim(top=1.2 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=10, loc="upper left", ncols=3)


def _bytes(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB" if count else "nothing"
