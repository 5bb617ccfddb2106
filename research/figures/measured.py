"""Figures of what users measure: throughput, an audit, stored documents, attention's statistics."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from penstock.evaluate.audit.table import format_nats
from penstock.evaluate.documents.table import speedup
from penstock.evaluate.figure_style import FAINT, INK, SERIES, model_of
from penstock.evaluate.result import Result
from research.figures.chart import (
    PERCENT,
    Axis,
    Chart,
    Mark,
    Panel,
    Row,
    bars,
    line,
    note,
    required,
    rule,
)
from research.figures.clusters import by_layer
from research.statistics.measures import column

_MARKERS = "os^DvPX<>"


def _tokens(result: Result) -> str:
    """How long its prompts are, and how many steps were decoded."""
    tokens = result.figures["prompt_tokens"]
    return f"{tokens[0]:,}" if len(tokens) == 1 else f"{len(tokens)} x {max(tokens):,}"


# Throughput ---------------------------------------------------------------------------------------

MOST_LINEAR_SPREAD = 20
"""Bars stand on zero unless the slowest row takes more than this times the fastest's."""


def throughput(result: Result) -> Chart:
    """Step times by row, one panel for each batch size, the floor as a line."""
    rows = required([row for row in result.figures["rows"] if row["figures"].get("median_ms")],
                    "no row of this result was measured")  # fmt: skip
    batches = sorted({row["batch"] for row in rows})
    by_batch = [[row for row in rows if row["batch"] == batch] for batch in batches]
    medians = [row["figures"]["median_ms"] for row in rows]
    is_log = max(medians) > MOST_LINEAR_SPREAD * min(medians)
    settings = result.settings
    panels = [_throughput_panel(some, batch, is_log=is_log)
              for some, batch in zip(by_batch, batches, strict=True)]  # fmt: skip
    scale = " (log scale)" if is_log else ""
    label = f"time of one decode step, ms{scale}; whiskers: 10th, 90th percentile"
    panels[-1] = replace(panels[-1], x=replace(panels[-1].x, label=label))
    return Chart(
        title=f"{settings['config']}, {settings['context']:,} tokens of context, KV budget "
              f"{settings['memory']} of the full cache\n{_machine(result)}",
        size=(9.5, (0.36 * max(map(len, by_batch)) + 1.1) * len(batches) + 0.9),
        panels=[[panel] for panel in panels],
    )  # fmt: skip


def _throughput_panel(rows: Sequence[Row], batch: int, *, is_log: bool) -> Panel:
    rows = rows[::-1]
    found = [row["figures"] for row in rows]
    medians, low, high = (np.array([each[name] for each in found])
                          for name in ("median_ms", "p10_ms", "p90_ms"))  # fmt: skip
    start, most = min(medians) / 2 if is_log else 0.0, high.max()
    marks = [
        bars([place], [time - start], base=start, flat=True, width=0.68, color=_colour(row),
             hatch="////" if row["simulated"] else None,
             edgecolor="white" if row["simulated"] else None, linewidth=0)
        for place, (row, time) in enumerate(zip(rows, medians, strict=True))
    ]  # fmt: skip
    marks.append(lambda axes: axes.errorbar(
        medians, range(len(rows)), xerr=[(medians - low).clip(0), (high - medians).clip(0)],
        fmt="none", ecolor=INK, elinewidth=1.2, capsize=2.5,
    ))  # fmt: skip
    marks += [
        note(f"{each['median_ms']:,.0f} ms, {each['tokens_per_s']:.1f} tokens/s",
             (each["p90_ms"], place), offset=(6, 0), ha="left", va="center", fontsize=9.5,
             color="black")
        for place, each in enumerate(found)
    ]  # fmt: skip
    floors = [row["figures"]["median_ms"] for row in rows if row["is_floor"]]
    if floors:
        marks += [rule(min(floors), across=False, color=INK, linestyle=(0, (4, 3)), linewidth=1.1),
                  note("floor: 400 tokens of context", (min(floors), 1.0), offset=(4, 1),
                       ha="left", within=("data", "axes fraction"))]  # fmt: skip
    x = Axis(form=",g", low=0.0, high=1.35 * most)
    if is_log:
        x = Axis(log=10, fine=most <= 100 * start, low=start, high=start * (most / start) ** 1.5)
    names = [f"{row['name']}*" if row["synthetic_stream"] else str(row["name"]) for row in rows]
    return Panel(title=f"batch {batch}", pad=18, marks=marks, grid="x", x=x,
                 y=Axis(names=names, low=-0.6, high=len(rows) - 0.4))  # fmt: skip


