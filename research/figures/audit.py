"""The figure of an audit: attention mass that each policy captures, layer by layer."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.audit.table import format_nats
from penstock.evaluate.result import Result

_COLOURS = (
    "#0b6e99", "#c96a2b", "#4b8b3b", "#7a4fa3", "#b3374b", "#8a8f98", "#1f9e9e", "#a58a1b",
)  # fmt: skip
_MARKERS = "os^DvPX<>"


def draw_audit(result: Result) -> Figure:
    """Captured mass over the layers, a line for each policy, the best first.

    Raises:
        ConfigError: no policy of the result was audited.
    """
    figures = result.figures
    audits = [each for each in figures.get("policies", ()) if each["refused"] is None]
    if not audits:
        raise ConfigError("no policy of this result was audited")
    audits.sort(key=lambda each: -float(each["mean_mass"]))
    layers = figures["layers"]
    figure = Figure(figsize=(8.0, max(4.4, 2.2 + 0.42 * len(audits))), layout="constrained")
    axes = figure.subplots()
    for number, each in enumerate(audits):
        _draw_line(axes, layers, each, number)
    lowest = min(min(each["mass"]) for each in audits)
    axes.set_ylim(max(0.0, lowest - 0.06) if lowest > 0.5 else 0.0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    axes.grid(axis="y", color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=11)
    axes.set_xlabel("layer", fontsize=12)
    axes.set_ylabel("share of full attention's probability", fontsize=12)
    figure.suptitle(_title(result), fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.legend(
        frameon=False, fontsize=10.5, loc="outside right center", title="mean over layers; KL",
        title_fontsize=10.5, alignment="left", labelspacing=0.7,
    )  # fmt: skip
    return figure


def _draw_line(axes: Axes, layers: list[int], audit: dict[str, Any], number: int) -> None:
    kl = format_nats(audit["mean_kl"])
    label = f"{audit['setting']}\n{audit['mean_mass']:.1%}; {kl} nats"
    axes.plot(
        layers, audit["mass"], color=_COLOURS[number % len(_COLOURS)], linewidth=2.0,
        marker=_MARKERS[number % len(_MARKERS)], markersize=6.5, label=label,
        linestyle="-" if number < len(_COLOURS) else "--",
    )  # fmt: skip


def _title(result: Result) -> str:
    figures = result.figures
    tokens = figures["prompt_tokens"]
    length = f"{tokens[0]:,}" if len(tokens) == 1 else f"{len(tokens)} x {max(tokens):,}"
    return (
        "Attention mass that each policy captures, by layer\n"
        f"{result.settings['model']}, {length} tokens, {figures['steps']} decode steps"
    )
