"""Figures of `search.speed`: speed-up, bytes, time and stall by strategy (the paper's 9 to 12)."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, INK
from penstock.evaluate.result import Result
from research.search.speed_table import baseline_of, gain_of, measured
from research.search.variants import BASELINE, BEYOND, IN_MEMORY, PAPER, VARIANTS

_COLOURS = {
    BASELINE: FAINT, "inter-token": "#9db6c4", "+inter-beam": "#4f93b5", PAPER: "#0b6e99",
    BEYOND: "#c96a2b", IN_MEMORY: "#d5d8dd",
}  # fmt: skip
_NAMES = {
    BASELINE: "layer-wise offloading", "inter-token": "inter-token locality",
    "+inter-beam": "+ inter-beam locality", PAPER: "+ prefetch (the paper's method)",
    BEYOND: "+ shared blocks once (beyond the paper)", IN_MEMORY: "all in fast memory",
}  # fmt: skip
_PAPER_GAINS = {"opt-6.7b": (3.39, 9.72), "llama-2-7b": (3.60, 8.74), "qwen-7b": (4.17, 7.99)}
"""Least and most over layer-wise offloading, by model."""
_LEAST = 1e-4
"""Bars below this share of layer-wise offloading's do not stretch a log scale."""
_WIDTH = 0.86
"""Of the bars of one place together."""
Row = dict[str, Any]


def search_speed_figures(result: Result, name: str) -> dict[str, Callable[[Result], Figure]]:
    """What a result has rows for, by the figures' names."""
    rows = measured(result.figures.get("rows", []))
    if not any(row["variant"] == BASELINE for row in rows):
        return {}
    return {
        name: draw_speedups, f"{name}-bytes": draw_bytes, f"{name}-time": draw_times,
        f"{name}-stall": draw_stalls,
    }  # fmt: skip


def draw_speedups(result: Result) -> Figure:
    """How many times faster than layer-wise offloading: a panel for each number of beams.

    Raises:
        ConfigError: layer-wise offloading was not measured.
    """
    rows = _rows(result)
    names = [name for name in _variants(rows) if name != BASELINE]
    figure, panels = _panels(result, rows, "Time of a request: layer-wise offloading over ours")
    low, high = _PAPER_GAINS.get(result.settings["model"], _PAPER_GAINS["opt-6.7b"])
    told = result.settings["model"] if result.settings["model"] in _PAPER_GAINS else "opt-6.7b"
    for axes, beams in zip(panels, _beams(rows), strict=True):
        axes.axhspan(low, high, color="#f6e7c8", alpha=0.75, linewidth=0, zorder=0)
        axes.axhline(1, color=FAINT, linewidth=1, zorder=0.5)
        base = baseline_of(rows, beams)

        def gain(row: Row, base: Row | None = base) -> float | None:
            return gain_of(row, base)

        _bars(axes, rows, beams, names, gain, _times, turned=len(rows) > 9 * len(panels))
        axes.set_ylim(0, None)
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, 1.1 * max(top, high))
    panels[0].set_ylabel("times as fast as layer-wise offloading")
    over = IN_MEMORY in names and any(_is_over(row) for row in rows)
    band = Patch(color="#f6e7c8", label=f"the paper, {told}, RTX 4090: {low:g} to {high:g} times")
    _legend(figure, names, [band], over=over)
    return figure


def draw_bytes(result: Result) -> Figure:
    """Bytes that a request loads, over those of layer-wise offloading, with what was planned.

    Raises:
        ConfigError: layer-wise offloading was not measured.
    """
    rows = _rows(result)
    names = [name for name in _variants(rows) if name != IN_MEMORY]
    figure, panels = _panels(result, rows, "Loaded from the slow tier in a request")
    for axes, beams in zip(panels, _beams(rows), strict=True):
        base = baseline_of(rows, beams)
        whole = base["request"]["loaded_bytes"] if base is not None else 0

        def share(row: Row, whole: float = whole) -> float | None:
            return float(row["request"]["loaded_bytes"] / whole) if whole else None

        def planned(row: Row, whole: float = whole) -> float | None:
            return float(row["request"]["predicted_loaded_bytes"] / whole) if whole else None

        _bars(axes, rows, beams, names, share, lambda row, _: _gib(row), mark=planned, turned=True)
        _log(axes)
    _same_limits(panels, text=0.13)
    panels[0].set_ylabel("share of layer-wise offloading (log scale);\non the bars: GiB")
    mark = panels[0].plot([], [], color=INK, linewidth=1.6, label="by the transfer model")[0]
    _legend(figure, names, [mark])
    return figure