def _colour(row: Row) -> str:
    if row["is_floor"]:
        return "#b9bec6"
    if row["name"].startswith("flexgen"):
        return SERIES[1]
    return SERIES[0] if row["name"].startswith("kvswap") else FAINT


def _machine(result: Result) -> str:
    machine, rows = result.machine, result.figures["rows"]
    real = [row["figures"].get("is_direct") for row in rows if not row["simulated"]]
    direct = " with direct I/O" if True in real and False not in real else ""
    cores = f"{machine['cores']} cores"
    if int(machine["threads"] or 0) < int(machine["cores"] or 0):
        cores = f"{machine['threads']} threads on {machine['cores']} cores"
    notes = []
    if any(row["simulated"] for row in rows):
        notes.append("hatched: simulated device")
    if any(row["synthetic_stream"] for row in rows):
        notes.append("*: synthetic stream of selections")
    where = f"{machine['cpu']}, {cores}, {machine['disk']}{direct}"
    return "\n".join(filter(None, [where, "; ".join(notes)]))


# Audit --------------------------------------------------------------------------------------------

_COLOURS = (*SERIES, "#b3374b", FAINT, "#1f9e9e", "#a58a1b")


def audit(result: Result) -> Chart:
    """Attention mass that each policy captures over the layers, the best policy first."""
    found = result.figures
    audits = required([each for each in found.get("policies", ()) if each["refused"] is None],
                      "no policy of this result was audited")  # fmt: skip
    audits.sort(key=lambda each: -float(each["mean_mass"]))
    marks = [
        line(found["layers"], each["mass"], color=_COLOURS[number % len(_COLOURS)], linewidth=2.0,
             marker=_MARKERS[number % len(_MARKERS)], markersize=6.5,
             linestyle="-" if number < len(_COLOURS) else "--",
             label=f"{each['setting']}\n{each['mean_mass']:.1%}; {format_nats(each['mean_kl'])} "
                   "nats")
        for number, each in enumerate(audits)
    ]  # fmt: skip
    lowest = min(min(each["mass"]) for each in audits)
    return Chart(
        title="Attention mass that each policy captures, by layer\n"
              f"{result.settings['model']}, {_tokens(result)} tokens, {found['steps']} decode "
              "steps",
        look={"fontweight": "bold"}, size=(8.0, max(4.4, 2.2 + 0.42 * len(audits))),
        panels=[[Panel(
            marks=marks, x=Axis(whole=True, label="layer"),
            y=Axis(low=max(0.0, lowest - 0.06) if lowest > 0.5 else 0.0, high=1.03, form=PERCENT,
                   label="share of full attention's probability"),
        )]],
        legend={"loc": "outside right center", "title": "mean over layers; KL", "fontsize": 10.5,
                "title_fontsize": 10.5, "alignment": "left", "labelspacing": 0.7},
    )  # fmt: skip


# Documents ----------------------------------------------------------------------------------------


