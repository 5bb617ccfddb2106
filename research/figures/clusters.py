"""Figures of DynaKV's clusters: costs, drift, keys, long outputs, steps beside others, cache."""

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from penstock.evaluate.figure_style import FAINT, INK, SERIES, short_tokens
from penstock.evaluate.result import Result
from research.clusters.end_to_end_table import (
    BOTH,
    FLASH,
    LRU,
    NO_CLUSTERS,
    OURS,
    PAPER_BANDWIDTHS,
    PAPER_LENGTHS,
    PAPER_MEMORY,
    PAPER_POLICY,
    PAPER_SPEEDUPS,
    PAPER_STEPS,
    POLICY,
    VIRTUAL,
    cache_bytes,
    device_name,
    measured,
    name_of,
)
from research.clusters.layouts import numbers
from research.clusters.run import (
    NAMES,
    PAPER_ACCESS,
    access_lengths,
    layout_sum,
    mean_length,
    paper_ratio,
)
from research.clusters.steps import CACHE
from research.figures.chart import (
    PERCENT,
    Axis,
    Chart,
    Mark,
    Panel,
    Row,
    alternating,
    band,
    bars,
    curves,
    dash,
    line,
    note,
    required,
    rule,
)

_LAYOUTS = {
    "sequence": ("sequence\norder", FAINT), "packed": ("cluster by\ncluster", SERIES[3]),
    "intra": ("pools, any\norder", SERIES[2]), "inter": ("pools by co-\nretrieval", SERIES[0]),
    "gaps": ("same, gaps\nread along", SERIES[1]),
}  # fmt: skip
_UPDATES = {"static": SERIES[1], "local": SERIES[2], "adaptive": SERIES[0], "global": FAINT}
_METHODS = {
    OURS: SERIES[0], NO_CLUSTERS: SERIES[1], "pqcache": SERIES[2], "clusterkv": SERIES[3],
    "dynakv:layout=tokens": "#b5375a", "dynakv:update=static": "#3d9c98", "full": FAINT,
    "dynakv:update=local,layout=tokens": "#b5375a", "dynakv:update=static,layout=tokens": "#3d9c98",
}  # fmt: skip
_LONG_NAMES = {
    "dynakv": "DynaKV", NO_CLUSTERS: "no clusters (single tokens)",
    "dynakv:update=static,layout=tokens": "static update", "pqcache": "PQCache",
    "dynakv:update=local,layout=tokens": "local update", "clusterkv": "ClusterKV",
}  # fmt: skip


def _lengths(found: Row) -> str:
    return (f"{short_tokens(found['prompt_tokens'])} tokens of prompt and "
            f"{short_tokens(found['output_tokens'])} of output")  # fmt: skip


# Costs --------------------------------------------------------------------------------------------


def costs(result: Result) -> Chart:
    """DynaKV's table 5 and figures 11 to 13: variance, attention found, loads, accesses."""
    found = result.figures
    required(all(part in found for part in ("methods", "buffers", "layouts")),
             "this result lacks methods, buffers or layouts; run all --parts")  # fmt: skip
    return Chart(
        title=f"Clusters of {found['model']}'s keys, {_lengths(found)}", size=(13.2, 9.2),
        panels=[
            [_variance(found["methods"]), _mass(found["methods"], float(result.settings["top"]))],
            [_loads(found["buffers"]["rows"]), _accesses(found["layouts"])],
        ],
    )  # fmt: skip


def _update_name(row: Row) -> str:
    return NAMES[row["update"]].replace(" (", "\n(")


def _variance(methods: list[Row]) -> Panel:
    """Bars, the paper's as marks: both in the variance of adaptive clusters."""
    unit = next(row["by_key"] for row in methods if row["update"] == "adaptive")
    sizes = [row["by_key"] / unit for row in methods]
    papers = [None if row["update"] == "adaptive" else paper_ratio(row["update"])
              for row in methods]  # fmt: skip
    marks = [bars(range(len(sizes)), sizes, texts=[f"{size:.2f}" for size in sizes], inside=True,
                  text={"fontsize": 10.5, "color": "white"}, width=0.62,
                  color=[_UPDATES[row["update"]] for row in methods])]  # fmt: skip
    marks += [dash(place, paper, 0.42, label="the paper's")
              for place, paper in enumerate(papers) if paper is not None]  # fmt: skip
    return Panel(
        title="Variance within clusters at the end (adaptive: 1), table 5", marks=marks,
        x=Axis(size=9.5, names=[f"{_update_name(row)}\n{row['clusters']:.0f} clusters"
                                for row in methods]),
        y=Axis(low=0, high=1.15 * max(*sizes, paper_ratio("static") or 0.0)),
        legend={"loc": "upper right"},
    )  # fmt: skip


