"""Figures of HillInfer: agreement of cheap scores, pools, decode steps, splits, the SmartSSD PC."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.evaluate.figure_style import FAINT, GRID, INK, SERIES, short_tokens
from penstock.evaluate.result import Result
from research.clusters.end_to_end_table import device_name
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
    downwards,
    grouped,
    line,
    note,
    required,
    rule,
    stacked,
)
from research.figures.clusters import by_tokens
from research.near_storage.decode import GOAL, beta_of, measured, name_of
from research.near_storage.decode_run import OURS, PLAIN, SPLIT, without_budget
from research.near_storage.memory import method_name
from research.near_storage.placement import IMPORTANT, SECONDARY, UNIMPORTANT, WARM_STEPS
from research.near_storage.program import GOAL as TRAFFIC_GOAL
from research.near_storage.program import PAPER_MOVED, naive_row, times_less
from research.near_storage.smartssd import RIVALS, gains, row_of

# Agreement ----------------------------------------------------------------------------------------

_TARGETS = {8: 0.98, 4: 0.93}
"""Overlap that INT8 and INT4 should come to."""
_SCORES = {
    "products": "products\n(the paper's)", "last": "attention,\nlast step's\nlog-sums",
    "hot": "this step's,\nhot pool", "hot_sample": "hot pool and\na sample",
    "now": "this step's,\neverything", "engine": "same, hot\nones exact",
}  # fmt: skip
_BITS = {16: ("keys as they are", FAINT), 8: ("INT8", SERIES[0]), 4: ("INT4", SERIES[1])}
_SCORE_LINES = (
    ("engine", 8, SERIES[0], "everything's log-sums, hot ones exact"),
    ("engine", 4, SERIES[1], "the same"), ("hot", 8, FAINT, "the hot pool's log-sums"),
    ("last", 8, SERIES[2], "the last step's log-sums"), ("products", 8, SERIES[3], "products"),
)  # fmt: skip


def agreement(result: Result) -> Chart:
    """Which tokens cheap scores choose: bars by rule and bits, the worst layer, lines by layer."""
    found = result.figures
    rows = required(found.get("rows"), "this result of near_storage agreement has no rows")
    top, layers = max(row["top"] for row in rows), found["layers"]
    by_place = {(row["rule"], row["bits"]): row for row in rows if row["top"] == top}
    each = [[by_place.get((score, bits)) for score in _SCORES] for bits in _BITS]
    overlaps = [[row and row["overlap"] for row in some] for some in each]
    marks = grouped(
        overlaps, *zip(*_BITS.values(), strict=True), width=0.84, fill=0.9, text={"fontsize": 8},
        texts=[[f"{100 * (overlap or 0):.1f}" for overlap in some] for some in overlaps],
    )  # fmt: skip
    for number, some in enumerate(each):
        marks += [line(place + alternating(len(_BITS), number, 0.28), min(row["overlap_of_layer"]),
                       marker="_", linestyle="", color=INK, markersize=8, label="worst layer")
                  for place, row in enumerate(some) if row]  # fmt: skip
    lines = [
        line(layers, by_place[score, bits]["overlap_of_layer"], marker="o", markersize=4,
             color=colour, label=f"{name}, INT{bits}")
        for score, bits, colour, name in _SCORE_LINES if (score, bits) in by_place
    ]  # fmt: skip
    targets = [rule(target, color=_BITS[bits][1], linewidth=0.9, linestyle=":")
               for bits, target in _TARGETS.items()]  # fmt: skip
    return Chart(
        title=f"Best {top:.0%} of {short_tokens(found['prompt_tokens'])} tokens on "
              f"{found['model']} ({found['output']}); hot pool {found['hot_share']:.0%}",
        size=(13.2, 4.8), widths=(1.5, 1), panels=[[
            Panel(title="Chosen tokens that exact column sums choose too", marks=marks + targets,
                  x=Axis(names=list(_SCORES.values()), size=9), legend={"loc": "upper left",
                                                                        "ncols": 4},
                  y=Axis(low=0, high=1.3, form=PERCENT, ticks=[0.2 * tick for tick in range(6)])),
            Panel(title="The same by layer", marks=lines + targets, legend={"loc": "lower right"},
                  x=Axis(label="layer", ticks=layers[:: max(1, len(layers) // 8)]),
                  y=Axis(low=0, high=1.02, form=PERCENT)),
        ]],
    )  # fmt: skip


# Counts -------------------------------------------------------------------------------------------

_TIERS = (
    (IMPORTANT, "important (best 20 %)", "#b03a48"),
    (SECONDARY, "secondary (60 %)", "#c9ccd2"),
    (UNIMPORTANT, "unimportant (last 20 %)", "#5b8fb0"),
)
_TEXTS = {"premises": "whole", "short_premises": "short"}


def counts(result: Result) -> Chart:
    """HillInfer's figures 4 and 8: steps of tokens in each tier, who is important, what moves."""
    told = result.figures
    found = required({name: told[name] for name in _TEXTS if name in told},
                     "this result of near_storage placement has no premises")  # fmt: skip
    counted = [part for part in found.values() if "counts" in part]
    above = [[_tokens(counted[0], len(told["layers"]))]] if counted else []
    return Chart(
        title=f"Who is important on {told['model']} ({told['output']}), "
              f"{short_tokens(told['prompt_tokens'])} tokens of prompt",
        size=(13.2, 8.2 if counted else 4.4), panels=[*above, [_tenths(found), _moves(found)]],
    )  # fmt: skip