def documents(result: Result) -> Chart:
    """On the left seconds to the first token by length, on the right bandwidths as bars."""
    parts = ("reopen", "encryption", "verify")
    missing = [part for part in parts if part not in result.figures]
    required(not missing, f"this result of documents has no {', '.join(missing)}")
    reopen, encryption, verify = (result.figures[part] for part in parts)
    return Chart(
        title=f"Documents that are stored once and asked again{model_of(result)}, "
              f"{result.settings['memory']} of the full cache in memory",
        size=(11.6, 5.0), widths=(1, 1.15), panels=[[_first_tokens(reopen),
                                                     _rates(encryption, verify)]],
    )  # fmt: skip


def _first_tokens(rows: Sequence[Row]) -> Panel:
    lengths = [row["tokens"] for row in rows]
    fresh = [row["fresh_first_token_s"] for row in rows]
    again = [median(each["first_token_s"] for each in row["opens"]) for row in rows]
    marks = [line(lengths, fresh, marker="o", color=FAINT, linewidth=2,
                  label="prefilled (two cores)"),
             line(lengths, again, marker="o", color=SERIES[0], linewidth=2,
                  label="reopened from disk")]  # fmt: skip
    marks += [note(f"{speedup(row):.0f}x", (x, (low * high) ** 0.5), va="center", fontsize=10)
              for row, x, low, high in zip(rows, lengths, again, fresh, strict=True)]  # fmt: skip
    return Panel(
        title="Seconds to the first token of an answer", marks=marks, grid="both",
        x=Axis(log=2, ticks=lengths, names=[f"{length:,}" for length in lengths],
               label="tokens of the document"),
        y=Axis(log=10, low=min(again) / 1.8, high=max(fresh) * 1.8), legend={"loc": "upper left"},
    )  # fmt: skip


def _rates(encryption: Sequence[Row], verify: Sequence[Row]) -> Panel:
    colours = {"not checked": FAINT, "checked": SERIES[0], "decrypted": SERIES[1]}
    groups = [
        (f"random units\nof {row['unit_bytes'] // 1024} KiB",
         {"checked": row["random_bytes_per_s"]["plain"],
          "decrypted": row["random_bytes_per_s"]["encrypted"]}) for row in encryption
    ]  # fmt: skip
    groups += [
        (f"all in order,\n{row['unit_bytes'] // 1024} KiB units",
         {"not checked": row["sequential_bytes_per_s"], "checked": row["verify_bytes_per_s"]})
        for row in verify
    ]  # fmt: skip
    marks = []
    for place, (_, both) in enumerate(groups):
        for number, (name, rates) in enumerate(both.items()):
            rate = median(rates) / 1e6
            marks.append(bars(place + (number - 0.5) * 0.36, rate, width=0.34, label=name,
                              color=colours[name], texts=[f"{rate:,.0f}"]))  # fmt: skip
    return Panel(title="MB/s of reading, direct I/O", marks=marks, legend={"loc": "upper left"},
                 x=Axis(names=[name for name, _ in groups], size=10))  # fmt: skip


# Statistics ---------------------------------------------------------------------------------------


def statistics(result: Result) -> Chart:
    """Probability over tokens, reuse by layer, recall over rank, prediction by layer."""
    found = result.figures
    required(found.get("layers"), "no layer of this result was measured")
    return Chart(
        title=f"Full attention of {result.settings['model']}: {_tokens(result)} tokens of prompt, "
              f"{found['steps']} decode steps",
        size=(10.5, 8.2),
        panels=[[_mass(found), _reuse(found)], [_ranks(found), _predicted(found)]],
    )  # fmt: skip


_SHARE = Axis(low=0, high=1.02, form=PERCENT)
_LAYER = Axis(whole=True, label="layer")


def _mass(found: Row) -> Panel:
    ticks = [0.001, 0.01, 0.05, 0.2, 0.5]
    return Panel(
        title="Attention on the best tokens", y=_SHARE, legend={"loc": "lower right"},
        marks=list(by_layer(found["mass"]["parts"], found["mass"]["mass_together"],
                            found["layers"])),
        x=Axis(log=10, ticks=ticks, names=[f"{100 * tick:g}%" for tick in ticks],
               label="best tokens, share of all (log scale)"),
    )  # fmt: skip


