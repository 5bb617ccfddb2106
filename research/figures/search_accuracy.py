"""Accuracy against number of beams: verified search, best of N, single samples and greedy."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, SERIES, model_of
from penstock.evaluate.result import Result
from research.search_accuracy.searches import (
    BEST_LOGPROB,
    BEST_VERIFIED,
    GREEDY,
    LOGPROB_SEARCH,
    SINGLE,
    VERIFIED,
)
from research.search_accuracy.table import METHOD_NAMES

_LINES = (
    (VERIFIED, SERIES[0], -1, True), (LOGPROB_SEARCH, SERIES[2], -1, False),
    (BEST_VERIFIED, SERIES[1], 1, True), (BEST_LOGPROB, SERIES[3], 1, False),
)  # fmt: skip
"""Method, colour, side, and whether it is the verifier's: a dot with its interval. Log-probability
is a ring that fits around the dot, for it chooses the same where the model is sure."""
_APART = 0.03
"""Of a mark from its number of beams, in doublings: intervals must not lie on each other."""


def draw_search_accuracy(result: Result) -> Figure:
    """A panel for each temperature: share of whole paths that are right, with 95 % intervals.

    Raises:
        ConfigError: nothing was measured.
    """
    rows = result.figures.get("rows")
    if not rows:
        raise ConfigError("this result of search_accuracy has no rows")
    temperatures = sorted({row["temperature"] for row in rows})
    figure = Figure(figsize=(1.4 + 5.3 * len(temperatures), 5.2), layout="constrained")
    [panels] = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)
    for axes, temperature in zip(panels, temperatures, strict=True):
        _panel(axes, [row for row in rows if row["temperature"] == temperature])
        single = _reference(result, SINGLE, temperature)
        axes.axhline(single["accuracy"], color=FAINT, linestyle=":", linewidth=1.6, zorder=1,
                     label=METHOD_NAMES[SINGLE])  # fmt: skip
        axes.set_title(f"temperature {temperature:g}: {_short(single)} of single samples right")
    greedy = _reference(result, GREEDY, 0.0)
    panels[0].set_ylabel("whole paths right")
    drawn = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    labels = [METHOD_NAMES[method] for method in (*(line[0] for line in _LINES), SINGLE)]
    figure.legend([drawn[label] for label in labels], labels, loc="outside lower center",
                  ncols=3, frameon=False)  # fmt: skip
    figure.suptitle(_title(result, max(row["documents"] for row in rows), greedy),
                    fontsize=12, x=0.01, ha="left")  # fmt: skip
    return figure


def _title(result: Result, documents: int, greedy: dict[str, Any]) -> str:
    found, settings = result.figures, result.settings
    return (
        f"Pointer chasing over {found['hops']} hops{model_of(result)}: {documents} documents of "
        f"{settings['tokens']:,} tokens, greedy decoding {_short(greedy)} right\n"
        f"steps of {settings['step']} tokens, {settings['width']} continuations of each surviving "
        "beam; bars: 95 % intervals with the verifier"
    )


def _panel(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    beams = sorted({row["beams"] for row in rows})
    for method, colour, side, by_verifier in _LINES:
        mine = sorted(
            (row for row in rows if row["method"] == method), key=lambda row: int(row["beams"])
        )
        places = [row["beams"] * 2.0 ** (side * _APART) for row in mine]
        shares = [row["accuracy"] for row in mine]
        if by_verifier:
            limits = [
                [row["accuracy"] - row["low"] for row in mine],
                [row["high"] - row["accuracy"] for row in mine],
            ]
            axes.errorbar(
                places, shares, yerr=limits, color=colour, marker="o", markersize=5.5,
                linewidth=1.9, elinewidth=1.1, capsize=2.5, label=METHOD_NAMES[method],
            )  # fmt: skip
        else:
            axes.plot(
                places, shares, color=colour, marker="o", markersize=10.5, linestyle="--",
                linewidth=1.3, markerfacecolor="none", label=METHOD_NAMES[method],
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(beams, [str(count) for count in beams])
    axes.minorticks_off()
    axes.set_xlabel("beams (candidates of a step), or N samples")
    axes.set_ylim(-0.04, 1.06)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def _reference(result: Result, method: str, temperature: float) -> dict[str, Any]:
    return next(
        row for row in result.figures["references"]
        if row["method"] == method and row["temperature"] == temperature
    )  # fmt: skip


def _short(row: dict[str, Any]) -> str:
    share = 100 * row["accuracy"]
    return f"{share:.1f} %" if 0 < share < 1 else f"{share:.0f} %"
