"""Figures of search: time, bytes and waiting by strategy, bytes by the equations, accuracy."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.patches import Patch

from penstock.evaluate.figure_style import FAINT, SERIES, model_of
from penstock.evaluate.result import Result
from research.figures.chart import (
    PERCENT,
    Axis,
    Chart,
    Look,
    Mark,
    Panel,
    Row,
    band,
    bars,
    dash,
    intervals,
    line,
    note,
    required,
    rule,
)
from research.search.plan import FIG_7_CONVENTION, FIG_7_GIB
from research.search.speed import baseline_of, gain_of, measured
from research.search.variants import BASELINE, BEYOND, IN_MEMORY, PAPER, VARIANTS
from research.search_accuracy.program import METHOD_NAMES
from research.search_accuracy.searches import (
    BEST_LOGPROB,
    BEST_VERIFIED,
    GREEDY,
    LOGPROB_SEARCH,
    SINGLE,
    VERIFIED,
)

_LOOKS = {
    BASELINE: ("layer-wise offloading", FAINT), "inter-token": ("inter-token locality", "#9db6c4"),
    "+inter-beam": ("+ inter-beam locality", "#4f93b5"),
    PAPER: ("+ prefetch (the paper's method)", "#0b6e99"),
    BEYOND: ("+ shared blocks once (beyond the paper)", "#c96a2b"),
    IN_MEMORY: ("all in fast memory", "#d5d8dd"),
}  # fmt: skip
_PAPER_GAINS = {"opt-6.7b": (3.39, 9.72), "llama-2-7b": (3.60, 8.74), "qwen-7b": (4.17, 7.99)}
"""Least and most over layer-wise offloading, by model."""
_LEAST = 1e-4
"""Bars below this share of layer-wise offloading's do not stretch a log scale."""
Value = Callable[[Row, Row], float]
"""Of a row and the baseline of as many beams."""


# Speed, the paper's figures 9 to 12 ---------------------------------------------------------------


def speedups(result: Result) -> Chart:
    """How many times faster than layer-wise offloading: a panel for each number of beams."""
    rows = _rows(result)
    names = [name for name in _variants(rows) if name != BASELINE]
    model = result.settings["model"]
    told = model if model in _PAPER_GAINS else "opt-6.7b"
    low, high = _PAPER_GAINS[told]
    gains: list[float] = []

    def gain(row: Row, base: Row) -> float:
        gains.append(gain_of(row, base) or 0.0)
        return gains[-1]

    said = "times as fast as layer-wise offloading"
    panels = _panels(rows, names, gain, lambda row, of: f"{of:.2f}" if of < 10 else f"{of:.1f}",
                     Axis(label=said), turned=len(rows) > 9 * len(_beams(rows)),
                     more=[band(low, high, color="#f6e7c8", alpha=0.75, zorder=0),
                           rule(1, zorder=0.5)])  # fmt: skip
    most = 1.1 * max(high, *(1.05 * one for one in gains))
    panels = [replace(panel, y=replace(panel.y, low=0, high=most)) for panel in panels]
    paper = Patch(color="#f6e7c8", label=f"the paper, {told}, RTX 4090: {low:g} to {high:g} times")
    over = IN_MEMORY in names and any(_is_over(row) for row in rows)
    return _chart(result, "Time of a request: layer-wise offloading over ours", panels,
                  [*_keys(names, over=over), paper])  # fmt: skip


def loaded(result: Result) -> Chart:
    """Bytes that a request loads, over those of layer-wise offloading, with what was planned."""
    rows = _rows(result)
    names = [name for name in _variants(rows) if name != IN_MEMORY]
    return _chart(
        result, "Loaded from the slow tier in a request",
        _shares(rows, names, "loaded_bytes", lambda row, _: _gib(row), 0.13,
                "share of layer-wise offloading (log scale);\non the bars: GiB",
                mark="predicted_loaded_bytes"),
        _keys(names),
    )  # fmt: skip


def stalls(result: Result) -> Chart:
    """Time in which the model waits for bytes, over that of layer-wise offloading."""
    rows = _rows(result)
    names = [name for name in _variants(rows) if name != IN_MEMORY]

    def said(row: Row, _: float) -> str:
        return f"{_seconds(row['request']['stall_s'])} ({row['request']['stall_share']:.1%})"

    return _chart(
        result, "Waiting for bytes in a request",
        _shares(rows, names, "stall_s", said, 0.28, "wait over layer-wise offloading's (log scale);"
                "\non the bars: seconds, share of the run"),
        _keys(names),
    )  # fmt: skip