def _tokens(part: Row, layers: int) -> Panel:
    """Stacked bars by position, the mean of the layers."""
    steps = np.array(part["counts"], dtype=float) / layers
    most = steps.sum(axis=1).max()
    parts = ((label, steps[:, tier], colour) for tier, label, colour in _TIERS)
    return Panel(
        title=f"Steps in each tier, {part['prompt_tokens']:,} tokens of prompt, "
              f"{part['output_tokens']:,} of output, mean of the layers (fig. 8)",
        marks=[*stacked(parts, flat=False, width=1.0),
               rule(part["prompt_tokens"] - 0.5, across=False, color=INK, linestyle="--"),
               note("output", (part["prompt_tokens"], most), offset=(3, 4), ha="left")],
        x=Axis(label="token", low=-0.5, high=len(steps) - 0.5), grid="", wide=True,
        y=Axis(label="decode steps", low=0, high=1.22 * most),
        legend={"loc": "upper left", "ncols": 3},
    )  # fmt: skip


def _tenths(found: dict[str, Row]) -> Panel:
    """Tokens by the share of their steps in which they are important."""
    kinds = [(name, part, kind) for name, part in found.items() for kind in ("prompt", "output")]
    colours = {"premises": SERIES[:2], "short_premises": ("#7fb2c9", "#e6b391")}
    return Panel(
        title="Tokens by how often they are important", legend={},
        marks=grouped(
            [part["important_shares"][kind] for _, part, kind in kinds],
            [f"{kind}, {_TEXTS[name]} text ({part['prompt_tokens']:,} + "
             f"{part['output_tokens']:,})" for name, part, kind in kinds],
            [colours[name][kind == "output"] for name, _, kind in kinds], fill=1.0,
        ),
        x=Axis(names=[f"{10 * tenth}-{10 * tenth + 10}" for tenth in range(10)], size=9,
               label="% of its steps that a token is important in"),
        y=Axis(form=PERCENT),
    )  # fmt: skip


