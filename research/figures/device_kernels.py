"""The figure of `device_tier.kernels`: rates beside measured ceilings, k-means beside a prefill."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES
from penstock.evaluate.result import Result

_LINE = 0.25
"""Height of a row, in inches."""
_MOST_OF_PREFILL = 0.1
"""What k-means is wanted to take."""


def draw_device_kernels(result: Result) -> Figure:
    """Bars of the kernels that have a ceiling, a panel for each ceiling; dots for the torch twins.

    Where k-means was set beside a prefill, a last panel has its share by the size of blocks.

    Raises:
        ConfigError: no kernel has a ceiling.
    """
    rows = [row for row in result.figures["rows"] if "of_ceiling" in row]
    if not rows:
        raise ConfigError("no kernel of this result was measured against a ceiling")
    ceilings = list(dict.fromkeys(row["ceiling"] for row in rows))
    groups = [[row for row in rows if row["ceiling"] == name] for name in ceilings]
    shares = result.figures.get("clustering", [])
    heights = [len(group) + 1.5 for group in groups] + ([len(shares) + 1.5] if shares else [])
    figure = Figure(
        figsize=(10.0, 1.9 + 0.6 * len(heights) + _LINE * (sum(heights) - 1.5 * len(heights))),
        layout="constrained",
    )
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    limit = max(1.05, *(row["of_ceiling"] for row in rows))
    for axes, name, group in zip(panels[: len(groups), 0], ceilings, groups, strict=True):
        rate = result.figures["ceilings"][name]
        axes.set_title(f"{name}: {_rate(name, rate)}", fontsize=11)
        _panel(axes, group)
        axes.axvline(1.0, color=INK, linewidth=1.0)
        axes.set_xlim(0, 1.24 * limit)
    panels[len(groups) - 1][0].set_xlabel("share of the ceiling measured in the same run")
    if shares:
        _prefill_panel(panels[-1][0], shares)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=2)
    where = result.machine.get("gpu") if result.settings.get("on") == "cuda" else "CPU"
    figure.suptitle(f"Kernels of the device tier, {where}", fontsize=12, x=0.01, ha="left")
    return figure


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    places = range(len(rows))
    axes.barh(places, [row["of_ceiling"] for row in rows], height=0.72, color=SERIES[0],
              label="kernel")  # fmt: skip
    twins = [(i, row["of_ceiling"] * row["us"] / row["twin_us"]) for i, row in enumerate(rows)
             if row.get("twin_us")]  # fmt: skip
    axes.scatter([share for _, share in twins], [i for i, _ in twins], s=20, color=SERIES[1],
                 zorder=3, label="plain torch twin")  # fmt: skip
    for place, row in zip(places, rows, strict=True):
        rate = row.get("flops_per_s") or row["bytes_per_s"]
        end = max(1.0, row["of_ceiling"])
        axes.annotate(
            f"{_rate(row['ceiling'], rate)}, {_time(row['us'])}", (end, place),
            xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, color=INK,
        )  # fmt: skip
    axes.set_yticks(places, [f"{row['kernel']}: {row['size']}" for row in rows], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_color(FAINT)


def _prefill_panel(axes: Axes, entries: list[dict[str, Any]]) -> None:
    """k-means of all layers as a share of the prefill of the same prompt, and what is wanted."""
    places = range(len(entries))
    axes.barh(places, [entry["of_prefill"] for entry in entries], height=0.72, color=SERIES[0])
    for place, entry in zip(places, entries, strict=True):
        axes.annotate(
            f"{entry['of_prefill']:.0%}, {entry['all_layers_s']:.2f} s",
            (entry["of_prefill"], place), xytext=(6, 0), textcoords="offset points", va="center",
            fontsize=8, color=INK,
        )  # fmt: skip
    axes.axvline(_MOST_OF_PREFILL, color=SERIES[1], linewidth=1.4)
    first = entries[0]
    axes.set_title(
        f"k-means of {first['layers']} layers beside a prefill of {first['prefill_s']:.2f} s",
        fontsize=11,
    )
    axes.set_xlabel(f"share of the prefill; the line: {_MOST_OF_PREFILL:.0%} are wanted")
    axes.set_yticks(places, [entry["size"] for entry in entries], fontsize=8.5)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_xlim(0, 1.24 * max(_MOST_OF_PREFILL, *(entry["of_prefill"] for entry in entries)))
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_color(FAINT)


def _rate(ceiling: str, rate: float) -> str:
    if ceiling == "matmul":
        return f"{rate / 1e12:.3g} TFLOP/s"
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GB/s"


def _time(us: float) -> str:
    return f"{us / 1e3:,.1f} ms" if us >= 1000 else f"{us:.3g} us"