def draw_times(result: Result) -> Figure:
    """Computation, waiting for bytes and expansion of a request, over layer-wise offloading.

    Raises:
        ConfigError: layer-wise offloading was not measured.
    """
    rows = _rows(result)
    names, beams = _variants(rows), _beams(rows)
    parts = (
        ("computing", _computing, "#0b6e99"),
        ("waiting for bytes", lambda row: row["request"]["stall_s"], "#c96a2b"),
        ("forking and letting go", lambda row: row["request"]["expand_s"], "#4b8b3b"),
    )
    bars = {some: _time_bars(rows, some, names) for some in beams}
    longest = max(len(lines) for lines in bars.values())
    figure = Figure(
        figsize=(max(9.6, 1.8 + 4.6 * len(beams)), 2.2 + 0.36 * longest), layout="constrained"
    )
    panels = figure.subplots(1, len(beams), squeeze=False)[0]
    for axes, some in zip(panels, beams, strict=True):
        base = baseline_of(rows, some)
        whole = base["request"]["seconds"] if base is not None else 1.0
        places = [at for at, _, _ in bars[some]]
        for place, _, row in bars[some]:
            left = 0.0
            for said, value, colour in parts:
                width = value(row) / whole
                axes.barh(place, width, left=left, height=0.7, color=colour,
                          label=None if place else said)  # fmt: skip
                left += width
            axes.annotate(
                f"{_seconds(row['request']['seconds'])}, {row['request']['stall_share']:.1%}",
                (left, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5,
                color=INK, annotation_clip=False,
            )  # fmt: skip
        axes.set_yticks(places, [label for _, label, _ in bars[some]], fontsize=9)
        axes.invert_yaxis()
        axes.set_title(f"{some} beams")
        ends = [sum(value(row) for _, value, _ in parts) / whole for _, _, row in bars[some]]
        axes.set_xlim(0, 1.32 * max(1.0, *ends))
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("time over layer-wise offloading")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3)
    _title(figure, result, "Where a request's time goes (seconds, share of waiting)")
    return figure


def draw_stalls(result: Result) -> Figure:
    """Time in which the model waits for bytes, over that of layer-wise offloading.

    Raises:
        ConfigError: layer-wise offloading was not measured.
    """
    rows = _rows(result)
    names = [name for name in _variants(rows) if name != IN_MEMORY]
    figure, panels = _panels(result, rows, "Waiting for bytes in a request")
    for axes, beams in zip(panels, _beams(rows), strict=True):
        base = baseline_of(rows, beams)
        whole = base["request"]["stall_s"] if base is not None else 0

        def share(row: Row, whole: float = whole) -> float | None:
            return float(row["request"]["stall_s"] / whole) if whole else None

        def label(row: Row, _: float) -> str:
            return f"{_seconds(row['request']['stall_s'])} ({row['request']['stall_share']:.1%})"

        _bars(axes, rows, beams, names, share, label, turned=True)
        _log(axes)
    _same_limits(panels, text=0.28)
    panels[0].set_ylabel("wait over layer-wise offloading's (log scale);\n"
                         "on the bars: seconds, share of the run")  # fmt: skip
    _legend(figure, names, [])
    return figure


# Parts --------------------------------------------------------------------------------------------


def _rows(result: Result) -> list[Row]:
    rows = measured(result.figures.get("rows", []))
    if not any(row["variant"] == BASELINE for row in rows):
        raise ConfigError("this result has no row of layer-wise offloading to compare with")
    return rows


def _variants(rows: Sequence[Row]) -> list[str]:
    return [name for name in VARIANTS if any(row["variant"] == name for row in rows)]


def _beams(rows: Sequence[Row]) -> list[int]:
    return sorted({row["beams"] for row in rows})


def _panels(result: Result, rows: Sequence[Row], what: str) -> tuple[Figure, list[Axes]]:
    beams = _beams(rows)
    figure = Figure(figsize=(max(9.6, 1.4 + 4.6 * len(beams)), 5.6), layout="constrained")
    panels = list(figure.subplots(1, len(beams), squeeze=False)[0])
    for axes, some in zip(panels, beams, strict=True):
        axes.set_title(f"{some} beams")
        axes.set_xlabel("tokens of a step")
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    _title(figure, result, what)
    return figure, panels


def _bars(
    axes: Axes, rows: Sequence[Row], beams: int, names: Sequence[str],
    value: Callable[[Row], float | None], said: Callable[[Row, float], str], *,
    mark: Callable[[Row], float | None] | None = None, turned: bool = False,
) -> None:  # fmt: skip
    """Bars of all variants side by side for each step; those of any step stand first, apart."""
    here = [row for row in rows if row["beams"] == beams and row["variant"] in names]
    steps = sorted({row["step_tokens"] for row in here if not row["any_step"]})
    places: list[tuple[float, str]] = []
    at = 0.0
    anyhow = [row for row in here if row["any_step"]]
    inner = [name for name in names if VARIANTS[name].in_steps]
    for label, some in [("any", anyhow), *((str(n), None) for n in steps)]:
        chosen = some if some is not None else [
            row for name in inner for row in here
            if row["variant"] == name and str(row["step_tokens"]) == label
        ]  # fmt: skip
        if not chosen:
            continue
        first = at
        for row in chosen:
            _bar(axes, at, row, value(row), said, mark, turned)
            at += 1
        places.append(((first + at - 1) / 2, label))
        at += 0.9
    axes.set_xticks([x for x, _ in places], [label for _, label in places])
    axes.tick_params(axis="x", length=0)


