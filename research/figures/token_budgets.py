"""Figure of methods at equal numbers of selected tokens: mean score over the budget of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import GRID, INK, SERIES, model_of, short_tokens
from penstock.evaluate.intervals import Estimate, mean_percent
from penstock.evaluate.result import Result
from research.figures.result_lengths import by_length

MOST_SERIES = 10
"""More lines than this are a table's business."""
_REFERENCE = "full"
_BUDGET = "selected_tokens"
_LINES = (("-", "o"), ("--", "s"), (":", "D"), ("-.", "^"))
Variant = tuple[str, tuple[str, ...]]
"""A method and its options but for the budget."""


@dataclass(frozen=True)
class _Series:
    variant: Variant
    points: dict[int, Estimate]
    """Mean score in per cent, by selected tokens."""


@dataclass(frozen=True)
class _Panel:
    tokens: int
    tasks: int
    samples: int
    full: float | None
    series: list[_Series]


def has_token_budgets(result: Result) -> bool:
    """Whether two methods or more were asked at several budgets of tokens each."""
    if result.kind != "accuracy":
        return False
    for panel in map(_panel_of, by_length(result)):
        several = {one.variant[0] for one in panel.series if len(one.points) > 1}
        if len(several) > 1 and len(panel.series) <= MOST_SERIES:
            return True
    return False


def draw_token_budgets(result: Result) -> Figure:
    """Mean score over selected tokens, a line for each method and its options, a panel a length.

    Raises:
        ConfigError: nothing was asked at a budget of tokens.
    """
    panels = [panel for panel in map(_panel_of, by_length(result)) if panel.series]
    if not panels:
        raise ConfigError("no setting of this result has selected_tokens")
    figure = Figure(figsize=(2.6 + 4.4 * len(panels), 5.4), layout="constrained")
    row = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    variants = list(dict.fromkeys(one.variant for panel in panels for one in panel.series))
    looks, names = _looks(variants), _names(variants)
    for axes, panel in zip(row, panels, strict=True):
        _draw_panel(axes, panel, looks, names)
    row[0].set_ylabel("score, mean over tasks, %")
    found = [axes.get_legend_handles_labels() for axes in row]
    legend = {
        label: handle for handles, labels in found
        for handle, label in zip(handles, labels, strict=True)
    }  # fmt: skip
    figure.legend(
        legend.values(), legend.keys(), frameon=False, ncols=1 if len(panels) == 1 else 2,
        loc="outside lower center", fontsize=9.5,
    )  # fmt: skip
    samples, tasks = min(p.samples for p in panels), max(p.tasks for p in panels)
    figure.suptitle(
        f"Score at equal numbers of selected tokens{model_of(result)}\n{tasks} tasks of {samples} "
        "samples; bars are 95 % intervals",
        fontsize=11, fontweight="bold", x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _draw_panel(
    axes: Axes, panel: _Panel, looks: dict[Variant, dict[str, Any]], names: dict[Variant, str]
) -> None:
    if panel.full is not None:
        axes.axhline(panel.full, color=INK, linewidth=1.1, linestyle="--", label="full attention")
    budgets = sorted({budget for one in panel.series for budget in one.points})
    width = 0.5 / max(1, len(panel.series))
    for number, one in enumerate(panel.series):
        shift = (number - (len(panel.series) - 1) / 2) * width
        x = [budgets.index(budget) + shift for budget in sorted(one.points)]
        found = [one.points[budget] for budget in sorted(one.points)]
        y = [each.value for each in found]
        error = [[e.value - e.low for e in found], [e.high - e.value for e in found]]
        look = looks[one.variant]
        axes.errorbar(x, y, yerr=error, fmt="none", ecolor=look["color"], alpha=0.45, capsize=2)
        axes.plot(x, y, label=names[one.variant], markersize=6.5, clip_on=False, zorder=4, **look)
    axes.set_xticks(range(len(budgets)), [f"{budget:,}" for budget in budgets])
    axes.set_xlim(-0.5, len(budgets) - 0.5)
    axes.set_ylim(0, 105)
    axes.set_yticks(range(0, 101, 20))
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_xlabel("tokens that a step selects")
    axes.set_title(f"{short_tokens(panel.tokens)} tokens")


def _looks(variants: Sequence[Variant]) -> dict[Variant, dict[str, Any]]:
    """A colour for each method, a line and a marker for each of its variants."""
    methods = list(dict.fromkeys(name for name, _ in variants))
    out: dict[Variant, dict[str, Any]] = {}
    for name in methods:
        mine = [variant for variant in variants if variant[0] == name]
        colour = SERIES[methods.index(name) % len(SERIES)]
        for number, variant in enumerate(mine):
            line, marker = _LINES[number % len(_LINES)]
            out[variant] = {"color": colour, "linestyle": line, "marker": marker}
    return out


def _names(variants: Sequence[Variant]) -> dict[Variant, str]:
    """Methods with the options in which their settings differ."""
    common = set[str]().union(*(set(options) for _, options in variants))
    for _, options in variants:
        common &= set(options)
    names = {}
    for variant in variants:
        method, options = variant
        shown = ", ".join(option for option in options if option not in common)
        names[variant] = f"{method}: {shown}" if shown else method
    return names


def _panel_of(result: Result) -> _Panel:
    """The settings that answered most tasks, over these tasks."""
    at = {
        (cell["setting"], cell["task"]): cell["scores"]
        for cell in result.figures.get("cells", []) if cell["scores"]
    }  # fmt: skip
    texts = [text for text in dict.fromkeys(text for text, _ in at) if text != _REFERENCE]
    every = list(dict.fromkeys(task for _, task in at))
    most = max((sum((text, task) in at for task in every) for text in texts), default=0)
    texts = [text for text in texts if sum((text, task) in at for task in every) == most]
    tasks = [task for task in every if all((text, task) in at for text in texts)]
    series: dict[Variant, dict[int, Estimate]] = {}
    for text in texts if tasks else []:
        variant, budget = _read(text)
        if budget is not None:
            points = series.setdefault(variant, {})
            points[budget] = mean_percent([at[text, task] for task in tasks])
    full = None
    if tasks and all((_REFERENCE, task) in at for task in tasks):
        full = mean_percent([at[_REFERENCE, task] for task in tasks]).value
    return _Panel(
        tokens=int(result.settings["tokens"]) if series else 0, tasks=len(tasks),
        samples=min((len(at[key]) for key in product(texts, tasks)), default=0), full=full,
        series=[_Series(variant, points) for variant, points in series.items()],
    )  # fmt: skip


def _read(text: str) -> tuple[Variant, int | None]:
    """A setting's method and options, and its budget of tokens."""
    head, _, rest = text.partition(":")
    options = [option for option in rest.split(",") if option]
    budgets = [option for option in options if option.startswith(f"{_BUDGET}=")]
    others = tuple(sorted(option for option in options if option not in budgets))
    return (head, others), int(budgets[0].partition("=")[2]) if budgets else None
