"""HillInfer's figures 12, 13, 16 and what decides them, from the simulated SmartSSD PC."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, short_tokens
from penstock.evaluate.result import Result
from research.near_storage.smartssd_sweep import RIVALS
from research.near_storage.smartssd_table import gains, row_of

Row = dict[str, Any]
_LOOKS = {
    "full": (FAINT, "--"), "h2o-like": (SERIES[1], "--"), "prefetch-based": (SERIES[2], "--"),
    "leoam-like": (SERIES[3], "--"), "hillinfer, FP16 keys": (SERIES[0], ":"),
    "hillinfer, INT8 codes": (SERIES[0], "-"), "hillinfer, INT4 codes": (SERIES[0], "-."),
}  # fmt: skip
_MOST_BARS = 8
"""Constants shown of the sensitivity: those that tell most."""


def _rows(result: Result) -> list[Row]:
    """Of the first model.

    Raises:
        ConfigError: there are none.
    """
    rows: list[Row] = result.figures.get("rows", [])
    if not rows:
        raise ConfigError("this result has no rows; run research.near_storage.smartssd")
    return [row for row in rows if row["model"] == rows[0]["model"]]


def _title(figure: Figure, result: Result, rows: Sequence[Row], what: str) -> None:
    first, locality = rows[0], result.figures["locality"]["source"]
    figure.suptitle(
        f"{what}: simulated RTX 4090 PC with a SmartSSD, {first['model']}, batch "
        f"{first['batch']}, top {first['alpha']:.0%}; locality {locality}",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip


def draw_smartssd(result: Result) -> Figure:
    """Latency of a step by context, and speed-ups beside the paper's range.

    Raises:
        ConfigError: nothing was simulated.
    """
    rows = _rows(result)
    figure = Figure(figsize=(13.2, 5.4), layout="constrained")
    latency, gain = figure.subplots(1, 2)
    spots = sorted({row["tokens"] for row in rows})
    model = rows[0]["model"]
    for name, (colour, dashes) in _LOOKS.items():
        times = [row_of(rows, model, tokens, name)["step_ms"] for tokens in spots]
        latency.plot(spots, times, dashes, color=colour, marker="o", markersize=4, label=name)
    latency.set_yscale("log")
    latency.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    latency.set_ylabel("milliseconds of a decode step (log)")
    latency.set_title("Latency, fig. 12")
    latency.legend(frameon=False, fontsize=9.5)
    stored = [row_of(rows, model, tokens, "full")["storage_share"] for tokens in spots]
    _length_ticks(latency, spots, stored)
    least, most = result.figures["paper_speedup"]
    gain.axhspan(least, most, color=GRID, label=f"the paper's range, {least} to {most}x")
    gain.axhline(1.0, color=FAINT, linewidth=0.8)
    for rival in RIVALS:
        for ours, dashes in (("hillinfer, INT8 codes", "-"), ("hillinfer, INT4 codes", "-.")):
            over = [gains(rows, row_of(rows, model, tokens, ours))[rival] for tokens in spots]
            gain.plot(spots, over, dashes, color=_LOOKS[rival][0], marker="o", markersize=4,
                      label=f"{ours.partition(', ')[2][:4]} over {rival}")  # fmt: skip
    same = [gains(rows, row_of(rows, model, tokens, "hillinfer, INT4 codes"), "same_drive_ms")
            for tokens in spots]  # fmt: skip
    gain.plot(spots, [over["h2o-like"] for over in same], ":", color=FAINT, marker="o",
              markersize=4, label="INT4 over h2o-like, no faster SSD")  # fmt: skip
    gain.set_yscale("log")
    gain.set_ylim(0.2, 1.2 * most)
    gain.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "1", "2", "4", "8"])
    gain.set_title("Speed-up of HillInfer, fig. 13")
    gain.legend(frameon=False, fontsize=9, ncols=2, loc="lower left")
    gain.set_ylabel("step time over step time (log)")
    _length_ticks(gain, spots, stored)
    _title(figure, result, rows, "A decode step")
    return figure


def _length_ticks(axes: Axes, spots: Sequence[int], stored: Sequence[float]) -> None:
    axes.set_xscale("log")
    names = [f"{short_tokens(tokens)}\n{share:.0%}" for tokens, share in
             zip(spots, stored, strict=True)]  # fmt: skip
    axes.set_xticks(spots, names)
    axes.minorticks_off()
    axes.set_xlabel("tokens of context; below, KV that GPU and host memory cannot hold")
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def draw_split(result: Result) -> Figure:
    """Time of a layer's evaluation by beta, Eq. 4's and the best one marked.

    Raises:
        ConfigError: nothing was simulated.
    """
    rows = _rows(result)
    sweeps = result.figures["splits"]
    figure = Figure(figsize=(13.2, 3.3 * ((len(sweeps) + 1) // 2)), layout="constrained")
    panels = figure.subplots((len(sweeps) + 1) // 2, 2, squeeze=False).ravel()
    for axes, sweep in zip(panels, sweeps, strict=False):
        points = [point for point in sweep["points"] if point["beta"]]
        axes.plot([point["beta"] for point in points], [point["ms"] for point in points],
                  color=SERIES[0])  # fmt: skip
        for key, mark, colour, word in (("eq4", "D", SERIES[1], "Eq. 4"),
                                        ("best", "o", SERIES[2], "best")):  # fmt: skip
            beta, ms = sweep[f"{key}_beta"], sweep[f"{key}_ms"]
            if beta is not None:
                axes.plot([beta], [ms], mark, color=colour, markersize=7 if key == "eq4" else 5,
                          label=f"{word}: {beta:.2f}, {ms:.1f} ms")  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlim(left=sweep["eq4_beta"] / 20 if sweep["eq4_beta"] else None)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(0, 4 * sweep["best_ms"])
        title = sweep["title"][0].upper() + sweep["title"][1:]
        axes.set_title(f"{title}, {short_tokens(sweep['tokens'])}")
        axes.set_xlabel("beta, hot tokens per cold token (log)")
        axes.set_ylabel("ms of a layer")
        axes.grid(color=GRID, linewidth=0.8)
        axes.legend(frameon=False, fontsize=9.5, loc="upper right")
    for axes in panels[len(sweeps) :]:
        axes.set_visible(False)
    _title(figure, result, rows, "Split of the pools, fig. 16b")
    return figure


def draw_parts(result: Result) -> Figure:
    """What a step waits for at the longest context, ablations, and which constants decide.

    Raises:
        ConfigError: nothing was simulated.
    """
    rows = _rows(result)
    longest = max(row["tokens"] for row in rows)
    here = [row for row in rows if row["tokens"] == longest]
    figure = Figure(figsize=(13.2, 5.6), layout="constrained")
    parts, decides = figure.subplots(1, 2, width_ratios=(1.15, 1))
    for place, row in enumerate(here):
        left = 0.0
        for part, colour in (("gpu_ms", FAINT), ("scoring_ms", SERIES[0]),
                             ("fetch_ms", SERIES[1])):  # fmt: skip
            label = part.partition("_")[0].replace("gpu", "GPU")
            parts.barh(place, row[part], left=left, color=colour, height=0.66,
                       label=None if place else label)  # fmt: skip
            left += row[part]
        parts.annotate(
            f"{left / 1e3:.1f} s, {row['storage_read_bytes'] / 1e9:.1f} GB to the host",
            (left, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9,
            color=INK,
        )  # fmt: skip
    parts.set_yticks(range(len(here)), [row["method"] for row in here])
    parts.set_ylim(len(here) - 0.4, -0.6)
    parts.set_xlim(0, 1.42 * max(row["step_ms"] for row in here))
    parts.xaxis.set_major_locator(MaxNLocator(5))
    parts.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    parts.set_xlabel("milliseconds of a step: the GPU's, waiting for scores, for KV")
    parts.set_title(f"At {short_tokens(longest)}; ablations of INT8, fig. 16a")
    parts.grid(axis="x", color=GRID, linewidth=0.8)
    parts.legend(frameon=False, fontsize=9.5, loc="lower right")
    _decides(decides, result.figures["sensitivity"])
    _title(figure, result, rows, "What a step waits for")
    return figure


def _decides(axes: Axes, found: Row) -> None:
    """Bars from a constant 20 % lower to 20 % higher, around each speed-up as it is."""
    shown = found["rows"][:_MOST_BARS]
    for place, row in enumerate(shown):
        for shift, rival in enumerate(RIVALS):
            low, high = row["0.8"][rival], row["1.2"][rival]
            at = place + 0.26 * (shift - 1)
            axes.barh(at, high - low, left=low, height=0.2, color=_LOOKS[rival][0])
            axes.plot([high], [at], ">" if high >= low else "<", color=_LOOKS[rival][0],
                      markersize=5)  # fmt: skip
    for rival in RIVALS:
        axes.axvline(found["speedups"][rival], color=_LOOKS[rival][0], linewidth=1,
                     label=f"over {rival}: {found['speedups'][rival]:.2f}")  # fmt: skip
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown])
    axes.set_ylim(len(shown) + 0.6, -0.6)  # the legend below
    axes.set_xlim(left=0)
    axes.set_title("Constants at -20 % and (arrow) +20 %")
    axes.set_xlabel(f"speed-up of {found['method']} at {short_tokens(found['tokens'])}")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.02))
