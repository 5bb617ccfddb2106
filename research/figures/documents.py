"""Figure of `documents`: first tokens of new and reopened documents; rates of checked reading."""

from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from penstock.core.errors import ConfigError
from penstock.evaluate.documents.table import speedup
from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, model_of
from penstock.evaluate.result import Result

Row = dict[str, Any]


def draw_documents(result: Result) -> Figure:
    """On the left seconds to the first token by length, on the right bandwidths as bars.

    Raises:
        ConfigError: a part is missing.
    """
    missing = [part for part in ("reopen", "encryption", "verify") if part not in result.figures]
    if missing:
        raise ConfigError(f"this result of documents has no {', '.join(missing)}")
    figure = Figure(figsize=(11.6, 5.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _first_tokens(left, result.figures["reopen"])
    _rates(right, result.figures["encryption"], result.figures["verify"])
    figure.suptitle(
        f"Documents that are stored once and asked again{model_of(result)}, "
        f"{result.settings['memory']} of the full cache in memory", fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _first_tokens(axes: Axes, rows: list[Row]) -> None:
    lengths = [row["tokens"] for row in rows]
    fresh = [row["fresh_first_token_s"] for row in rows]
    again = [median(each["first_token_s"] for each in row["opens"]) for row in rows]
    axes.plot(lengths, fresh, "o-", color=FAINT, linewidth=2, label="prefilled (two cores)")
    axes.plot(lengths, again, "o-", color=SERIES[0], linewidth=2, label="reopened from disk")
    for row, x, low, high in zip(rows, lengths, again, fresh, strict=True):
        axes.annotate(
            f"{speedup(row):.0f}x", (x, (low * high) ** 0.5), ha="center", va="center",
            fontsize=10, color=INK,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(min(again) / 1.8, max(fresh) * 1.8)
    axes.set_title("Seconds to the first token of an answer")
    axes.set_xlabel("tokens of the document")
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=10, loc="upper left")


def _rates(axes: Axes, encryption: list[Row], verify: list[Row]) -> None:
    groups: list[tuple[str, list[tuple[str, float]]]] = []
    for row in encryption:
        rates = row["random_bytes_per_s"]
        groups.append((
            f"random units\nof {row['unit_bytes'] // 1024} KiB",
            [("checked", median(rates["plain"])), ("decrypted", median(rates["encrypted"]))],
        ))  # fmt: skip
    groups += [
        (
            f"all in order,\n{row['unit_bytes'] // 1024} KiB units",
            [
                ("not checked", median(row["sequential_bytes_per_s"])),
                ("checked", median(row["verify_bytes_per_s"])),
            ],
        )
        for row in verify
    ]
    colours = {"not checked": FAINT, "checked": SERIES[0], "decrypted": SERIES[1]}
    for place, (_, bars) in enumerate(groups):
        for number, (name, rate) in enumerate(bars):
            x = place + (number - 0.5) * 0.36
            axes.bar(x, rate / 1e6, width=0.34, color=colours[name])
            axes.annotate(
                f"{rate / 1e6:,.0f}", (x, rate / 1e6), xytext=(0, 3), textcoords="offset points",
                ha="center", fontsize=9, color=INK,
            )  # fmt: skip
    for name, colour in colours.items():
        axes.bar(0, 0, color=colour, label=name)
    axes.set_xticks(range(len(groups)), [name for name, _ in groups], fontsize=10)
    axes.set_title("MB/s of reading, direct I/O")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=10, loc="upper left")