_PARTS: tuple[tuple[str, Callable[[Row], float], str], ...] = (
    ("computing", lambda of: float(max(0.0, of["decode_s"] - of["stall_s"])), "#0b6e99"),
    ("waiting for bytes", lambda of: float(of["stall_s"]), "#c96a2b"),
    ("forking and letting go", lambda of: float(of["expand_s"]), "#4b8b3b"),
)


def times(result: Result) -> Chart:
    """Computation, waiting for bytes and expansion of a request, over layer-wise offloading."""
    rows = _rows(result)
    panels, longest = [], 0
    for some in _beams(rows):
        here = [row for row in rows if row["beams"] == some]
        groups = [[row for name in _variants(rows) for row in here
                   if row["variant"] == name and _step(row) == step] for step in _steps(here)
        ]  # fmt: skip
        shown = [(row, place) for row, place in _places(groups, 0.5)]
        base = baseline_of(rows, some)
        whole = base["request"]["seconds"] if base is not None else 1.0
        at = [place for _, place in shown]
        marks, ends = [], np.zeros(len(at))
        for label, value, colour in _PARTS:
            sizes = np.array([value(row["request"]) / whole for row, _ in shown])
            marks.append(bars(at, sizes, base=ends, flat=True, width=0.7, color=colour,
                              label=label))  # fmt: skip
            ends = ends + sizes
        marks += [
            note(f"{_seconds(row['request']['seconds'])}, {row['request']['stall_share']:.1%}",
                 (end, place), offset=(4, 0), ha="left", va="center", fontsize=8.5,
                 annotation_clip=False)
            for (row, place), end in zip(shown, ends, strict=True)
        ]  # fmt: skip
        labels = [row["variant"] if row["any_step"] else f"{row['variant']}, {row['step_tokens']}"
                  for row, _ in shown]  # fmt: skip
        panels.append(Panel(
            title=f"{some} beams", marks=marks, grid="x",
            x=Axis(label="time over layer-wise offloading", low=0, high=1.32 * max(1.0, *ends)),
            y=Axis(ticks=at, names=labels, size=9, bare=True, low=max(at) + 0.6, high=-0.6),
        ))  # fmt: skip
        longest = max(longest, len(at))
    chart = _chart(result, "Where a request's time goes (seconds, share of waiting)", panels, [])
    return replace(chart, size=(chart.size[0], 2.2 + 0.36 * longest), legend={"ncols": 3})


def _rows(result: Result) -> list[Row]:
    rows = measured(result.figures.get("rows", []))
    required(any(row["variant"] == BASELINE for row in rows),
             "this result has no row of layer-wise offloading to compare with")  # fmt: skip
    return rows


def _variants(rows: Sequence[Row]) -> list[str]:
    return [name for name in VARIANTS if any(row["variant"] == name for row in rows)]


def _beams(rows: Sequence[Row]) -> list[int]:
    return sorted({row["beams"] for row in rows})


def _step(row: Row) -> int:
    """Tokens of a row's steps; 0 where any number would do."""
    return 0 if row["any_step"] else int(row["step_tokens"])


def _steps(rows: Sequence[Row]) -> list[int]:
    return sorted({_step(row) for row in rows})


def _places(groups: Sequence[Sequence[Row]], gap: float) -> list[tuple[Row, float]]:
    """Rows and where they stand: group by group, with gaps between."""
    found, at = [], 0.0
    for group in groups:
        found += [(row, at + number) for number, row in enumerate(group)]
        at += len(group) + gap * bool(group)
    return found