def _moves(found: dict[str, Row]) -> Panel:
    """Share of the cache into or out of the last tier at each step."""
    marks = []
    for number, (name, part) in enumerate(found.items()):
        for field, what, look in (
            ("moved_storage", "into or out of the last fifth", {"linewidth": 1.3}),
            ("moved_any", "into any other tier", {"linewidth": 1, "linestyle": ":"}),
        ):
            marks.append(line(range(len(part[field])), part[field], color=SERIES[number],
                              label=f"{_TEXTS[name]} text, {what}", **look))  # fmt: skip
    low, high = PAPER_MOVED
    chance = next(iter(found.values()))["chance_storage"]
    marks += [band(low, high, color=FAINT, alpha=0.16,
                   label=f"paper (fig. 4): {low:.0%} to {high:.0%}"),
              rule(chance, color=INK, linestyle="--", label="last fifth, ranks by chance")
    ]  # fmt: skip
    return Panel(
        title="Share of the cache that changes its tier at a step", marks=marks,
        x=Axis(label="decode step"), y=Axis(low=0, high=0.9, form=PERCENT),
        legend={"loc": "upper right", "ncols": 2, "fontsize": 9},
    )  # fmt: skip


# Placement ----------------------------------------------------------------------------------------

_RULES = {
    "naive": ("naive (pool: the step's best)", FAINT), "pin": ("+ pinning", SERIES[3]),
    "selected": ("only selected tokens come in", SERIES[2]),
    "table": ("+ hit table", SERIES[1]), "both": ("+ hit table and pinning", SERIES[0]),
}  # fmt: skip


def placement(result: Result) -> Chart:
    """What moves between the pools: traffic by pool and rule, hits, and along the decode."""
    found = result.figures
    rows = required(found.get("rows"), "this result of near_storage placement has no rules")
    alphas = sorted({row["alpha"] for row in rows})
    by_alpha = {alpha: [row for row in rows if row["alpha"] == alpha] for alpha in alphas}
    least, most = alphas[0], alphas[-1]
    return Chart(
        title=f"Hot and cold pools of {found['model']}, {short_tokens(found['prompt_tokens'])} "
              f"tokens of prompt, {found['output_tokens']:,} of output ({found['output']}); "
              "importance by exact attention",
        size=(13.2, 9.2), panels=[
            [_traffic(by_alpha[least], least, legend=True),
             _traffic(by_alpha[most], most, legend=False)],
            [_hits(by_alpha, least, most), _promoted(by_alpha[most], most)],
        ],
    )  # fmt: skip


def _traffic(rows: list[Row], alpha: float, *, legend: bool) -> Panel:
    """Bars of bytes both ways, after the first steps; how often less than naive above them."""
    pools = sorted({row["hot_share"] for row in rows})
    marks, width = [], 0.16
    for number, (name, (label, colour)) in enumerate(_RULES.items()):
        for place, pool in enumerate(pools):
            [row] = [one for one in rows if (one["hot_share"], one["rule"]) == (pool, name)]
            at = place + alternating(len(_RULES), number, width)
            less = times_less(rows, row, "moved_bytes_later")
            said = "" if name == "naive" else f"{less:.1f}x" if less < 10 else f"{less:.0f}x"
            marks.append(bars(
                at, row["moved_bytes_later"] / 1024, width=0.9 * width, color=colour, label=label,
                texts=[said], text={"fontsize": 8,
                                    "fontweight": "bold" if name == "both" else "normal"},
            ))  # fmt: skip
            if name == "both" and "clairvoyant_later" in row:
                naive = naive_row(rows, row)
                share = row["clairvoyant_later"]["mean"] / max(
                    1e-9, naive["promoted_later"]["mean"]
                )
                marks.append(dash(at, naive["moved_bytes_later"] / 1024 * share, width / 2,
                                  linestyle="-", label="if the future were known"))  # fmt: skip
    top = max(row["moved_bytes_later"] for row in rows) / 1024
    return Panel(
        title=f"KiB moved between the pools, a step and layer, {alpha:.0%} selected\n"
              f"(goal: both ideas {TRAFFIC_GOAL:.0f}x less than naive)",
        marks=marks, x=Axis(names=[f"{pool:.0%} of the past hot" for pool in pools]),
        y=Axis(low=0, high=(1.45 if legend else 1.12) * top, form=",.0f"),
        legend={"loc": "upper left", "ncols": 2, "fontsize": 9} if legend else None,
    )  # fmt: skip