def _reuse(found: Row) -> Panel:
    groups, reuse, layers = found["overlap"][-1], found["reuse"], found["layers"]
    shades = matplotlib.colormaps["Blues"](np.linspace(0.4, 0.95, len(reuse["sizes"])))
    marks = [
        line(layers, _numbers(column(reuse["hit_rate"], place)), color=shades[place], markersize=5,
             marker=_MARKERS[place % 4],
             label="the step before (1x)" if size == 1 else f"buffer of {size:g}x")
        for place, size in reversed(list(enumerate(reuse["sizes"])))
    ]  # fmt: skip
    marks.append(rule(groups["chance"], linestyle="--", linewidth=1.2, label="random sets"))
    return Panel(
        title=f"Of the best {groups['count']} groups of 4, already there", pad=42, marks=marks,
        x=_LAYER, y=_SHARE,
        legend={"ncols": 3, "loc": "lower left", "bbox_to_anchor": (-0.02, 0.99),
                "borderaxespad": 0.2, "columnspacing": 1.2},
    )  # fmt: skip


def _ranks(found: Row) -> Panel:
    low = found["low_rank"]
    ranks, marks = low["ranks"], []
    for number, (kind, name) in enumerate((("after_rope", "after RoPE"),
                                           ("before_rope", "before RoPE"))):  # fmt: skip
        if kind not in low:
            continue
        recall = np.array([[at[-1] for at in by_rank] for by_rank in low[kind]["recall_together"]],
                          dtype=float)  # fmt: skip
        energy = np.mean(np.array(low[kind]["energy"], dtype=float), axis=0)
        colour = SERIES[number]
        marks += [
            _between(ranks, recall.min(axis=0), recall.max(axis=0), colour),
            line(ranks, recall.mean(axis=0), color=colour, marker=_MARKERS[number], linewidth=2.2,
                 label=f"found, {name}"),
            line(ranks, energy, color=colour, linestyle=":", linewidth=1.6,
                 label=f"energy, {name}"),
        ]  # fmt: skip
    return Panel(
        title=f"Top {low['counts'][-1]} found with low-rank keys", marks=marks, y=_SHARE,
        x=Axis(log=2, ticks=ranks, names=[f"{rank:g}" for rank in ranks],
               label=f"rank of the joint keys, of {low['width']} (band: all layers)"),
        legend={"loc": "lower right"},
    )  # fmt: skip


def _between(x: Any, low: Any, high: Any, colour: str) -> Mark:
    fill: Callable[[Axes], object] = lambda axes: axes.fill_between(  # noqa: E731
        x, low, high, color=colour, alpha=0.15, linewidth=0
    )
    return fill


def _predicted(found: Row) -> Panel:
    prediction = found["prediction"]
    lines = [
        ("cosine of the inputs", prediction["input_cosine"], FAINT),
        ("cosine of the queries", prediction["cosine"], SERIES[0]),
        (f"top {prediction['counts'][-1]} found, share",
         [row[-1] for row in prediction["recall_together"]], SERIES[1]),
    ]  # fmt: skip
    numbers = [_numbers(values) for _, values, _ in lines]
    least = min((value for some in numbers for value in some if value == value), default=0.0)
    return Panel(
        title="Predicted from the layer before", x=_LAYER, legend={"loc": "lower right"},
        marks=[line(found["layers"], values, color=colour, marker=_MARKERS[number], label=name,
                    linewidth=2.2 if number else 1.5)
               for number, ((name, _, colour), values) in enumerate(zip(lines, numbers,
                                                                        strict=True))],
        y=Axis(low=min(0.0, least - 0.02), high=1.02, form=".1f"),  # cosines may be negative
    )  # fmt: skip


def _numbers(values: Sequence[float | None]) -> list[float]:
    """NaN, which is not drawn, where there is nothing."""
    return [np.nan if value is None else value for value in values]