def _bar(
    axes: Axes, at: float, row: Row, height: float | None, said: Callable[[Row, float], str],
    mark: Callable[[Row], float | None] | None, turned: bool,
) -> None:  # fmt: skip
    if height is None:
        return
    hatch = "//" if row["variant"] == IN_MEMORY and _is_over(row) else None
    axes.bar(at, height, width=_WIDTH, color=_COLOURS[row["variant"]], hatch=hatch,
             edgecolor="white" if hatch else None, linewidth=0)  # fmt: skip
    planned = None if mark is None else mark(row)
    if planned:
        axes.plot([at - 0.48, at + 0.48], [planned] * 2, color=INK, linewidth=1.6, zorder=3)
    top = max(height, planned or 0)
    axes.annotate(
        said(row, height), (at, top) if top > _LEAST else (at, 0.02),
        xycoords="data" if top > _LEAST else ("data", "axes fraction"), xytext=(0, 3),
        textcoords="offset points", ha="center", va="bottom", fontsize=8, color=INK,
        rotation=90 if turned else 0,
    )  # fmt: skip


def _time_bars(
    rows: Sequence[Row], beams: int, names: Sequence[str]
) -> list[tuple[float, str, Row]]:
    """Places, labels and rows: those of any step first, then step by step, with gaps between."""
    here = [row for row in rows if row["beams"] == beams]
    found: list[tuple[float, str, Row]] = []
    at = 0.0
    for step in [None, *sorted({row["step_tokens"] for row in here if not row["any_step"]})]:
        chosen = [
            row for name in names for row in here
            if row["variant"] == name
            and (row["any_step"] if step is None else (row["step_tokens"] == step
                                                       and not row["any_step"]))
        ]  # fmt: skip
        for row in chosen:
            found.append((at, row["variant"] if step is None else f"{row['variant']}, {step}", row))
            at += 1
        at += 0.5 * bool(chosen)
    return found


def _computing(row: Row) -> float:
    request = row["request"]
    return float(max(0.0, request["decode_s"] - request["stall_s"]))


def _is_over(row: Row) -> bool:
    return bool(row["memory"]["used_bytes"] > row["memory"]["budget_bytes"])


def _log(axes: Axes) -> None:
    """A log scale of shares; ticks above all of it would mean nothing."""
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{100 * value:.3g} %" if value <= 1 else "")
    )


def _same_limits(panels: Sequence[Axes], text: float) -> None:
    """One log scale for all panels, from below the least bar on; the text takes such a share."""
    bars = [patch for axes in panels for patch in axes.patches if isinstance(patch, Rectangle)]
    heights = [bar.get_height() for bar in bars if bar.get_height() > _LEAST]
    if heights:
        low, high = min(heights) / 4, max(heights)
        for axes in panels:
            axes.set_ylim(low, low * (high / low) ** (1 / (1 - text)))


def _times(row: Row, height: float) -> str:
    return f"{height:.2f}" if height < 10 else f"{height:.1f}"


def _gib(row: Row) -> str:
    size = row["request"]["loaded_bytes"] / 2**30
    if not size:
        return "none"
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return "<1 ms" if seconds else "none"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _legend(
    figure: Figure, names: Sequence[str], more: Sequence[Any], *, over: bool = False
) -> None:
    """All variants and `more`; `over`: that in memory takes more of it than the budget."""
    handles: list[Any] = [Patch(color=_COLOURS[name], label=_NAMES[name]) for name in names]
    if over:
        handles[names.index(IN_MEMORY)] = Patch(
            facecolor=_COLOURS[IN_MEMORY], edgecolor="white", hatch="//", linewidth=0,
            label=f"{_NAMES[IN_MEMORY]}, beyond the budget",
        )  # fmt: skip
    handles += more
    figure.legend(handles=handles, frameon=False, loc="outside lower center",
                  ncols=min(4, -(-len(handles) // 2)), fontsize=10)  # fmt: skip


def _title(figure: Figure, result: Result, what: str) -> None:
    """What was measured of which model where, and how."""
    figure.suptitle(f"{what}\n{setting_of(result)}", fontsize=12, x=0.01, ha="left")


def setting_of(result: Result) -> str:
    """Model, sizes, memory and machine of a run, in two lines."""
    settings, rows = result.settings, measured(result.figures.get("rows", []))
    layers = f", {settings['layers']} layers" if settings.get("layers") else ""
    where = result.machine.get("gpu") if settings["device"] == "cuda" else "CPU"
    slow = dict.fromkeys(row["store"] for row in rows if row["variant"] != IN_MEMORY)
    ways = {row["way"] for row in rows}
    how = (
        "every step ran" if ways == {"whole"} else "steps measured at places, interpolated between"
    )
    if len(ways) > 1:
        how = "some rows whole, others measured at places"
    return (
        f"{settings['model']}{layers}, {settings['dtype']}, {where}; prompt "
        f"{settings['prompt_tokens']:,}, {settings['tokens']:,} new tokens, width "
        f"{settings['width']}, {settings['memory']} of fast memory;\n"
        f"slow tier: {', '.join(slow)}; survivors drawn by lot; {how}"
    )
