"""Keys of single heads in a plane: prompt and output, and their clusters before and after."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, INK, SERIES, short_tokens
from penstock.evaluate.result import Result
from research.clusters.picture import numbers

_COLOURS = 20
_MANY = 400
"""Clusters whose marks would hide the keys."""


def draw_cluster_keys(result: Result) -> Figure:
    """A row for each head: when keys came, the prompt's clusters, the clusters at the end.

    As the paper's figures 1 and 4; lines join the output's keys with the centres of their clusters.

    Raises:
        ConfigError: no head was kept.
    """
    pictures = result.figures.get("pictures")
    if not pictures:
        raise ConfigError("this result has no picture of keys")
    figure = Figure(figsize=(13.2, 0.9 + 4.3 * len(pictures)), layout="constrained")
    panels = figure.subplots(len(pictures), 3, squeeze=False)
    for row, one in zip(panels, pictures, strict=True):
        _when(row[0], one)
        _joined(row[1], one, "before", "Static, the prompt's clusters")
        _joined(row[2], one, "after", "Adaptive, clusters at the end")
        for axes in row:
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_visible(True)
                spine.set_color("#d3d6db")
        row[0].set_ylabel(
            f"{one['name']}\n{one['variance_shown']:.0%} of the variance in this plane",
            fontsize=10.5,
        )  # fmt: skip
    handles, names = panels[0][0].get_legend_handles_labels()
    more, more_names = panels[0][2].get_legend_handles_labels()
    figure.legend(
        [*handles, *more], [*names, *more_names], frameon=False, ncols=5, fontsize=10,
        loc="outside lower center", handletextpad=0.2,
    )  # fmt: skip
    found = result.figures
    figure.suptitle(
        f"Keys of {found['model']}, {short_tokens(found['prompt_tokens'])} tokens of prompt and "
        f"{short_tokens(found['output_tokens'])} of output, in the plane where they differ most",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _when(axes: Axes, one: dict[str, Any]) -> None:
    token, x, y = (numbers(one[name]) for name in ("token", "x", "y"))
    prompt, half = one["prompt_tokens"], (one["prompt_tokens"] + one["tokens"]) // 2
    for name, which, colour in (
        ("prompt", token < prompt, FAINT),
        ("output, first half", (token >= prompt) & (token < half), SERIES[0]),
        ("output, second half", token >= half, SERIES[1]),
    ):
        axes.scatter(x[which], y[which], s=7, color=colour, linewidths=0, alpha=0.85)
        axes.scatter([], [], s=40, color=colour, linewidths=0, label=f"key of the {name}")
    axes.set_title("When a key came", fontsize=10.5)


def _joined(axes: Axes, one: dict[str, Any], kind: str, title: str) -> None:
    """Points coloured by cluster; late ones joined with their cluster's centre."""
    token, x, y = (numbers(one[name]) for name in ("token", "x", "y"))
    cluster = numbers(one[kind]["cluster"])
    centres = np.stack([numbers(one[kind]["x"]), numbers(one[kind]["y"])], axis=1)
    palette = matplotlib.colormaps["tab20"](np.arange(_COLOURS))
    colours = palette[(7 * cluster) % _COLOURS]
    output = token >= one["prompt_tokens"]
    places = np.stack([x, y], axis=1)
    lines = np.stack([places[output], centres[cluster[output]]], axis=1)
    axes.add_collection(LineCollection(list(lines), colors=colours[output], linewidths=0.5,
                                       alpha=0.55))  # fmt: skip
    axes.scatter(x[~output], y[~output], s=6, color="#c3c7cd", linewidths=0)
    axes.scatter(x[output], y[output], s=6, color=colours[output], linewidths=0)
    new = numbers(one[kind]["first_token"]) >= one["prompt_tokens"]
    size = 20 if len(centres) < _MANY else 7
    for which, marker, edge, name in (
        (~new, "o", INK, "centre of a cluster with prompt keys"),
        (new, "D", SERIES[1], "with output keys alone"),
    ):
        axes.scatter(
            centres[which, 0], centres[which, 1], s=size, marker=marker, facecolors="white",
            edgecolors=edge, linewidths=0.9, zorder=3, label=name,
        )  # fmt: skip
    axes.set_title(f"{title}: {len(centres)}", fontsize=10.5)
