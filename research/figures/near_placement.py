"""HillInfer's pools: what moves between them per decode step, by placement."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, short_tokens
from penstock.evaluate.result import Result
from research.near_storage.placement import WARM_STEPS
from research.near_storage.table import GOAL, naive_row, times_less

_RULES = {
    "naive": ("naive (pool: the step's best)", FAINT), "pin": ("+ pinning", SERIES[3]),
    "selected": ("only selected tokens come in", SERIES[2]),
    "table": ("+ hit table", SERIES[1]), "both": ("+ hit table and pinning", SERIES[0]),
}  # fmt: skip
_WIDTH = 0.16


def draw_near_placement(result: Result) -> Figure:
    """Traffic by pool and rule for each alpha, share of hits, and traffic over the decode.

    Raises:
        ConfigError: no rule was measured.
    """
    rows = result.figures.get("rows")
    if not rows:
        raise ConfigError("this result of near_storage placement has no rules")
    alphas = sorted({row["alpha"] for row in rows})
    figure = Figure(figsize=(13.2, 9.2), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    least, most = alphas[0], alphas[-1]
    _traffic(panels[0], [row for row in rows if row["alpha"] == least], least, legend=True)
    _traffic(panels[1], [row for row in rows if row["alpha"] == most], most, legend=False)
    _hits(panels[2], rows, alphas)
    _steps(panels[3], rows, most)
    for axes in panels:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    found = result.figures
    figure.suptitle(
        f"Hot and cold pools of {found['model']}, {short_tokens(found['prompt_tokens'])} tokens of "
        f"prompt, {found['output_tokens']:,} of output ({found['output']}); importance by exact "
        "attention", fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _traffic(axes: Axes, rows: list[dict[str, Any]], alpha: float, *, legend: bool) -> None:
    """Bars of bytes both ways, after the first steps; how often less than naive above them."""
    pools = sorted({row["hot_share"] for row in rows})
    top = max(row["moved_bytes_later"] for row in rows) / 1024
    for place, pool in enumerate(pools):
        for number, (rule, (label, colour)) in enumerate(_RULES.items()):
            [row] = [one for one in rows if one["hot_share"] == pool and one["rule"] == rule]
            at, height = place + (number - 2) * _WIDTH, row["moved_bytes_later"] / 1024
            axes.bar(at, height, width=0.9 * _WIDTH, color=colour,
                     label=label if legend and place == 0 else None)  # fmt: skip
            if rule != "naive":
                less = times_less(rows, row, "moved_bytes_later")
                axes.annotate(
                    f"{less:.1f}x" if less < 10 else f"{less:.0f}x", (at, height), xytext=(0, 2),
                    textcoords="offset points", ha="center", fontsize=8, color=INK,
                    fontweight="bold" if rule == "both" else "normal",
                )  # fmt: skip
            if rule == "both" and "clairvoyant_later" in row:
                naive = naive_row(rows, row)
                fewest = naive["moved_bytes_later"] / 1024 * (
                    row["clairvoyant_later"]["mean"] / max(1e-9, naive["promoted_later"]["mean"])
                )  # fmt: skip
                axes.plot([at - _WIDTH / 2, at + _WIDTH / 2], [fewest] * 2, color=INK,
                          linewidth=1.6, label="if the future were known"
                          if legend and place == 0 else None)  # fmt: skip
    axes.set_xticks(range(len(pools)), [f"{pool:.0%} of the past hot" for pool in pools])
    axes.set_ylim(0, (1.45 if legend else 1.12) * top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f} KiB"))
    axes.set_title(
        f"Moved between the pools, a step and layer, {alpha:.0%} selected\n"
        f"(goal: both ideas {GOAL:.0f}x less than naive)"
    )
    if legend:
        axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)


def _hits(axes: Axes, rows: list[dict[str, Any]], alphas: list[float]) -> None:
    """Share of what is selected that was hot already, by size of the pool."""
    for alpha, style in {alphas[0]: ":", alphas[-1]: "-"}.items():
        for rule in ("naive", "both"):
            found = sorted(
                (row["hot_share"], row["hot_share_of_selected_later"]) for row in rows
                if row["rule"] == rule and row["alpha"] == alpha
            )  # fmt: skip
            axes.plot(*zip(*found, strict=True), linestyle=style, marker="o", markersize=4,
                      color=_RULES[rule][1],
                      label=f"{_RULES[rule][0]}, {alpha:.0%} selected")  # fmt: skip
    pools = [row["hot_share"] for row in rows]
    axes.plot([min(pools), max(pools)], [min(pools), max(pools)], color=GRID, linewidth=1.4)
    axes.annotate("by chance", (max(pools), max(pools)), xytext=(-2, -4), ha="right", va="top",
                  textcoords="offset points", fontsize=9, color=FAINT)  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("hot pool, share of the past")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("Selected tokens that were hot already")
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _steps(axes: Axes, rows: list[dict[str, Any]], alpha: float) -> None:
    """Tokens promoted at each step, in the middle pool."""
    pools = sorted({row["hot_share"] for row in rows if row["alpha"] == alpha})
    pool = pools[len(pools) // 2]
    for rule, (label, colour) in _RULES.items():
        [row] = [one for one in rows if one["rule"] == rule and one["alpha"] == alpha
                 and one["hot_share"] == pool]  # fmt: skip
        values = np.array(row["promoted_of_step"]) / row["selected"]
        axes.plot(values, color=colour, linewidth=1.2, label=label)
    axes.axvspan(0, WARM_STEPS, color=GRID, alpha=0.6, linewidth=0)
    axes.annotate("not counted", (1, 0.98), xycoords=("data", "axes fraction"), va="top",
                  fontsize=9, color=FAINT)  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("decode step")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title(f"Promoted, in what is selected ({alpha:.0%}), pool of {pool:.0%}")
