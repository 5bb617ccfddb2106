"""Which tokens cheap scores choose: overlap with the exact choice, by rule, bits and layer."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, short_tokens
from penstock.evaluate.result import Result

TARGETS = {8: 0.98, 4: 0.93}
"""Overlap that INT8 and INT4 should come to."""
_LABELS = {
    "products": "products\n(the paper's)", "last": "attention,\nlast step's\nlog-sums",
    "hot": "this step's,\nhot pool", "hot_sample": "hot pool and\na sample",
    "now": "this step's,\neverything", "engine": "same, hot\nones exact",
}  # fmt: skip
_BITS = {16: ("keys as they are", FAINT), 8: ("INT8", SERIES[0]), 4: ("INT4", SERIES[1])}
_LINES = (
    ("engine", 8, SERIES[0], "everything's log-sums, hot ones exact"),
    ("engine", 4, SERIES[1], "the same"), ("hot", 8, FAINT, "the hot pool's log-sums"),
    ("last", 8, SERIES[2], "the last step's log-sums"), ("products", 8, SERIES[3], "products"),
)  # fmt: skip


def draw_near_agreement(result: Result) -> Figure:
    """Bars by rule and bits, the worst layer as a mark, and lines by layer.

    Raises:
        ConfigError: nothing was measured.
    """
    rows = result.figures.get("rows")
    if not rows:
        raise ConfigError("this result of near_storage agreement has no rows")
    top = max(row["top"] for row in rows)
    figure = Figure(figsize=(13.2, 4.8), layout="constrained")
    bars, lines = figure.subplots(1, 2, width_ratios=(1.5, 1))
    _bars(bars, rows, top)
    _lines(lines, rows, top, result.figures["layers"])
    for axes in (bars, lines):
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        for bits, target in TARGETS.items():
            axes.axhline(target, color=_BITS[bits][1], linewidth=0.9, linestyle=":")
    found = result.figures
    figure.suptitle(
        f"Best {top:.0%} of {short_tokens(found['prompt_tokens'])} tokens on {found['model']} "
        f"({found['output']}); hot pool {found['hot_share']:.0%}",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _row(rows: list[dict[str, Any]], rule: str, bits: int, top: float) -> dict[str, Any] | None:
    found = [row for row in rows if (row["rule"], row["bits"], row["top"]) == (rule, bits, top)]
    return found[0] if found else None


def _bars(axes: Axes, rows: list[dict[str, Any]], top: float) -> None:
    for place, rule in enumerate(_LABELS):
        for number, (bits, (label, colour)) in enumerate(_BITS.items()):
            row = _row(rows, rule, bits, top)
            if row is None:
                continue
            at = place + (number - 1) * 0.28
            axes.bar(at, row["overlap"], width=0.25, color=colour,
                     label=label if place == 0 else None)  # fmt: skip
            axes.plot(at, min(row["overlap_of_layer"]), "_", color=INK, markersize=8,
                      label="worst layer" if place == number == 0 else None)  # fmt: skip
            axes.annotate(f"{100 * row['overlap']:.1f}", (at, row["overlap"]), xytext=(0, 2),
                          textcoords="offset points", ha="center", fontsize=8,
                          color=INK)  # fmt: skip
    axes.set_xticks(range(len(_LABELS)), list(_LABELS.values()), fontsize=9)
    axes.set_ylim(0, 1.3)
    axes.set_yticks([0.2 * tick for tick in range(6)])
    axes.set_title("Chosen tokens that exact column sums choose too")
    axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=4)


def _lines(axes: Axes, rows: list[dict[str, Any]], top: float, layers: list[int]) -> None:
    for rule, bits, colour, name in _LINES:
        row = _row(rows, rule, bits, top)
        if row is not None:
            axes.plot(layers, row["overlap_of_layer"], marker="o", markersize=4, color=colour,
                      label=f"{name}, INT{bits}")  # fmt: skip
    axes.set_xlabel("layer")
    axes.set_xticks(layers[:: max(1, len(layers) // 8)])
    axes.set_ylim(0, 1.02)
    axes.set_title("The same by layer")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