def _panels(
    rows: Sequence[Row], names: Sequence[str], value: Value, said: Callable[[Row, float], str],
    y: Axis, *, mark: Value | None = None, turned: bool = True, more: Sequence[Mark] = (),
) -> list[Panel]:  # fmt: skip
    """A panel for each number of beams: bars of all variants side by side for each step; those of
    any step stand first, apart."""
    panels: list[Panel] = []
    for beams in _beams(rows):
        base = baseline_of(rows, beams)
        here = [row for row in rows if row["beams"] == beams and row["variant"] in names]
        groups = [
            [row for name in names for row in here if row["variant"] == name and _step(row) == step
             and (VARIANTS[name].in_steps or not step)]
            for step in _steps(here)
        ]  # fmt: skip
        marks = list(more)
        for row, at in _places(groups, 0.9):
            if base is not None:
                marks += _bar(at, row, value(row, base), said, mark and mark(row, base), turned)
        places = {step: [at for row, at in _places(groups, 0.9) if row in group]
                  for step, group in zip(_steps(here), groups, strict=True) if group}  # fmt: skip
        panels.append(Panel(
            title=f"{beams} beams", marks=marks, y=replace(y, label="" if panels else y.label),
            x=Axis(ticks=[sum(at) / len(at) for at in places.values()], bare=True,
                   names=[str(step or "any") for step in places], label="tokens of a step"),
        ))  # fmt: skip
    return panels


def _bar(
    at: float, row: Row, height: float, said: Callable[[Row, float], str], planned: float | None,
    turned: bool,
) -> list[Mark]:  # fmt: skip
    hatch: Look = {"hatch": "//", "edgecolor": "white"} if (
        row["variant"] == IN_MEMORY and _is_over(row)) else {}  # fmt: skip
    marks = [bars(at, height, width=0.86, color=_LOOKS[row["variant"]][1], linewidth=0, **hatch)]
    if planned:
        marks.append(dash(at, planned, 0.48, linestyle="-", zorder=3,
                          label="by the transfer model"))  # fmt: skip
    top = max(height, planned or 0)
    seen = top > _LEAST
    marks.append(note(
        said(row, height), (at, top if seen else 0.02), offset=(0, 3), va="bottom", fontsize=8,
        within="data" if seen else ("data", "axes fraction"), rotation=90 if turned else 0,
    ))  # fmt: skip
    return marks


def _shares(
    rows: Sequence[Row], names: Sequence[str], field: str, said: Callable[[Row, float], str],
    text: float, label: str, *, mark: str = "",
) -> list[Panel]:  # fmt: skip
    """Shares of the baseline's figure on one log scale, of which the text takes such a share."""
    found: list[float] = []

    def share(row: Row, base: Row, of: str = field) -> float:
        whole = base["request"][field]
        found.append(float(row["request"][of] / whole) if whole else 0.0)
        return found[-1]

    panels = _panels(rows, names, share, said, Axis(label=label, log=10),
                     mark=(lambda row, base: share(row, base, mark)) if mark else None)  # fmt: skip
    heights = [one for one in found if one > _LEAST] or [1.0]
    low, high = min(heights) / 4, max(heights)
    ticks = [10.0**power for power in range(-6, 1) if low <= 10.0**power]
    y = Axis(log=10, low=low, high=low * (high / low) ** (1 / (1 - text)), ticks=ticks,
             names=[f"{100 * tick:.3g} %" for tick in ticks])  # fmt: skip
    return [replace(panel, y=replace(y, label=panel.y.label)) for panel in panels]


def _is_over(row: Row) -> bool:
    return bool(row["memory"]["used_bytes"] > row["memory"]["budget_bytes"])


def _gib(row: Row) -> str:
    size = row["request"]["loaded_bytes"] / 2**30
    return (f"{size:,.0f}" if size >= 100 else f"{size:.3g}") if size else "none"


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return "<1 ms" if seconds else "none"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _keys(names: Sequence[str], *, over: bool = False) -> list[Patch]:
    """All variants; `over`: that in memory takes more of it than the budget."""
    keys = [Patch(color=_LOOKS[name][1], label=_LOOKS[name][0]) for name in names]
    if over:
        said, colour = _LOOKS[IN_MEMORY]
        keys[names.index(IN_MEMORY)] = Patch(facecolor=colour, edgecolor="white", hatch="//",
                                             linewidth=0, label=f"{said}, beyond the budget"
        )  # fmt: skip
    return keys


