"""The figure of `device_tier.kernels`: each kernel's rate as a share of the measured ceiling."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.bench.figures.style import FAINT, GRID, INK, SERIES
from penstock.bench.result import Result
from penstock.core.errors import ConfigError

_LINE = 0.25
"""Height of a row, in inches."""


def draw_device_kernels(result: Result) -> Figure:
    """Bars of the kernels that have a ceiling, a panel for each ceiling; dots for the torch twins.

    Raises:
        ConfigError: no kernel has a ceiling.
    """
    rows = [row for row in result.figures["rows"] if "of_ceiling" in row]
    if not rows:
        raise ConfigError("no kernel of this result was measured against a ceiling")
    ceilings = list(dict.fromkeys(row["ceiling"] for row in rows))
    groups = [[row for row in rows if row["ceiling"] == name] for name in ceilings]
    figure = Figure(
        figsize=(10.0, 1.6 + 0.55 * len(groups) + _LINE * len(rows)), layout="constrained"
    )
    panels = figure.subplots(
        len(groups), 1, squeeze=False, height_ratios=[len(group) + 1.5 for group in groups]
    )
    limit = max(1.05, *(row["of_ceiling"] for row in rows))
    for axes, name, group in zip(panels[:, 0], ceilings, groups, strict=True):
        rate = result.figures["ceilings"][name]
        axes.set_title(f"{name}: {_rate(name, rate)}", fontsize=11)
        _panel(axes, group)
        axes.axvline(1.0, color=INK, linewidth=1.0)
        axes.set_xlim(0, 1.24 * limit)
    panels[-1][0].set_xlabel("share of the ceiling measured in the same run")
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


def _rate(ceiling: str, rate: float) -> str:
    if ceiling == "matmul":
        return f"{rate / 1e12:.3g} TFLOP/s"
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GB/s"


def _time(us: float) -> str:
    return f"{us / 1e3:,.1f} ms" if us >= 1000 else f"{us:.3g} us"
