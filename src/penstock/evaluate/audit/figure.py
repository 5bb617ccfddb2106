"""The figure of an audit: divergence by budget, and the attention that each layer keeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from penstock.core.errors import StorageError
from penstock.evaluate.audit.run import Fidelity
from penstock.evaluate.audit.verdict import best_of, budget_of, verdict
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, STYLE, write_picture

_LEAST_KL = 1e-5
"""Where less is drawn."""
_BELOW: Mapping[str, Any] = MappingProxyType({
    "frameon": False, "fontsize": 9, "loc": "upper center", "bbox_to_anchor": (0.5, -0.16),
    "columnspacing": 1.2, "handlelength": 1.4,
})  # fmt: skip
"""Of a legend."""


def write_audit_figure(
    audits: Sequence[Fidelity], layers: Sequence[int], path: Path, *, tolerance: float, title: str
) -> None:
    """Draw an audit of several budgets into a file, PNG, SVG or PDF by its ending.

    Args:
        layers: the model's number of each layer that is audited.
        title: above the verdict.

    Raises:
        StorageError: the file cannot be written.
    """
    with matplotlib.rc_context(STYLE):
        figure = draw_audit(audits, layers, tolerance=tolerance, title=title)
        try:
            write_picture(figure, path)
        except OSError as error:
            raise StorageError(f"cannot write the figure to {path}: {error.strerror}") from error


def draw_audit(
    audits: Sequence[Fidelity], layers: Sequence[int], *, tolerance: float, title: str
) -> Figure:
    """Two panels under the verdict; budgets that were refused are left out."""
    done = [audit for audit in audits if audit.refused is None]
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    figure.suptitle(
        f"{title}\n" + fill(verdict(audits, tolerance), 110), fontsize=10, ha="left", x=0.01,
        color=INK,
    )  # fmt: skip
    left, right = figure.subplots(1, 2)
    _draw_divergence(left, done, tolerance, best_of(audits, tolerance))
    _draw_layers(right, done, layers)
    return figure


def _draw_divergence(
    axes: Axes, done: Sequence[Fidelity], tolerance: float, best: Fidelity | None
) -> None:
    shares = [audit.ledger_bytes / audit.full_cache_bytes for audit in done]
    means = [max(audit.mean_kl or 0, _LEAST_KL) for audit in done]
    worst = [max(*audit.kl, _LEAST_KL) for audit in done]
    axes.axhline(tolerance, color=SERIES[1], linewidth=1, linestyle="--")
    axes.annotate(
        f"tolerance {tolerance:g}", (1, tolerance), xycoords=("axes fraction", "data"), ha="right",
        va="bottom", color=SERIES[1], fontsize=9,
    )  # fmt: skip
    axes.plot(shares, worst, color=FAINT, marker="_", linewidth=1, label="worst step")
    axes.plot(shares, means, color=SERIES[0], marker="o", label="mean of the steps")
    for share, mean, audit in zip(shares, means, done, strict=True):
        axes.annotate(
            budget_of(audit), (share, mean), (0, -13), textcoords="offset points", ha="center",
            fontsize=9, color=INK, fontweight="bold" if audit is best else "normal",
        )  # fmt: skip
    if shares:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(min(shares) / 1.3, max(shares) * 1.3)
        axes.set_ylim(bottom=min(means) / 3)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_minor_formatter("")
    axes.set_xticks(shares, [f"{share:.1%}" for share in shares])
    axes.minorticks_off()
    axes.set_xlabel("memory, of the full cache")
    axes.set_title("KL of the next token, nats")
    axes.grid(color=GRID)
    axes.legend(**_BELOW, ncols=2)


def _draw_layers(axes: Axes, done: Sequence[Fidelity], layers: Sequence[int]) -> None:
    shades = matplotlib.colormaps["viridis"]
    for number, audit in enumerate(done):
        colour = shades(0.85 * number / max(1, len(done) - 1))
        axes.plot(layers, audit.mass, color=colour, linewidth=1.6, label=budget_of(audit))
    axes.set_ylim(top=1)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("layer")
    axes.set_title("attention that is kept")
    axes.grid(color=GRID)
    if done:
        axes.legend(**_BELOW, ncols=len(done))