def _hits(by_alpha: dict[float, list[Row]], least: float, most: float) -> Panel:
    """Share of what is selected that was hot already, by size of the pool."""
    marks = []
    for alpha, style in {least: ":", most: "-"}.items():
        rows = [row for row in by_alpha[alpha] if row["rule"] in ("naive", "both")]
        marks += curves(rows, "rule", "hot_share", "hot_share_of_selected_later", lambda name: {
            "markersize": 4, "color": _RULES[name][1], "linestyle": style,  # noqa: B023
            "label": f"{_RULES[name][0]}, {alpha:.0%} selected",  # noqa: B023
        })  # fmt: skip
    ends = [end(row["hot_share"] for row in by_alpha[most]) for end in (min, max)]
    marks += [line(ends, ends, color=GRID, linewidth=1.4),
              note("by chance", (ends[1], ends[1]), offset=(-2, -4), ha="right", va="top",
                   color=FAINT)]  # fmt: skip
    return Panel(
        title="Selected tokens that were hot already", marks=marks, legend={"loc": "lower right"},
        x=Axis(label="hot pool, share of the past", form=PERCENT),
        y=Axis(low=0, high=1.02, form=PERCENT),
    )  # fmt: skip


def _promoted(rows: list[Row], alpha: float) -> Panel:
    """Tokens promoted at each step, in the middle pool."""
    pools = sorted({row["hot_share"] for row in rows})
    pool = pools[len(pools) // 2]
    marks = [
        line(range(len(row["promoted_of_step"])),
             np.array(row["promoted_of_step"]) / row["selected"], color=_RULES[row["rule"]][1],
             linewidth=1.2)
        for row in rows if row["hot_share"] == pool
    ]  # fmt: skip
    return Panel(
        title=f"Promoted, in what is selected ({alpha:.0%}), pool of {pool:.0%}",
        marks=[*marks, band(0, WARM_STEPS, across=False, alpha=0.6),
               note("not counted", (1, 0.98), within=("data", "axes fraction"), va="top", ha="left",
                    color=FAINT)],
        x=Axis(label="decode step"), y=Axis(low=0, form=PERCENT),
    )  # fmt: skip


# Decode steps -------------------------------------------------------------------------------------

_METHODS = {
    OURS: SERIES[0], PLAIN: "#3d9c98", f"{OURS}:devices=2": "#6b8fd6", f"{OURS}:bits=4": "#b5375a",
    "infinigen": SERIES[1], "leoam": SERIES[2], "h2o": SERIES[3], "flexgen": "#a58b3f",
    "full": FAINT,
}  # fmt: skip


def decode(result: Result) -> Chart:
    """A column for each device: step time for each share, then memory at the longest length.

    Step times are lines over the lengths; bars where there is one length only.
    """
    rows = required(measured(result.figures.get("rows", [])),
                    "this result of near_storage decode has no methods")  # fmt: skip
    ratios = sorted({row["ratio"] for row in rows}, reverse=True)
    columns: list[list[Panel]] = []
    for device in dict.fromkeys(row["device"] for row in rows):
        here = [row for row in rows if row["device"] == device]
        name, panels = device_name(device), []
        for ratio in ratios:
            some = [row for row in here if row["ratio"] == ratio]
            lengths = {row["length"] for row in some if not row["hot"]}
            length = f", ms, {short_tokens(*lengths)}" if len(lengths) == 1 else ""
            title = f"{name}: a step{length}, {ratio:.0%} selected"
            unit = "" if columns else "milliseconds (log scale)"
            panels.append(_times(some, title) if length else _over_lengths(some, title, unit))
        longest = max(row["length"] for row in here)
        last = [row for row in here if (row["ratio"], row["length"]) == (ratios[0], longest)]
        title = f"{name}: memory, MiB, {short_tokens(longest)}, {ratios[0]:.0%}"
        columns.append([*panels, _memory(last, title)])
    few = len(columns) == 1
    return Chart(
        title=f"HillInfer's decode steps on {result.figures['model']}, equal numbers of selected "
              f"tokens{chr(10) if few else ', '}a budget of {result.settings.get('memory')} of "
              "the full cache",
        size=(3.0 + 5.4 * len(columns), 1.6 + 4.3 * (len(ratios) + 1)),
        panels=list(zip(*columns, strict=True)),
        legend={"ncols": 3 if few else min(6, 2 + len(columns)), "fontsize": 10},
    )  # fmt: skip


def _over_lengths(rows: Sequence[Row], title: str, unit: str) -> Panel:
    """Lines of all methods over the lengths."""

    def looks(method: str) -> Row:
        plain = without_budget(method)
        return {"color": _METHODS.get(plain, INK), "linewidth": 2.4 if plain == OURS else 1.4,
                "label": name_of({"method": method}), "markersize": 4.5,
                "zorder": 3 if plain == OURS else 2}  # fmt: skip

    plain = [row for row in rows if not row["hot"]]
    return Panel(
        title=title, marks=curves(plain, "method", "length", "mean_ms", looks), grid="both",
        x=by_tokens(sorted({row["length"] for row in plain})),
        y=Axis(log=10, fine=True, label=unit),
    )  # fmt: skip


def _times(rows: Sequence[Row], title: str) -> Panel:
    """A bar for each method of one length; a line from the fastest round to the slowest."""
    marks: list[Mark] = [bars(
        range(len(rows)), [row["mean_ms"] for row in rows], flat=True,
        color=[_METHODS.get(without_budget(row["method"]), INK) for row in rows],
        ends=[max(row["mean_ms"], *row["round_ms"]) for row in rows],
        texts=[f"{row['mean_ms']:.0f} ms, {row['tokens_per_s']:.1f} tokens/s" for row in rows],
        text={"fontsize": 8.5},
    )]  # fmt: skip
    marks += [line([min(row["round_ms"]), max(row["round_ms"])], [place] * 2, color=INK,
                   linewidth=1.2, marker="|", markersize=6, label="fastest to slowest round")
              for place, row in enumerate(rows)]  # fmt: skip
    return Panel(title=title, marks=marks, grid="x", x=Axis(room=1.35),
                 y=downwards([_bar_name(row) for row in rows], size=9))  # fmt: skip


def _bar_name(row: Row) -> str:
    return name_of(row) + (f", {row['hot']:,} hot" if row["hot"] else "")


def _memory(rows: Sequence[Row], title: str) -> Panel:
    """Bars: what the main process grew by, what it shares with devices, and the devices' own; the
    ledger's figure as a mark."""
    grown, shared = (np.array([max(0.0, row[field]) for row in rows]) / 2**20
                     for field in ("grown_bytes", "shared_bytes"))  # fmt: skip
    devices = [sum(row["device_bytes"]) / 2**20 for row in rows]
    marks = stacked((("main process", grown, SERIES[0]), ("shared", shared, SERIES[2])), width=0.8)
    marks.append(bars(range(len(rows)), devices, base=grown + shared, flat=True, color=GRID,
                      hatch="//", edgecolor=FAINT, label="device processes"))  # fmt: skip
    for place, row in enumerate(rows):
        marks += [
            note(f"{grown[place] + shared[place]:.0f}", (0, place), offset=(5, 0), ha="left",
                 va="center", fontsize=8.5, color="white"),
            line([row["ledger_bytes"] / 2**20] * 2, [place - 0.4, place + 0.4], color=INK,
                 linewidth=1.8, label="the ledger says"),
        ]  # fmt: skip
    return Panel(title=title, marks=marks, grid="x",
                 y=downwards([_bar_name(row) for row in rows], size=9))  # fmt: skip


def _memory_name(row: Row) -> str:
    """A method, what it has the same bytes as where several rows are of it, and its step."""
    same = "" if row["same"] in ("", "main") else f", {row['same']}"
    return f"{method_name(row['name'])}{same}\n{row['median_ms']:.0f} ms"


def memory(result: Result) -> Chart:
    """What all processes of a method hold, at each length and budget of HillInfer's own.

    Raises:
        ConfigError: nothing was measured.
    """
    rows = required([row for row in result.figures["rows"] if "error" not in row],
                    "this result of near_storage memory has no rows")  # fmt: skip
    places = list(dict.fromkeys((row["length"], row["budget"]) for row in rows))
    panels = []
    for length, budget in places:
        some = [row for row in rows if (row["length"], row["budget"]) == (length, budget)]
        names = [_memory_name(row) for row in some]
        held = _memory(some, f"{short_tokens(length)}, main process {budget}: MiB")
        panels.append(replace(held, y=downwards(names, size=9)))
    return Chart(
        title=f"All memory of {result.figures['model']}'s caches, device processes included",
        size=(6.6 * len(places), 5.2), panels=[panels],
        legend={"ncols": 2 if len(places) == 1 else 4},
    )  # fmt: skip


def split(result: Result) -> Chart:
    """Step time over beta on each device (figure 16b); the solved beta and Eq. 4's."""
    found = required(result.figures.get("splits"),
                     "this result of near_storage decode has no hot pools of several sizes"
    )  # fmt: skip
    panels: list[Panel] = []
    for one in found:
        rows = [row for row in measured(result.figures["rows"], SPLIT) if row["hot"]
                and all(row[name] == one[name] for name in ("device", "length", "ratio"))
        ]  # fmt: skip
        rows.sort(key=lambda row: int(row["hot"]))
        panels.append(_over_beta(one, rows, "" if panels else "a step, ms (median)"))
    return Chart(
        title=f"Where the hot pool ends, {result.figures['model']} (fig. 16b); rates measured in "
              "the same run",
        size=(1.4 + 6.0 * len(found), 6.0), panels=[panels],
        legend={"fontsize": 10, "ncols": 1 if len(panels) == 1 else 3},
    )  # fmt: skip


def _over_beta(one: Row, rows: Sequence[Row], label: str) -> Panel:
    """Of rows with hot pools of fixed sizes."""
    least, solved, eq4 = one["best"]["ms"], one["solved"]["beta"], one["eq4"]["beta"]
    betas = [beta_of(row["hot"], one["total_tokens"]) for row in rows]
    times = [row["median_ms"] for row in rows]
    marks = [
        line(betas, times, marker="o", markersize=5, color=SERIES[0], linewidth=2,
             label="measured, hot pool of that size"),
        band(least, (1 + GOAL) * least, alpha=0.7, label=f"within {GOAL:.0%} of the least"),
        rule(solved, across=False, color=SERIES[1], linewidth=1.6, label="solved while decoding"),
        line([solved], [one["solved_ms"]], marker="D", markersize=8, color=SERIES[1], linestyle="",
             label="the row that solves it itself"),
        rule(eq4, across=False, color=SERIES[3], linewidth=1.4, linestyle="--",
             label="Eq. 4 from the same rates, within memory"),
        note(f"over the least: solved {one['latency_off']:+.0%} (its own row "
             f"{one['own_latency_off']:+.0%}), Eq. 4 {one['eq4_latency_off']:+.0%}", (0.02, 0.04),
             within="axes fraction", ha="left", fontsize=9.5),
    ]  # fmt: skip
    for row, beta in zip(rows, betas, strict=True):
        last = row is rows[-1]  # the lines of what was solved are often there
        marks.append(note(f"{row['hit_rate']:.0%} hot", (beta, row["median_ms"]), color=FAINT,
                          offset=(-8, -12) if last else (5, 6), ha="right" if last else "left",
                          fontsize=8.5))  # fmt: skip
    return Panel(
        title=f"{device_name(one['device'])}: {short_tokens(one['length'])} tokens, "
              f"{one['ratio']:.0%} selected", marks=marks,
        x=Axis(log=10, ticks=betas[::2], names=[f"{beta:.2g}" for beta in betas[::2]],
               label="beta: hot tokens per cold token (log scale)"),
        y=Axis(low=0, high=1.12 * max(*times, one["solved_ms"]), label=label),
    )  # fmt: skip


# SmartSSD PC --------------------------------------------------------------------------------------

_INT8, _INT4 = "hillinfer, INT8 codes", "hillinfer, INT4 codes"
_LOOKS = {
    "full": (FAINT, "--"), "h2o-like": (SERIES[1], "--"), "prefetch-based": (SERIES[2], "--"),
    "leoam-like": (SERIES[3], "--"), "hillinfer, FP16 keys": (SERIES[0], ":"),
    _INT8: (SERIES[0], "-"), _INT4: (SERIES[0], "-."),
}  # fmt: skip
_MOST_BARS = 8
"""Constants shown of the sensitivity: those that tell most."""


def _simulated(result: Result) -> list[Row]:
    """Rows of the first model."""
    rows = required(result.figures.get("rows", []),
                    "this result has no rows; run research.near_storage.smartssd")  # fmt: skip
    return [row for row in rows if row["model"] == rows[0]["model"]]


def _title(result: Result, what: str) -> str:
    first, locality = _simulated(result)[0], result.figures["locality"]["source"]
    return (f"{what}: simulated RTX 4090 PC with a SmartSSD, {first['model']}, batch "
            f"{first['batch']}, top {first['alpha']:.0%}; locality {locality}")  # fmt: skip


def smartssd(result: Result) -> Chart:
    """HillInfer's figures 12 and 13: latency of a step by context, and speed-ups."""
    rows = _simulated(result)
    model, spots = rows[0]["model"], sorted({row["tokens"] for row in rows})
    look = {"marker": "o", "markersize": 4}
    latency = [
        line(spots, [row_of(rows, model, tokens, name)["step_ms"] for tokens in spots],
             color=colour, linestyle=dashes, label=name, **look)
        for name, (colour, dashes) in _LOOKS.items()
    ]  # fmt: skip
    least, most = result.figures["paper_speedup"]
    gain = [band(least, most, label=f"the paper's range, {least} to {most}x"),
            rule(1.0, linewidth=0.8)]  # fmt: skip
    for rival in RIVALS:
        for ours in (_INT8, _INT4):
            over = [gains(rows, row_of(rows, model, tokens, ours))[rival] for tokens in spots]
            gain.append(line(spots, over, color=_LOOKS[rival][0], linestyle=_LOOKS[ours][1],
                             label=f"{ours.partition(', ')[2][:4]} over {rival}", **look)
            )  # fmt: skip
    same = [gains(rows, row_of(rows, model, tokens, _INT4), "same_drive_ms")["h2o-like"]
            for tokens in spots]  # fmt: skip
    gain.append(line(spots, same, linestyle=":", color=FAINT, **look,
                     label="INT4 over h2o-like, no faster SSD"))  # fmt: skip
    stored = [row_of(rows, model, tokens, "full")["storage_share"] for tokens in spots]
    x = Axis(log=10, ticks=spots, label="tokens of context; below, KV that GPU and host memory "
             "cannot hold", names=[f"{short_tokens(tokens)}\n{share:.0%}" for tokens, share in
                                   zip(spots, stored, strict=True)])  # fmt: skip
    ticks = (0.25, 0.5, 1, 2, 4, 8)
    return Chart(
        title=_title(result, "A decode step"), size=(13.2, 5.4), panels=[[
            Panel(title="Latency, fig. 12", marks=latency, x=x, legend={},
                  y=Axis(log=10, form=",.0f", label="milliseconds of a decode step (log)")),
            Panel(title="Speed-up of HillInfer, fig. 13", marks=gain, x=x,
                  legend={"ncols": 2, "loc": "lower left", "fontsize": 9},
                  y=Axis(log=10, low=0.2, high=1.2 * most, label="step time over step time (log)",
                         ticks=ticks, names=[f"{tick:g}" for tick in ticks])),
        ]],
    )  # fmt: skip


def smartssd_split(result: Result) -> Chart:
    """Time of a layer's evaluation by beta, Eq. 4's and the best one marked (fig. 16b)."""
    _simulated(result)
    panels = []
    for sweep in result.figures["splits"]:
        points = [point for point in sweep["points"] if point["beta"]]
        marks = [line([point["beta"] for point in points], [point["ms"] for point in points],
                      color=SERIES[0])]  # fmt: skip
        marks += [
            line([sweep[f"{key}_beta"]], [sweep[f"{key}_ms"]], marker=marker, linestyle="",
                 color=colour, markersize=size,
                 label=f"{word}: {sweep[f'{key}_beta']:.2f}, {sweep[f'{key}_ms']:.1f} ms")
            for key, marker, colour, word, size in (("eq4", "D", SERIES[1], "Eq. 4", 7),
                                                    ("best", "o", SERIES[2], "best", 5))
            if sweep[f"{key}_beta"] is not None
        ]  # fmt: skip
        panels.append(Panel(
            title=f"{sweep['title'][0].upper()}{sweep['title'][1:]}, "
                  f"{short_tokens(sweep['tokens'])}",
            marks=marks, grid="both", legend={"loc": "upper right"},
            x=Axis(log=10, fine=True, form="g", label="beta, hot tokens per cold token (log)",
                   low=sweep["eq4_beta"] / 20 if sweep["eq4_beta"] else None),
            y=Axis(low=0, high=4 * sweep["best_ms"], label="ms of a layer"),
        ))  # fmt: skip
    rows = [panels[first : first + 2] for first in range(0, len(panels), 2)]
    return Chart(title=_title(result, "Split of the pools, fig. 16b"), panels=rows,
                 size=(13.2, 3.3 * len(rows)))  # fmt: skip


def smartssd_parts(result: Result) -> Chart:
    """What a step waits for at the longest context, ablations, and which constants decide."""
    rows = _simulated(result)
    longest = max(row["tokens"] for row in rows)
    here = [row for row in rows if row["tokens"] == longest]
    parts = (("GPU", "gpu_ms", FAINT), ("scoring", "scoring_ms", SERIES[0]),
             ("fetch", "fetch_ms", SERIES[1]))  # fmt: skip
    marks = stacked((label, [row[field] / 1e3 for row in here], colour)
                    for label, field, colour in parts)  # fmt: skip
    for place, row in enumerate(here):
        total = sum(row[field] for _, field, _ in parts) / 1e3
        said = f"{total:.1f} s, {row['storage_read_bytes'] / 1e9:.1f} GB to the host"
        marks.append(note(said, (total, place), offset=(5, 0), ha="left", va="center"))
    return Chart(
        title=_title(result, "What a step waits for"), size=(13.2, 5.6), widths=(1.15, 1), panels=[[
            Panel(title=f"At {short_tokens(longest)}; ablations of INT8, fig. 16a", marks=marks,
                  grid="x", y=downwards([row["method"] for row in here]),
                  legend={"loc": "lower right"},
                  x=Axis(low=0, high=1.42e-3 * max(row["step_ms"] for row in here),
                         label="seconds of a step: the GPU's, waiting for scores, for KV")),
            _decides(result.figures["sensitivity"]),
        ]],
    )  # fmt: skip


def _decides(found: Row) -> Panel:
    """Bars from a constant 20 % lower to 20 % higher, around each speed-up as it is."""
    shown = found["rows"][:_MOST_BARS]
    marks = []
    for shift, rival in enumerate(RIVALS):
        colour, usual = _LOOKS[rival][0], found["speedups"][rival]
        for place, row in enumerate(shown):
            low, high = row["0.8"][rival], row["1.2"][rival]
            at = place + 0.26 * (shift - 1)
            marks += [bars(at, high - low, base=low, flat=True, width=0.2, color=colour),
                      line([high], [at], marker=">" if high >= low else "<", color=colour,
                           markersize=5)]  # fmt: skip
        marks.append(rule(usual, across=False, color=colour, label=f"over {rival}: {usual:.2f}"))
    return Panel(
        title="Constants at -20 % and (arrow) +20 %", marks=marks, grid="x",
        x=Axis(low=0, label=f"speed-up of {found['method']} at {short_tokens(found['tokens'])}"),
        y=Axis(names=[row["name"] for row in shown], low=len(shown) + 0.6, high=-0.6),
        legend={"loc": "lower right", "bbox_to_anchor": (1, 0.02), "fontsize": 9},
    )  # fmt: skip