def _mass(methods: list[Row], top: float) -> Panel:
    rows = [row for row in methods if "mass" in row]
    masses = [*(row["mass"] for row in rows), rows[-1]["best"]]
    names = [f"{_update_name(row)}\nread {row['read']:.1%}" for row in rows]
    return Panel(
        title=f"Full attention on what the top {top:.0%} of the past holds",
        marks=[bars(range(len(masses)), masses, texts=[f"{mass:.0%}" for mass in masses],
                    width=0.62, color=[*(_UPDATES[row["update"]] for row in rows), FAINT])],
        x=Axis(names=[*names, f"no clusters,\nbest tokens\nread {top:.1%}"], size=9.5),
        y=Axis(low=0, high=1.05, form=PERCENT),
    )  # fmt: skip


def _loads(rows: list[Row]) -> Panel:
    counts = [row["split_loads_entries"] for row in rows]
    less = ["", *(f"\n{counts[0] / count:.1f}x less" if count else "\nnone"
                  for count in counts[1:])]  # fmt: skip
    return Panel(
        title="Entries loaded only to be split, fig. 11 (paper: up to 2.32x less)\nwithout buffers "
              f"{counts[0] / rows[0]['retrieved_entries']:.2%} of what is retrieved",
        marks=[bars(range(len(rows)), counts, width=0.62, color=SERIES[0],
                    texts=[f"{count:,}{said}" for count, said in zip(counts, less, strict=True)])],
        x=Axis(names=[str(row["buffer"]) for row in rows],
               label="entries of a layer that may wait for the split of their cluster"),
        y=Axis(low=0, high=1.15 * max(*counts, 1), form=",.0f"),
    )  # fmt: skip


def _accesses(layouts: Row) -> Panel:
    packed = layout_sum(layouts, "packed", "moved_bytes")
    names, marks = [], []
    for place, (name, (text, colour)) in enumerate(_LAYOUTS.items()):
        for side, field, alpha, said in (
            (-0.19, "early_lengths", 0.45, "first eighth of the steps"),
            (0.19, "access_lengths", 1.0, "all steps"),
        ):
            mean = mean_length(access_lengths(layouts, name, field))
            marks.append(bars(place + side, mean, texts=[f"{mean:.1f}"], width=0.36, color=colour,
                              alpha=alpha, label=said if place == 1 else None))  # fmt: skip
        if name in PAPER_ACCESS:
            marks.append(dash(place, PAPER_ACCESS[name], 0.42, label="the paper's"))
        moved = layout_sum(layouts, name, "moved_bytes")
        ratio = "" if name == "packed" or not moved else f", 1/{packed / moved:,.0f}"
        names.append(f"{text}\n{_bytes(moved)}\nmoved{ratio}")
    return Panel(
        title="Entries of an access, fig. 12\nbytes moved (of cluster by cluster), fig. 13",
        marks=marks, x=Axis(names=names, size=9.5), y=Axis(room=1.2),
        legend={"loc": "upper left", "ncols": 3},
    )  # fmt: skip