def _chart(result: Result, what: str, panels: list[Panel], keys: list[Patch]) -> Chart:
    """What was measured of which model where, and how."""
    settings, rows = result.settings, measured(result.figures["rows"])
    layers = f", {settings['layers']} layers" if settings.get("layers") else ""
    where = result.machine.get("gpu") if settings["device"] == "cuda" else "CPU"
    slow = dict.fromkeys(row["store"] for row in rows if row["variant"] != IN_MEMORY)
    ways = {row["way"] for row in rows}
    how = "steps measured at places, interpolated between"
    if ways == {"whole"}:
        how = "every step ran"
    elif len(ways) > 1:
        how = "some rows whole, others measured at places"
    return Chart(
        title=f"{what}\n{settings['model']}{layers}, {settings['dtype']}, {where}; prompt "
              f"{settings['prompt_tokens']:,}, {settings['tokens']:,} new tokens, width "
              f"{settings['width']}, {settings['memory']} of fast memory;\n"
              f"slow tier: {', '.join(slow)}; survivors drawn by lot; {how}",
        size=(max(9.6, 1.6 + 4.6 * len(panels)), 5.6), panels=[panels], keys=keys,
        legend={"ncols": min(4, (len(keys) + 2) // 2), "fontsize": 10},
    )  # fmt: skip


# Bytes by the equations ---------------------------------------------------------------------------

_FIG_7 = {"model": "opt-6.7b", "beams": 64, "prompt_tokens": 128, "tokens": 1920, "memory": "7GiB"}
_CONVENTIONS = {"start": "at its start:", "literal": "as printed:"}
"""Other conventions than the figure's, as they are spoken of."""


def plan(result: Result) -> Chart:
    """On the left bytes of each step, on the right totals by convention, the paper's too."""
    rows = required(result.figures.get("rows", []), "this result has no rows")
    settings = result.settings
    shown = [row for row in rows if row["convention"] in (None, FIG_7_CONVENTION)]
    is_fig_7 = all(settings.get(name) == value for name, value in _FIG_7.items())
    return Chart(
        title=f"What a request loads, by Eq. 1-5: {settings['model']}, {settings['beams']} beams, "
              f"prompt {settings['prompt_tokens']:,}, {settings['tokens']:,} new tokens,\n"
              f"{settings['memory']} of fast memory; nothing was run, and no block is shared",
        size=(12.4, 5.6), widths=(1.25, 1),
        panels=[[_along(shown), _totals(shown, rows, FIG_7_GIB if is_fig_7 else {})]],
    )  # fmt: skip


def _along(rows: Sequence[Row]) -> Panel:
    """A staircase for each strategy, on a log scale, over stretches of the longest step; one that
    loads nothing is left out."""
    stretch, marks = max(row["step_tokens"] for row in rows), []
    for row, colour in zip(rows, (FAINT, *SERIES), strict=False):
        at = np.arange(0, len(row["starts"]), max(1, stretch // row["added_over"]))
        size = np.add.reduceat(np.array(row["loaded_bytes"], dtype=np.float64), at) / 2**30
        x = np.append(np.array(row["starts"])[at], row["starts"][-1] + row["added_over"])
        y = np.where(size > 0, size, np.nan)
        marks.append(line(x, np.append(y, y[-1]), drawstyle="steps-post", color=colour, linewidth=2,
                          label=_strategy(row)))  # fmt: skip
    return Panel(
        title=f"Along the request, every {stretch} tokens", marks=marks, grid="both",
        x=Axis(label="tokens of a beam"), y=Axis(label="GiB loaded (log scale)", log=10),
        legend={"loc": "lower right"},
    )  # fmt: skip


def _totals(shown: Sequence[Row], rows: Sequence[Row], paper: dict[int, int]) -> Panel:
    """Bars of totals under the figure's convention; in them, what the others give."""
    totals = [row["total_bytes"] / 2**30 for row in shown]
    texts = [f"{total:,.0f}" + (f"\n(paper: {paper[row['step_tokens']]:,})"
                                if row["step_tokens"] in paper else "")
             for row, total in zip(shown, totals, strict=True)]  # fmt: skip
    marks = [bars(range(len(shown)), totals, color=[FAINT, *SERIES][: len(shown)], texts=texts)]
    for place, row in enumerate(shown):
        others = [
            f"{_CONVENTIONS[other['convention']]}\n{other['total_bytes'] / 2**30:,.0f}"
            for other in rows
            if other["step_tokens"] == row["step_tokens"] and other["convention"] in _CONVENTIONS
        ]  # fmt: skip
        marks.append(note("\n".join(others), (place, totals[place]), offset=(0, -6), color="white",
                          va="top", fontsize=8.5))  # fmt: skip
    return Panel(
        title="The request, lengths at a step's end", marks=marks,
        x=Axis(names=[_strategy(row).replace(" ", "\n", 1) for row in shown], bare=True),
        y=Axis(label="GiB loaded (log scale)", log=10, low=max(min(totals), 1) / 20,
               high=4 * max(totals)),
    )  # fmt: skip


def _strategy(row: Row) -> str:
    return f"steps of {row['step_tokens']}" if row["step_tokens"] else "token by token"


# Accuracy -----------------------------------------------------------------------------------------

_LINES = (
    (VERIFIED, SERIES[0], -1, True), (LOGPROB_SEARCH, SERIES[2], -1, False),
    (BEST_VERIFIED, SERIES[1], 1, True), (BEST_LOGPROB, SERIES[3], 1, False),
)  # fmt: skip
"""Method, colour, side, and whether it is the verifier's: a dot with its interval. Log-probability
is a ring that fits around the dot, for it chooses the same where the model is sure."""
_APART = 0.03
"""Of a mark from its number of beams, in doublings: intervals must not lie on each other."""


def accuracy(result: Result) -> Chart:
    """A panel for each temperature: share of whole paths that are right, with 95 % intervals."""
    found, settings = result.figures, result.settings
    rows = required(found.get("rows"), "this result of search_accuracy has no rows")
    temperatures = sorted({row["temperature"] for row in rows})
    panels: list[Panel] = []
    for temperature in temperatures:
        here = [row for row in rows if row["temperature"] == temperature]
        single, beams = _reference(found, SINGLE, temperature), sorted({r["beams"] for r in here})
        panels.append(Panel(
            title=f"temperature {temperature:g}: {_short(single)} of single samples right",
            marks=[*_by_beams(here), rule(single["accuracy"], linestyle=":", linewidth=1.6,
                                          zorder=1, label=METHOD_NAMES[SINGLE])],
            x=Axis(log=2, ticks=beams, names=[str(count) for count in beams],
                   label="beams (candidates of a step), or N samples"),
            y=Axis(low=-0.04, high=1.06, form=PERCENT, label="" if panels else "whole paths right"),
        ))  # fmt: skip
    documents = max(row["documents"] for row in rows)
    return Chart(
        title=f"Pointer chasing over {found['hops']} hops{model_of(result)}: {documents} documents "
              f"of {settings['tokens']:,} tokens, greedy decoding "
              f"{_short(_reference(found, GREEDY, 0.0))} right\n"
              f"steps of {settings['step']} tokens, {settings['width']} continuations of each "
              "surviving beam; bars: 95 % intervals with the verifier",
        size=(1.4 + 5.3 * len(panels), 5.2), panels=[panels], share=(False, True),
        legend={"ncols": 3},
    )  # fmt: skip


def _by_beams(rows: Sequence[Row]) -> list[Mark]:
    marks = []
    for method, colour, side, by_verifier in _LINES:
        mine = sorted(
            (row for row in rows if row["method"] == method), key=lambda r: int(r["beams"])
        )
        places = [row["beams"] * 2.0 ** (side * _APART) for row in mine]
        shares = [row["accuracy"] for row in mine]
        look = {"color": colour, "marker": "o", "label": METHOD_NAMES[method]}
        if by_verifier:
            marks.append(intervals(
                places, shares, below=[row["accuracy"] - row["low"] for row in mine],
                above=[row["high"] - row["accuracy"] for row in mine], markersize=5.5,
                linewidth=1.9, elinewidth=1.1, capsize=2.5, **look,
            ))  # fmt: skip
        else:
            marks.append(line(places, shares, markersize=10.5, linestyle="--", linewidth=1.3,
                              markerfacecolor="none", **look))  # fmt: skip
    return marks


def _reference(found: Row, method: str, temperature: float) -> Row:
    return next(
        row for row in found["references"]
        if row["method"] == method and row["temperature"] == temperature
    )  # fmt: skip


def _short(row: Row) -> str:
    share = 100 * row["accuracy"]
    return f"{share:.1f} %" if 0 < share < 1 else f"{share:.0f} %"
