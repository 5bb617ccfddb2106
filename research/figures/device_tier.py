"""Figures of the device tier: speed and memory, a layer's time, LouisKV's parts, the kernels."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.evaluate.figure_style import INK, SERIES, short_tokens
from penstock.evaluate.result import Result
from research.figures.chart import (
    Axis,
    Chart,
    Panel,
    Row,
    bars,
    downwards,
    grouped,
    line,
    note,
    required,
    rule,
    stacked,
)

_COLOURS = ("#0b6e99", "#c96a2b", "#4b8b3b", "#7a4fa3", "#b5375a", "#80624d", "#5b616b", "#3d9c98")
_METHODS = ("louiskv", "arkvale", "full-dynamic", "kvswap", "quest", "full-static", "flexgen")
"""They have the same colours in all figures."""
_PARTS = ("#c96a2b", "#e3b34c", "#9db6c4", "#7fae73", "#d5d8dd")
_LEFT_OUT = "stream of the bench"
_CUT = 4.0
"""Bars longer than this many times the median one are cut."""
_LOG_FROM = 20.0
"""Bars whose longest is this many times the shortest stand on a log scale, others on zero."""


def _unique(rows: Sequence[Row], *names: str) -> list[tuple[object, ...]]:
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


# Speed --------------------------------------------------------------------------------------------


def speed(result: Result) -> Chart:
    """Tokens per second, and GPU memory beside the weights; a column of panels for each pattern."""
    rows = [row for row in result.figures["rows"] if "error" not in row]
    required([row for row in rows if "tokens_per_s" in row], "no row of this result was measured")
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    wide = 1.2 + 4.4 * len(patterns)
    lines = [
        [_bars([row for row in rows if row["pattern"] == pattern], methods, value,
               _scale(rows, value, said if pattern == patterns[0] else ""), gains)
         for pattern in patterns]
        for value, said, gains in ((_rate, "tokens per second", True),
                                   (_memory, "GPU memory, GiB", False))
    ]  # fmt: skip
    title = title_of(result, "Decoding in the device tier", wide)
    # As many names as fit side by side; a letter of a legend is a tenth of an inch.
    fit = int(wide / (0.1 * max(map(len, methods)) + 0.7))
    return Chart(
        title=title + ("; x: does not fit" if any("skipped" in row for row in rows) else ""),
        size=(wide, 7.8), panels=lines, share=(False, "row"),
        legend={"ncols": max(1, min(4, len(methods), fit))},
    )  # fmt: skip


def _bars(
    rows: Sequence[Row], methods: Sequence[str], value: Callable[[Row], float | None], y: Axis,
    with_gains: bool,
) -> Panel:  # fmt: skip
    """Bars of all methods side by side for each batch; a cross where a method did not run."""
    batches = sorted({row["batch"] for row in rows})
    by_place = {(row["method"], row["batch"]): row for row in rows}
    colours = _colours(methods)
    heights = [[value(by_place.get((name, batch), {})) for batch in batches] for name in methods]
    many = len(methods) * len(batches) > 12
    texts = [[f"{height or 0:,.0f}" if (height or 0) >= 100 else f"{height or 0:.3g}"
              for height in mine] for mine in heights]  # fmt: skip
    marks = grouped(heights, methods, [colours[name] for name in methods], texts=texts, width=0.84,
                    text={"fontsize": 7.5, "rotation": 90 * many, "va": "bottom",
                          "offset": (0, 2)})  # fmt: skip
    width = 0.84 / len(methods)
    marks += [
        note("x", (batches.index(batch) + (methods.index(name) - (len(methods) - 1) / 2) * width,
                   0.015), within=("data", "axes fraction"), color=colours[name], fontsize=10,
             fontweight="bold")
        for (name, batch), row in by_place.items() if "skipped" in row
    ]  # fmt: skip
    gains = _gains(rows) if with_gains else {}
    label = "batch, and louiskv's rate over arkvale's" if gains else "" if with_gains else "batch"
    names = [f"{batch}\n{gains[batch]:.2f}x" if batch in gains else str(batch) for batch in batches]
    return Panel(
        title=spoken_pattern(rows[0]["pattern"]) if with_gains else "", marks=marks, y=y,
        x=Axis(names=names, label=label, low=-0.55, high=len(batches) - 0.45),
    )  # fmt: skip


def _colours(methods: Sequence[str]) -> dict[str, str]:
    """A colour for each method: its own, or one that is free where it comes more than once."""
    own = dict(zip(_METHODS, _COLOURS, strict=False))
    found: dict[str, str] = {}
    for name in methods:
        colour = own.get(_policy_name(name))
        if colour is None or colour in found.values():
            used = {*found.values(), *(own.get(_policy_name(other)) for other in methods)}
            free = [one for one in _COLOURS if one not in used]
            colour = free[0] if free else _COLOURS[len(found) % len(_COLOURS)]
        found[name] = colour
    return found


def _policy_name(method: str) -> str:
    """Without budget, options and flags."""
    return re.split("[@:!]", method)[0]


def _gains(rows: Sequence[Row]) -> dict[int, float]:
    """LouisKV's tokens per second over ArkVale's, by batch, where both come once."""
    gains = {}
    for batch in {row["batch"] for row in rows}:
        ours, theirs = (
            [rate for row in rows if row["batch"] == batch and _policy_name(row["method"]) == name
             and (rate := _rate(row)) is not None]
            for name in ("louiskv", "arkvale")
        )  # fmt: skip
        if len(ours) == len(theirs) == 1:
            gains[batch] = ours[0] / theirs[0]
    return gains


def _scale(rows: Sequence[Row], value: Callable[[Row], float | None], said: str) -> Axis:
    """A log scale where bars differ by much; on it, bars that are nearly alike would not be."""
    values = [number for row in rows if (number := value(row))]
    if values and max(values) > _LOG_FROM * min(values):
        return Axis(log=10, margin=0.16, label=said and f"{said} (log scale)")
    return Axis(form=",g", margin=0.16, label=said)


def _rate(row: Row) -> float | None:
    value = row.get("tokens_per_s")
    return None if value is None else float(value)


def _memory(row: Row) -> float | None:
    held = row.get("memory", {}).get("held")
    return held / 2**30 if held else None


# Where time goes ----------------------------------------------------------------------------------


def breakdown(result: Result) -> Chart:
    """A layer's time in a decode step by its parts, at each pattern's largest common batch."""
    rows = required([row for row in result.figures["rows"] if row.get("breakdown")],
                    "no row of this result has a breakdown")  # fmt: skip
    shown = [_largest_common(rows, pattern) for [pattern] in _unique(rows, "pattern")]
    panels, any_cut = [], False
    for some in shown:
        layers = [row["breakdown"]["layer_ms"] for row in some]
        names = [name for name in layers[0] if name != _LEFT_OUT]
        sizes = [[1e3 * layer[name] for layer in layers] for name in names]
        ends = np.sum(sizes, axis=0)
        limit = 1.12 * max(end for end in ends if end <= _CUT * float(np.median(ends)))
        marks = stacked(zip(names, sizes, _PARTS, strict=False))
        for place, (row, end) in enumerate(zip(some, ends, strict=True)):
            cut = "// " if end > limit else ""
            said = f"{cut}{end:,.0f} us ({row['breakdown']['retrieval_share']:.0%})"
            marks.append(note(said, (min(end, limit), place), offset=(5, 0), ha="left", va="center",
                              fontsize=9.5, annotation_clip=False))  # fmt: skip
            any_cut = any_cut or bool(cut)
        panels.append(Panel(
            title=f"{spoken_pattern(some[0]['pattern'])}, batch {some[0]['batch']}", marks=marks,
            grid="x", y=downwards([row["method"] for row in some], bare=True),
            x=Axis(low=0, high=limit),
        ))  # fmt: skip
    label = "device time of one layer in a decode step, us (share of select and gather"
    last = replace(panels[-1].x, label=f"{label}{'; //: cut' if any_cut else ''})")
    panels[-1] = replace(panels[-1], x=last)
    return Chart(
        title=title_of(result, "Where a layer's time goes, launches not counted"),
        size=(9.0, 2.0 + sum(0.44 * len(some) + 0.5 for some in shown)),
        panels=[[panel] for panel in panels], heights=[len(some) for some in shown],
        legend={"ncols": 5},
    )  # fmt: skip


def _largest_common(rows: Sequence[Row], pattern: object) -> list[Row]:
    """The rows of the batch that most methods were measured at; among equals the largest."""
    here = [row for row in rows if row["pattern"] == pattern]
    batches = [row["batch"] for row in here]
    batch = max(batches, key=lambda b: (batches.count(b), b))
    return [row for row in here if row["batch"] == batch]


_ABLATION = {
    "arkvale": "ArkVale: pages, at every step",
    "louiskv:boundaries=every!torch": "LouisKV at every step, plain torch",
    "louiskv!torch": "at boundaries, plain torch",
    "louiskv:boundaries=every": "at every step, own kernels",
    "louiskv": "at boundaries, own kernels",
    "louiskv!eager": "the same, launched by Python",
}
"""Methods of `device_tier.methods.ABLATION` in words, in the order in which parts are added."""


def ablation(result: Result) -> Chart:
    """Milliseconds of a step with and without each part, a panel for each pattern and batch."""
    rows = required([row for row in result.figures["rows"] if "answer_mean_ms" in row],
                    "no row of this result was measured")  # fmt: skip
    order = list(_ABLATION)
    rows.sort(key=lambda row: order.index(row["method"]) if row["method"] in order else len(order))
    panels = []
    for pattern, batch in sorted(_unique(rows, "pattern", "batch"), key=str):
        here = [row for row in rows if (row["pattern"], row["batch"]) == (pattern, batch)]
        bases = [row["answer_mean_ms"] for row in here if row["method"] == "arkvale"]
        ours = [row["method"].startswith("louiskv") for row in here]
        texts = []
        for row, is_ours in zip(here, ours, strict=True):
            time, shares = row["answer_mean_ms"], [p["retrieval_share"] for p in row["places"]]
            gain = f"{bases[0] / time:.2f}x ArkVale; " if bases and is_ours else ""
            texts.append(f"{time:.1f} ms ({gain}{sum(shares) / len(shares):.0%} retrieve)")
        times = [row["answer_mean_ms"] for row in here]
        panels.append(Panel(
            title=f"{spoken_pattern(str(pattern))}, batch {batch}", grid="x",
            marks=[bars(range(len(here)), times, texts=texts, text={"fontsize": 9.5}, flat=True,
                        width=0.66, color=[SERIES[0 if one else 1] for one in ours])],
            x=Axis(low=0, high=1.64 * max(times)),
            y=downwards([_ABLATION.get(row["method"], row["method"]) for row in here], bare=True),
        ))  # fmt: skip
    counts = [len(panel.y.names or ()) for panel in panels]
    return Chart(
        title=title_of(result, "What each part of LouisKV is worth"),
        size=(9.0, 1.9 + 0.44 * sum(counts) + 0.5 * len(counts)), heights=counts,
        panels=[[panel] for panel in panels],
        xlabel="milliseconds of a decode step (its speed; steps that retrieve)",
    )  # fmt: skip


def spoken_pattern(pattern: str) -> str:
    """ "32,256 in, 16K out" for "32256/16384"."""
    prompt, output = (int(word) for word in pattern.split("/"))
    return f"{short_tokens(prompt)} in, {short_tokens(output)} out"


def title_of(result: Result, what: str, inches: float = 20.0) -> str:
    """What was measured of which model where, and what the selecting queries were.

    Args:
        inches: that a line may have; a letter is a tenth of one.
    """
    settings = result.settings
    layers = f", {settings['layers']} layers" if settings.get("layers") else ""
    where = result.machine.get("gpu") if settings.get("on") == "cuda" else "CPU"
    name = f"{what}: {settings['config']}{layers},"
    between = " " if len(f"{name} {where}") <= 10 * inches else "\n"
    title = (
        f"{name}{between}{where}\n"
        "random weights; queries that select are drawn:\n"
        f"segments of {settings['segment']} steps, cosine {settings['sameness']:g} within"
    )
    if settings.get("stays") is None:
        return title
    turn, step = settings["stays"]
    return f"{title}; selections stated:\n{turn:g} of one stay at a turn, {step:g} at a step"


# Kernels ------------------------------------------------------------------------------------------

_MOST_OF_PREFILL = 0.1
"""What k-means is wanted to take."""


def kernels(result: Result) -> Chart:
    """Bars of the kernels that have a ceiling, a panel for each ceiling; dots for the torch twins.

    Where k-means was set beside a prefill, a last panel has its share by the size of blocks.
    """
    rows = required([row for row in result.figures["rows"] if "of_ceiling" in row],
                    "no kernel of this result was measured against a ceiling")  # fmt: skip
    ceilings = list(dict.fromkeys(row["ceiling"] for row in rows))
    limit = 1.24 * max(1.05, *(row["of_ceiling"] for row in rows))
    panels = [
        _ceiling_panel([row for row in rows if row["ceiling"] == name], limit,
                       f"{name}: {_rate_text(name, result.figures['ceilings'][name])}",
                       "share of the ceiling measured in the same run" * (name == ceilings[-1]))
        for name in ceilings
    ]  # fmt: skip
    if shares := result.figures.get("clustering", []):
        panels.append(_prefill_panel(shares))
    counts = [len(panel.y.names or ()) for panel in panels]
    where = result.machine.get("gpu") if result.settings.get("on") == "cuda" else "CPU"
    return Chart(
        title=f"Kernels of the device tier, {where}", panels=[[panel] for panel in panels],
        size=(10.0, 1.9 + 0.6 * len(panels) + 0.25 * sum(counts)), legend={"ncols": 2},
        heights=[count + 1.5 for count in counts],
    )  # fmt: skip


def _ceiling_panel(rows: Sequence[Row], limit: float, title: str, label: str) -> Panel:
    shares = [row["of_ceiling"] for row in rows]
    twins = [(row["of_ceiling"] * row["us"] / row["twin_us"], place)
             for place, row in enumerate(rows) if row.get("twin_us")]  # fmt: skip
    texts = [f"{_rate_text(row['ceiling'], row.get('flops_per_s') or row['bytes_per_s'])}, "
             f"{_time_text(row['us'])}" for row in rows]  # fmt: skip
    return Panel(
        title=title, grid="x", x=Axis(low=0, high=limit, label=label), marks=[
            bars(range(len(rows)), shares, flat=True, width=0.72, color=SERIES[0], label="kernel",
                 texts=texts, text={"fontsize": 8}, ends=[max(1.0, share) for share in shares]),
            line(*zip(*twins, strict=True) if twins else ((), ()), marker="o", markersize=4.5,
                 linestyle="", color=SERIES[1], zorder=3, label="plain torch twin"),
            rule(1.0, across=False, color=INK),
        ],
        y=downwards([f"{row['kernel']}: {row['size']}" for row in rows], size=8.5, bare=True),
    )  # fmt: skip


def _prefill_panel(entries: Sequence[Row]) -> Panel:
    """k-means of all layers as a share of the prefill of the same prompt, and what is wanted."""
    shares = [entry["of_prefill"] for entry in entries]
    first = entries[0]
    return Panel(
        title=f"k-means of {first['layers']} layers beside a prefill of {first['prefill_s']:.2f} s",
        marks=[bars(range(len(shares)), shares, flat=True, width=0.72, color=SERIES[0],
                    text={"fontsize": 8}, texts=[f"{entry['of_prefill']:.0%}, "
                                                 f"{entry['all_layers_s']:.2f} s"
                                                 for entry in entries]),
               rule(_MOST_OF_PREFILL, across=False, color=SERIES[1], linewidth=1.4)],
        x=Axis(low=0, high=1.24 * max(_MOST_OF_PREFILL, *shares),
               label=f"share of the prefill; the line: {_MOST_OF_PREFILL:.0%} are wanted"),
        y=downwards([entry["size"] for entry in entries], size=8.5, bare=True), grid="x",
    )  # fmt: skip


def _rate_text(ceiling: str, rate: float) -> str:
    if ceiling == "matmul":
        return f"{rate / 1e12:.3g} TFLOP/s"
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GB/s"


def _time_text(us: float) -> str:
    return f"{us / 1e3:,.1f} ms" if us >= 1000 else f"{us:.3g} us"