def _bytes(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB" if count else "nothing"


# Drift and keys -----------------------------------------------------------------------------------


def drift(result: Result) -> Chart:
    """Along the output: keys outside of the prompt's clusters, their distance, the mean's shift."""
    found = result.figures
    parts = required(found.get("drift"), "no layer of this result was measured")
    ends, calm = np.array(parts["part_ends"]), parts["outside_prompt"]
    places = ends - np.diff(ends, prepend=0) / 2
    outside = [
        band(min(calm), max(calm), color=FAINT, alpha=0.25),
        note("held-out tokens of the prompt, all layers", (ends[-1], min(calm)), offset=(-2, -3),
             va="top", ha="right"),
    ]  # fmt: skip
    panels = [
        Panel(title=title, legend=legend, y=axis,
              marks=[*by_layer(places, parts[name], found["layers"], marker="o", markersize=3),
                     *more],
              x=Axis(label="token of the output", low=0, high=ends[-1], form=",.0f"))
        for name, title, more, axis, legend in (
            ("outside", "Keys farther from the nearest cluster\nof the prompt than any of its own",
             outside, Axis(low=0, high=1.02, form=PERCENT), None),
            ("distance", "Squared distance from the nearest\n(1: a held-out token of the prompt)",
             [rule(1.0, linestyle="--", linewidth=1.2)], Axis(low=0),
             {"fontsize": 9, "loc": "lower right", "ncols": 2}),
            ("shift", "Shift of the mean key\n(1: a prompt key's own distance from it)", [],
             Axis(low=0), None),
        )
    ]  # fmt: skip
    return Chart(
        title=f"{found['model']}, {short_tokens(found['prompt_tokens'])} tokens of prompt: "
              "generated keys leave the prompt's clusters",
        size=(13.2, 4.5), panels=[panels],
    )  # fmt: skip


def by_layer(
    x: Any, rows: Sequence[Sequence[float]], layers: Sequence[int], **look: Any
) -> Iterator[Mark]:
    """A line for each layer, the first, middle and last by name, and their mean."""
    shades = matplotlib.colormaps["viridis"](np.linspace(0.05, 0.9, len(layers)))
    named = {0, len(layers) // 2, len(layers) - 1}
    for number, row in enumerate(rows):
        label = f"layer {layers[number]}" if number in named else None
        yield line(x, row, color=shades[number], linewidth=1.3, label=label, **look)
    mean = np.mean(np.array(rows, dtype=float), axis=0)
    yield line(x, mean, color=INK, linewidth=2.6, label="mean")


_SHADES = 20
_MANY = 400
"""Clusters whose marks would hide the keys."""


def keys(result: Result) -> Chart:
    """A row for each head: when keys came, the prompt's clusters, the clusters at the end.

    As the paper's figures 1 and 4; lines join the output's keys with the centres of their clusters.
    """
    found = result.figures
    pictures = required(found.get("pictures"), "this result has no picture of keys")
    rows = []
    for one in pictures:
        said = f"{one['name']}\n{one['variance_shown']:.0%} of the variance in this plane"
        marks = [_when(one), _joined(one, "before"), _joined(one, "after")]
        titles = ["When a key came"] + [
            f"{what}: {len(numbers(one[kind]['x']))}" for kind, what in
            (("before", "Static, the prompt's clusters"),
             ("after", "Adaptive, clusters at the end"))
        ]  # fmt: skip
        rows.append([
            Panel(title=title, marks=[mark], grid="", frame="#d3d6db", x=Axis(ticks=[]),
                  y=Axis(ticks=[], label="" if place else said))
            for place, (title, mark) in enumerate(zip(titles, marks, strict=True))
        ])  # fmt: skip
    return Chart(
        title=f"Keys of {found['model']}, {_lengths(found)}, in the plane where they differ most",
        size=(13.2, 0.9 + 4.3 * len(pictures)), panels=rows,
        legend={"ncols": 5, "fontsize": 10, "handletextpad": 0.2},
    )  # fmt: skip


def _when(one: Row) -> Mark:
    token, x, y = (numbers(one[name]) for name in ("token", "x", "y"))
    prompt, half = one["prompt_tokens"], (one["prompt_tokens"] + one["tokens"]) // 2

    def draw(axes: Axes) -> None:
        for name, which, colour in (
            ("prompt", token < prompt, FAINT),
            ("output, first half", (token >= prompt) & (token < half), SERIES[0]),
            ("output, second half", token >= half, SERIES[1]),
        ):
            axes.scatter(x[which], y[which], s=7, color=colour, linewidths=0, alpha=0.85)
            axes.scatter([], [], s=40, color=colour, linewidths=0, label=f"key of the {name}")

    return draw


def _joined(one: Row, kind: str) -> Mark:
    """Points coloured by cluster; late ones joined with their cluster's centre."""
    token, x, y = (numbers(one[name]) for name in ("token", "x", "y"))
    cluster = numbers(one[kind]["cluster"])
    centres = np.stack([numbers(one[kind]["x"]), numbers(one[kind]["y"])], axis=1)
    palette = matplotlib.colormaps["tab20"](np.arange(_SHADES))
    colours = palette[(7 * cluster) % _SHADES]
    output = token >= one["prompt_tokens"]
    places = np.stack([x, y], axis=1)
    lines = np.stack([places[output], centres[cluster[output]]], axis=1)
    new = numbers(one[kind]["first_token"]) >= one["prompt_tokens"]

    def draw(axes: Axes) -> None:
        axes.add_collection(LineCollection(list(lines), colors=colours[output], linewidths=0.5,
                                           alpha=0.55))  # fmt: skip
        axes.scatter(x[~output], y[~output], s=6, color="#c3c7cd", linewidths=0)
        axes.scatter(x[output], y[output], s=6, color=colours[output], linewidths=0)
        for which, marker, edge, name in (
            (~new, "o", INK, "centre of a cluster with prompt keys"),
            (new, "D", SERIES[1], "with output keys alone"),
        ):
            axes.scatter(centres[which, 0], centres[which, 1], marker=marker, facecolors="white",
                         s=20 if len(centres) < _MANY else 7, edgecolors=edge, linewidths=0.9,
                         zorder=3, label=name)  # fmt: skip

    return draw


# Long outputs -------------------------------------------------------------------------------------


def quality(result: Result) -> Chart:
    """Left: the likeliest token is that of full attention. Right: nats that a token costs more."""
    rows = [row for row in result.figures.get("methods", []) if "as_full_by_part" in row]
    full = required(next((row for row in rows if row["method"] == "full"), None),
                    "this result has no row of full attention to compare with")  # fmt: skip
    steps = next(row["steps"] for row in result.figures["rows"] if "steps" in row)
    same, more = [], [rule(0)]
    for row in rows:
        method, parts = row["method"], np.array(row["as_full_by_part"])
        if method != "full":
            places = (np.arange(len(parts)) + 0.5) * steps / len(parts)
            look = {"color": _METHODS.get(method), "label": _LONG_NAMES.get(method, method),
                    "marker": "o", "markersize": 4,
                    "linewidth": 2.2 if method == OURS else 1.4}  # fmt: skip
            same.append(line(places, 100 * parts, **look))
            nats = np.array(row["nats_by_part"]) - np.array(full["nats_by_part"])
            more.append(line(places, nats, **look))
    x = Axis(label="tokens of the output", low=0, high=steps)
    return Chart(
        title=f"Long outputs on {result.figures['model']}, {result.settings['selected']} tokens "
              "selected by every method",
        size=(12.5, 4.9), legend={"ncols": 6, "fontsize": 10},
        panels=[[
            Panel(title="likeliest token as under full attention, %", marks=same, x=x),
            Panel(title="what the text's next token costs more, nats", marks=more, x=x),
        ]],
    )  # fmt: skip


# Steps beside others ------------------------------------------------------------------------------


def speed(result: Result) -> Chart:
    """A column for each device: speed-ups, then effective bandwidth, then step time by length."""
    rows = measured(result.figures.get("rows", []))
    gains = required([one for one in result.figures.get("speedups", [])
                      if one["method"] in PAPER_SPEEDUPS],
                     "no method of this result was measured beside dynakv")  # fmt: skip
    columns: list[list[Panel]] = []
    for device in dict.fromkeys(row["device"] for row in rows):
        here = [one for one in gains if one["device"] == device]
        name, ratio, first = device_name(device), _fullest_ratio(rows, device), not columns
        columns.append([
            Panel(title=f"{name}: times faster, fig. 10b", **_gains(here, "mean", PAPER_SPEEDUPS),
                  y=Axis(label="geometric mean; line: least to most" if first else "")),
            Panel(title=f"{name}: times their effective bandwidth, fig. 10c",
                  **_gains(here, "bandwidth", PAPER_BANDWIDTHS),
                  y=Axis(label="geometric mean over lengths" if first else "")),
            _steps([r for r in rows if (r["device"], r["ratio"]) == (device, ratio)],
                   f"{name}: a step at {ratio:.0%}, table 6",
                   "milliseconds (log scale)" if first else ""),
        ])  # fmt: skip
    return Chart(
        title=f"Decode steps of DynaKV on {result.figures['model']}, equal numbers of selected "
              f"tokens; measured in turn, {result.settings.get('steps')} steps each"
              + _elsewhere(rows),
        size=(1.4 + 6.6 * len(columns), 13.2), panels=list(zip(*columns, strict=True)),
        share=(False, "row"), legend={"ncols": 4, "fontsize": 10},
    )  # fmt: skip


def _elsewhere(rows: Sequence[Row]) -> str:
    """Which lengths and ratios another machine measured; nothing where one did it all."""
    places = sorted({(row["length"], row["ratio"]) for row in rows if row.get("machine")})
    spoken = [
        f"{short_tokens(length)} at " + ", ".join(f"{r:.0%}" for n, r in places if n == length)
        for length in dict.fromkeys(length for length, _ in places)
    ]
    return f"\nanother machine measured {'; '.join(spoken)}" if spoken else ""


def _fullest_ratio(rows: Sequence[Row], device: str) -> float:
    """The ratio that most lengths were measured at; among equals the middle one."""
    here = [row for row in rows if row["device"] == device and row["method"] == OURS]
    ratios = sorted({row["ratio"] for row in here})
    lengths = {ratio: sum(row["ratio"] == ratio for row in here) for ratio in ratios}
    best = [ratio for ratio in ratios if lengths[ratio] == max(lengths.values())]
    return float(best[len(best) // 2])


def _gains(gains: Sequence[Row], field: str, paper: dict[str, float]) -> dict[str, Any]:
    """Bars by ratio, a colour for each other method; the paper's averages as dashes."""
    ratios = sorted({one["ratio"] for one in gains})
    width = 0.8 / len(paper)
    marks = [rule(1, linewidth=0.9)]
    order = list(paper)
    for one in sorted(gains, key=lambda one: order.index(one["method"])):
        number = order.index(one["method"])
        if one[field] is None:
            continue
        place = ratios.index(one["ratio"]) + alternating(len(paper), number, width)
        marks.append(bars(place, one[field], width=0.92 * width, color=_METHODS[one["method"]],
                          label=f"than {name_of(one['method'])}"))  # fmt: skip
        if field == "mean":
            marks.append(line([place] * 2, [one["low"], one["high"]], color=INK, linewidth=1.0))
        marks += [note(f"{one[field]:.2f}", (place, 0), offset=(0, 4), fontsize=9.5, color="white"),
                  dash(place, paper[one["method"]], width / 2, label="the paper's")]  # fmt: skip
    lengths = [sorted({n for one in gains if one["ratio"] == ratio for n in one["lengths"]})
               for ratio in ratios]  # fmt: skip
    spoken = [" to ".join(dict.fromkeys(short_tokens(found[end]) for end in (0, -1)))
              for found in lengths]  # fmt: skip
    names = [f"{ratio:.0%} selected\n{said}" for ratio, said in zip(ratios, spoken, strict=True)]
    return {"marks": marks, "x": Axis(names=names)}


def _steps(rows: Sequence[Row], title: str, label: str) -> Panel:
    """Lines of all methods; the paper's models and growth with the length itself, faint."""

    def looks(method: str) -> Row:
        ours = method == OURS
        return {"markersize": 4.5, "label": name_of(method), "color": _METHODS.get(method, INK),
                "linewidth": 2.4 if ours else 1.4, "zorder": 3 if ours else 2}  # fmt: skip

    lengths = sorted({row["length"] for row in rows})
    marks = curves(rows, "method", "length", "mean_ms", looks)
    for steps in PAPER_STEPS.values():
        pairs = [pair for pair in zip(PAPER_LENGTHS, steps, strict=True) if pair[0] in lengths]
        if pairs:
            marks.append(line(*zip(*pairs, strict=True), color=FAINT, linewidth=0.9, linestyle=":",
                              label="the paper's models"))  # fmt: skip
    first = min((r for r in rows if r["method"] == OURS), key=lambda r: int(r["length"]))
    marks.append(line(lengths, [first["mean_ms"] * n / first["length"] for n in lengths], color=INK,
                      linewidth=0.9, linestyle="--", label="in proportion to the length")
    )  # fmt: skip
    return Panel(title=title, marks=marks, grid="both", y=Axis(log=10, label=label),
                 x=by_tokens(lengths))  # fmt: skip


def by_tokens(lengths: Sequence[int]) -> Axis:
    """An axis of lengths."""
    return Axis(log=2, ticks=lengths, names=[short_tokens(length) for length in lengths],
                label="tokens of prompt and output")  # fmt: skip


# Cache --------------------------------------------------------------------------------------------

_CACHES = {
    POLICY: ("small ones stay, a share for updated", SERIES[0]), LRU: ("LRU", SERIES[1]),
    FLASH: ("layer-wise representatives, from flash", SERIES[3]),
    VIRTUAL: ("layer-wise slots: two pools, filled ahead", SERIES[2]),
    BOTH: ("both layer-wise", "#b5375a"),
}  # fmt: skip


def cache(result: Result) -> Chart:
    """A column for each device: memory held, then step time, by the slots of the cache."""
    rows = required(measured(result.figures.get("rows", []), CACHE),
                    "this result has no rows with caches of several sizes")  # fmt: skip
    columns = []
    for device in dict.fromkeys(row["device"] for row in rows):
        here = [_with_cache(row, rows) for row in rows if row["device"] == device]
        name = device_name(device)
        columns.append([
            _by_slots(here, "cache_bytes", 2**20, f"{name}: slots, window and index, MiB (all "
                      "memory)", POLICY, 2**20 * PAPER_MEMORY,
                      f"the paper's least: 1/{PAPER_MEMORY} of what all layers hold"),
            _by_slots(here, "mean_ms", 1.0, f"{name}: a step, ms (hits)", LRU, PAPER_POLICY,
                      f"the paper's best: {PAPER_POLICY}x faster than LRU"),
        ])  # fmt: skip
    first = rows[0]
    return Chart(
        title=f"DynaKV's cache on {result.figures['model']}, {short_tokens(first['length'])} "
              f"tokens, {first['ratio']:.0%} selected (fig. 14)",
        size=(1.4 + 8.2 * len(columns), 9.4), panels=list(zip(*columns, strict=True)),
        share=(False, "row"), legend={"ncols": 2 + (len(columns) > 1), "fontsize": 10},
    )  # fmt: skip


def _with_cache(row: Row, rows: Sequence[Row]) -> Row:
    """A row, and what its cache takes without tables and scratch."""
    ours = [
        one for one in rows if one["method"] == POLICY and row["method"] in (FLASH, VIRTUAL, BOTH)
        and (one["device"], one["reuse"]) == (row["device"], row["reuse"])
    ]  # fmt: skip
    return {**row, "cache_bytes": cache_bytes(row, ours[0] if ours else row)}


def _by_slots(
    rows: Sequence[Row], field: str, unit: float, title: str, marked: str, over: float, said: str
) -> Panel:
    """Bars by the size of the cache, and where the paper's gain over one of the methods would be.

    Args:
        marked: the method that the paper's is a gain over.
        over: a mark's height: the method's over this.
        said: the mark's label.
    """
    sizes = sorted({row["reuse"] for row in rows})
    methods = [method for method in _CACHES if any(row["method"] == method for row in rows)]
    width = 0.8 / max(1, len(methods))
    marks = []
    for row in rows:
        place, (label, colour) = 0.0, ("two pools, nothing stays", FAINT)
        if row["reuse"]:
            if row["method"] not in _CACHES:
                continue
            label, colour = _CACHES[row["method"]]
            number = methods.index(row["method"])
            place = sizes.index(row["reuse"]) + alternating(len(methods), number, width)
        text = f"{row[field] / unit:.0f}"
        if field == "cache_bytes":
            text = f"{row[field] / unit:.1f}\n({row['ledger_bytes'] / unit:.1f})"
        elif row["hit_rate"]:
            text += f"\n({row['hit_rate']:.0%})"
        marks.append(bars(place, row[field] / unit, width=0.92 * width, color=colour, label=label,
                          texts=[text], text={"fontsize": 8.5}))  # fmt: skip
    marks += [dash(sizes.index(row["reuse"]), row[field] / over, 0.4, label=said)
              for row in rows if row["method"] == marked]  # fmt: skip
    return Panel(
        title=title, marks=marks, y=Axis(margin=0.22),
        x=Axis(names=[f"{size:g}" for size in sizes],
               label="" if field == "cache_bytes" else
               "slots of a layer, in selections (0: nothing stays)"),
    )  # fmt: skip
