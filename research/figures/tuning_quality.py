"""Figure of `tuning.sweep`: quality against throughput of every setting, with pick and best."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, model_of
from penstock.evaluate.result import Result

Row = dict[str, Any]
_LEAST_KL = 1e-7
"""Drawn for what is not told from full attention."""
_ROLES = {
    "best": ("*", 17, INK, "best of the sweep"), "pick": ("o", 14, SERIES[1], "the tuner's pick"),
    "paper": ("s", 12, SERIES[3], "the paper's own search"),
}  # fmt: skip
"""Mark, size, colour, and what it is called."""


def has_quality(result: Result) -> bool:
    """Whether any setting was held to full attention (models with random weights are not)."""
    return any(
        row.get("kl") is not None
        for device in result.figures.get("devices", {}).values() for row in device["settings"]
    )  # fmt: skip


def draw_tuning_quality(result: Result) -> Figure:
    """A panel for each device: KL on held-out text over tokens/s, colours by group size.

    Raises:
        ConfigError: nothing was held to full attention.
    """
    if not has_quality(result):
        raise ConfigError("this result has no quality: its model has random weights")
    devices: dict[str, Row] = result.figures["devices"]
    figure = Figure(figsize=(1.6 + 4.6 * len(devices), 5.6), layout="constrained")
    panels = figure.subplots(1, len(devices), sharey=True, squeeze=False)[0]
    groups = sorted({row["group_tokens"] for d in devices.values() for row in d["settings"]})
    shades = colormaps["viridis"](np.linspace(0.0, 0.92, len(groups)))
    colours = dict(zip(groups, map(tuple, shades), strict=True))
    floor = result.figures["floor"]
    for axes, (name, device) in zip(panels, devices.items(), strict=True):
        _panel(axes, device["settings"], colours)
        axes.axhline(floor, color=FAINT, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
        axes.annotate(
            f"floor: {floor:g} nats", (0.0, floor), xytext=(5, 4), fontsize=9, color="#5b616b",
            xycoords=("axes fraction", "data"), textcoords="offset points",
        )  # fmt: skip
        axes.set_title(_title_of(name, device))
        axes.set_xlabel("measured tokens/s")
    panels[0].set_ylabel("KL from full attention, nats (log scale)")
    highest = max(row["kl"] for d in devices.values() for row in d["settings"])
    panels[0].set_ylim(None, 4 * max(floor, highest))
    figure.legend(handles=_legend(colours), frameon=False, loc="outside lower center", fontsize=10,
                  ncols=len(groups) + len(_ROLES))  # fmt: skip
    settings = result.settings
    figure.suptitle(
        f"Every setting that fits{model_of(result)}: {settings['batch']} x "
        f"{settings['context']:,} tokens, memory {settings['memory']}\n"
        "quality on documents that nothing was tuned on; to the right is faster, below is better",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _panel(axes: Axes, rows: Sequence[Row], colours: dict[int, Any]) -> None:
    for row in rows:
        place = row["tokens_per_s"], max(row["kl"], _LEAST_KL)
        axes.plot(*place, "o", markersize=5, color=colours[row["group_tokens"]], alpha=0.75,
                  markeredgewidth=0, zorder=2)  # fmt: skip
        for role in row["roles"]:
            mark, size, colour, _ = _ROLES[role]
            axes.plot(*place, mark, markersize=size, markerfacecolor="none", zorder=4,
                      markeredgecolor=colour, markeredgewidth=1.8)  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlim(0, None)
    axes.grid(color=GRID, linewidth=0.8)


def _title_of(name: str, device: Row) -> str:
    """The device, and what the pick reaches of the best."""
    title = "This machine's disk" if name == "real" else device["title"]
    title += " (simulated)" if name not in ("real", "memory") else ""
    share = device["summary"]["share_again"]["pick"]
    return title if share is None else f"{title}: run again, pick {share:.0%} of best"


def _legend(colours: dict[int, Any]) -> list[Line2D]:
    dots = [
        Line2D([], [], marker="o", linestyle="none", markersize=6, color=colour, label=f"G={group}")
        for group, colour in colours.items()
    ]  # fmt: skip
    roles = [
        Line2D([], [], marker=mark, linestyle="none", markersize=size * 0.7, color=colour,
               markerfacecolor="none", markeredgewidth=1.8, label=label)
        for mark, size, colour, label in _ROLES.values()
    ]  # fmt: skip
    return [*dots, *roles]
