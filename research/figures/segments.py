"""The figure of LouisKV's segments: their lengths, and how often each layer begins one."""

from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.figure_style import GRID, model_of
from penstock.evaluate.result import Result
from penstock.evaluate.retrieval_counts import LENGTHS, Counts, add_counts
from penstock.methods.louiskv.policy import LouisKV


def draw_segments(result: Result) -> Figure:
    """Segments by length, retrieving steps by layer, and how alike neighbouring layers cut.

    A colour for each tau, all lengths, budgets and tasks together (LouisKV, figs. 14 and 15).

    Raises:
        ConfigError: no setting went by tau.
    """
    by_tau = _by_tau(result)
    if not by_tau:
        raise ConfigError("no setting of this result has semantic boundaries")
    figure = Figure(figsize=(13.8, 4.6), layout="constrained")
    lengths, layers, alike = figure.subplots(1, 3, width_ratios=(1.35, 1, 1))
    shades = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.82, len(by_tau)))
    width, longest = 0.84 / len(by_tau), 0
    for number, (tau, counts) in enumerate(sorted(by_tau.items())):
        look: dict[str, Any] = {"color": shades[number], "label": f"\u03c4 {tau:g}"}
        bins = np.array(counts["lengths"], dtype=float)
        at = np.arange(len(bins)) + (number + 0.5) * width - 0.42
        lengths.bar(at, bins / bins.sum(), width, **look)
        longest = max(longest, int(bins.nonzero()[0].max()))
        steps, retrievals = np.array(counts["steps"]), np.array(counts["retrievals"])
        layers.plot(range(len(steps)), retrievals / steps, marker="o", markersize=5, **look)
        both, either = np.array(counts["both"], dtype=float), np.array(counts["either"])
        alike.plot(
            np.arange(len(both)) + 0.5, both / np.maximum(either, 1), marker="o", markersize=5,
            **look,
        )  # fmt: skip
    lengths.set_xticks(range(longest + 1), _bin_names()[: longest + 1], fontsize=9)
    lengths.set_xlim(-0.6, longest + 0.6)
    lengths.set_xlabel("steps of a segment")
    lengths.set_title("Segments by length")
    _by_layer(layers, "layer", "Steps that retrieve, by layer")
    _by_layer(alike, "between layers (of what either has)", "Boundaries that neighbours share")
    for axes in (lengths, layers, alike):
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(axis="y", color=GRID, linewidth=0.7)
    lengths.legend(frameon=False, fontsize=10)
    figure.suptitle(
        f"Semantic boundaries of LouisKV{model_of(result)}, all tasks and budgets together",
        fontsize=11, fontweight="bold", x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _by_layer(axes: Axes, name: str, title: str) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    axes.set_xlabel(name)
    axes.set_title(title)


def _bin_names() -> list[str]:
    edges = [0, *LENGTHS]
    names = [
        str(high) if high - low == 1 else f"{low + 1}\u2013{high}" for low, high in pairwise(edges)
    ]
    return [*names, f">{LENGTHS[-1]}"]


def _by_tau(result: Result) -> dict[float, Counts]:
    """Counts by threshold, of the lengths, budgets and tasks that all thresholds answered."""
    cells: dict[float, dict[tuple[Any, ...], Counts]] = {}
    for cell in result.figures["cells"]:
        policy = parse_setting(cell["setting"]).policy
        if not cell.get("retrieval") or not isinstance(policy, LouisKV):
            continue
        if policy.boundaries == "adaptive" and policy.units != "pages":
            key = (cell["length"], cell["task"], policy.selected_tokens)
            cells.setdefault(policy.tau, {})[key] = cell["retrieval"]
    shared = set.intersection(*(set(found) for found in cells.values())) if cells else set()
    out: dict[float, Counts] = {}
    for tau, found in cells.items():
        for key in shared:
            both = add_counts(out.get(tau), found[key])
            assert both is not None
            out[tau] = both
    return out
