"""Figures of LouisKV: when it retrieves and what, its segments, and scores over token budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import Any

import matplotlib
import numpy as np

from penstock.engine.policy import SelectionPolicy
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.figure_style import INK, SERIES, model_of, short_tokens
from penstock.evaluate.intervals import Estimate, mean_percent
from penstock.evaluate.result import Result
from penstock.evaluate.retrieval_counts import LENGTHS, Counts, add_counts, retrieving_share
from penstock.methods.louiskv.policy import CLUSTER_TOKENS, LouisKV
from research.figures.accuracy import by_length
from research.figures.chart import (
    PERCENT,
    Axis,
    Chart,
    Look,
    Mark,
    Name,
    Panel,
    alternating,
    bars,
    grouped,
    intervals,
    line,
    required,
    rule,
)

_REFERENCE = "full"
_SMALL_BOLD: Look = {"fontsize": 11, "fontweight": "bold"}

# Settings as numbers ------------------------------------------------------------------------------

_COMPARED = frozenset({"selected_tokens", "tau", "lost_mass", "boundaries", "units"})
_UNIT_SIZE = frozenset({"cluster_tokens", "group_tokens"})
_ALIKE = ("window_tokens", "sink_tokens")
Rest = tuple[tuple[str, object], ...]
"""Options that a setting has besides those that the figures compare."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting: how often it retrieves and how well it answers.

    Attributes:
        share: steps that retrieve, of all steps of all layers; 1 for methods that always do.
        score: mean over the tasks of its `Compared`, in per cent.
        by_task: in per cent.
    """

    policy: SelectionPolicy
    share: float
    score: Estimate
    by_task: dict[str, float]

    @property
    def place(self) -> float:
        """By what a line orders its points."""
        if not isinstance(self.policy, LouisKV):
            return 0.0
        if self.policy.stride:
            return -self.policy.stride
        return -self.policy.lost_mass if self.policy.tau is None else self.policy.tau

    @property
    def family(self) -> str:
        """What a line of the figure joins: "tau", "mass", "stride", "every" or "pages" of LouisKV,
        or the method's name."""
        if not isinstance(self.policy, LouisKV):
            return self.policy.name
        if self.policy.units == "pages":
            return "pages"
        if self.policy.stride:
            return "stride"
        if self.policy.boundaries == "every":
            return "every"
        return "mass" if self.policy.tau is None else "tau"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """All settings of one length and one budget, over the tasks that all of them answered.

    Attributes:
        samples: of the task that has fewest.
        full: score of full attention, in per cent.
        rest: what all of its settings have alike and those of another one do not.
    """

    tokens: int
    budget: int
    tasks: tuple[str, ...]
    samples: int
    full: float | None
    points: tuple[Point, ...]
    rest: Rest = ()

    def family(self, name: str) -> list[Point]:
        """Its points, by rising tau, falling stride or falling lost mass."""
        return sorted((p for p in self.points if p.family == name), key=lambda p: p.place)

    @property
    def title(self) -> str:
        """What its panel is called."""
        rest = "".join(f", {name}={value}" for name, value in self.rest)
        return f"{self.budget} of {short_tokens(self.tokens)} tokens selected{rest}"


def compared(result: Result) -> list[Compared]:
    """By length, then budget, then what else the settings have (clusters of 4 are not compared with
    clusters of 16); without those that have but one setting of LouisKV.
    """
    found = []
    for one in by_length(result):
        cells = [cell for cell in one.figures["cells"] if cell["scores"]]
        texts = list(dict.fromkeys(cell["setting"] for cell in one.figures["cells"]))
        policies = {text: parse_setting(text).policy for text in texts}
        budgets = {getattr(policy, "selected_tokens", None) for policy in policies.values()}
        for budget in sorted(budget for budget in budgets if budget):
            mine = {
                text: _rest(policy) for text, policy in policies.items()
                if getattr(policy, "selected_tokens", None) == budget
            }  # fmt: skip
            common = set[tuple[str, object]].intersection(*(set(rest) for rest in mine.values()))
            for rest in sorted(set(mine.values()), key=str):
                chosen = {text: policy for text, policy in policies.items()
                          if text == _REFERENCE or mine.get(text) == rest}  # fmt: skip
                if sum(isinstance(policy, LouisKV) for policy in chosen.values()) < 2:
                    continue
                apart = tuple(one for one in rest if one not in common)
                found += _compare(one.settings["tokens"], budget, chosen, cells, apart)
    return found


def has_retrievals(result: Result) -> bool:
    """Whether a result says at which steps layers retrieved, in settings that compare."""
    counts = any(cell.get("retrieval") for cell in result.figures.get("cells", []))
    return counts and bool(compared(result))


def _rest(policy: SelectionPolicy) -> Rest:
    """Window, sinks and the size of units, which methods have other defaults for, and whatever else
    is not the method's default."""
    named = {*_COMPARED, *_UNIT_SIZE, *_ALIKE}
    given = {
        option.name: getattr(policy, option.name) for option in fields(policy)
        if option.name not in named and getattr(policy, option.name) != option.default
    }  # fmt: skip
    sizes_itself = isinstance(policy, LouisKV) and policy.cluster_tokens is None
    sizes = [getattr(policy, name, None) or 1 for name in _UNIT_SIZE]
    given["unit_tokens"] = CLUSTER_TOKENS if sizes_itself else max(sizes)
    given |= {name: getattr(policy, name, 0) for name in _ALIKE}
    return tuple(sorted(given.items()))


def _compare(
    tokens: int, budget: int, policies: dict[str, SelectionPolicy], cells: Sequence[Any], rest: Rest
) -> list[Compared]:
    """One, or none where no task was answered by all."""
    at = {(cell["setting"], cell["task"]): cell for cell in cells}
    answered = {text for text, _ in at if text in policies}
    tasks = _answered_by(at, answered)
    if not tasks or answered <= {_REFERENCE}:
        return []
    points = []
    for text in (text for text in policies if text in answered and text != _REFERENCE):
        mine = [at[text, task] for task in tasks]
        shares = [retrieving_share(cell.get("retrieval")) for cell in mine]
        points.append(Point(
            # Every task counts alike, as in the mean score.
            share=float(np.mean([1.0 if share is None else share for share in shares])),
            policy=policies[text], score=mean_percent([cell["scores"] for cell in mine]),
            by_task={cell["task"]: 100 * float(np.mean(cell["scores"])) for cell in mine},
        ))  # fmt: skip
    return [Compared(
        tokens=tokens, budget=budget, tasks=tuple(tasks), points=tuple(points), rest=rest,
        samples=min(len(at[text, task]["scores"]) for text in answered for task in tasks),
        full=_full({key: cell["scores"] for key, cell in at.items()}, tasks),
    )]  # fmt: skip


def _answered_by(at: dict[tuple[str, str], Any], texts: Sequence[str] | set[str]) -> list[str]:
    """Tasks that all these settings answered."""
    every = dict.fromkeys(task for _, task in at)
    return [task for task in every if all((text, task) in at for text in texts)]


def _full(scores: dict[tuple[str, str], Any], tasks: Sequence[str]) -> float | None:
    """Score of full attention over tasks, in per cent."""
    if not tasks or not all((_REFERENCE, task) in scores for task in tasks):
        return None
    return mean_percent([scores[_REFERENCE, task] for task in tasks]).value


def _full_rule(full: float | None) -> list[Mark]:
    if full is None:
        return []
    return [rule(full, color=INK, linewidth=1.1, linestyle="--", label="full attention")]


def _around(found: Sequence[Estimate]) -> dict[str, list[float]]:
    """The ends of intervals, as `intervals` takes them."""
    return {"below": [one.value - one.low for one in found],
            "above": [one.high - one.value for one in found]}  # fmt: skip


def _title(panels: Sequence[Compared], what: str, more: str) -> str:
    tasks = {task for panel in panels for task in panel.tasks}
    samples = min(panel.samples for panel in panels)
    return f"{what}\n{len(tasks)} task{'s' if len(tasks) > 1 else ''} of {samples} samples{more}"


# When and what ------------------------------------------------------------------------------------

_LINES = (
    ("tau", "semantic boundaries, by \u03c4", "o"), ("stride", "fixed stride, in steps", "s"),
    ("mass", "attention that may be lost", "P"),
)  # fmt: skip
_ALWAYS = (
    ("every", "its units, at every step", "D", SERIES[0]), ("quest", "quest", "^", SERIES[2]),
    ("arkvale", "arkvale", "v", SERIES[3]),
)  # fmt: skip
_UNITS = {
    "every": ("clusters and segments", SERIES[0]), "pages": ("pages, by their means", SERIES[1]),
    "quest": ("quest (pages, by bounds)", SERIES[2]),
    "arkvale": ("arkvale (pages, by volumes)", SERIES[3]),
}  # fmt: skip


def retrievals(result: Result) -> Chart:
    """Mean score over the share of steps that retrieve; a panel for each length and budget.

    Semantic boundaries (by tau) and fixed strides are lines: at the same place on the x axis they
    retrieve equally often.
    """
    found = required(compared(result), "no two settings of this result answered the same task")
    panels = [
        Panel(
            title=one.title, marks=_retrieval_marks(one), named=_point_names(one), grid="both",
            x=Axis(label="steps that retrieve, all layers together", low=0, high=1.06,
                   form=PERCENT),
            y=Axis(label="" if number else "score, mean over tasks, %", low=-9, high=110,
                   ticks=range(0, 101, 20)),
        )
        for number, one in enumerate(found)
    ]  # fmt: skip
    return Chart(
        title=_title(found, "LouisKV: retrieving at semantic boundaries, at fixed strides, and "
                     "always", f"{model_of(result)}; thin bars are 95 % intervals"),
        look=_SMALL_BOLD, size=(1.2 + 4.7 * len(panels), 5.2), panels=[panels],
        share=(False, True), legend={"ncols": 3, "fontsize": 10},
    )  # fmt: skip


def _retrieval_marks(one: Compared) -> list[Mark]:
    marks = _full_rule(one.full)
    always = [family for family in _ALWAYS if one.family(family[0])]
    shown = [(*family, SERIES[number], "-", 0.0) for number, family in enumerate(_LINES)]
    shown += [(*family, "None", alternating(len(always), place, 0.025))
              for place, family in enumerate(always)]  # fmt: skip
    for family, label, marker, colour, style, shift in shown:
        if points := one.family(family):
            x = [point.share + shift for point in points]
            y = [point.score.value for point in points]
            marks += [
                intervals(x, y, **_around([point.score for point in points]), fmt="none",
                          ecolor=colour, alpha=0.4, capsize=2),
                line(x, y, color=colour, marker=marker, markersize=6.5, linestyle=style,
                     label=label, clip_on=False, zorder=4),
            ]  # fmt: skip
    return marks


def _point_names(one: Compared) -> list[Name]:
    return [
        Name(text=f"{abs(point.place):g}", x=point.share, y=point.score.value,
             look={"color": SERIES[number]})
        for number, (family, _, _) in enumerate(_LINES) for point in one.family(family)
    ]  # fmt: skip


def units(result: Result) -> Chart:
    """Score by task of what can be retrieved at every step: LouisKV's units, and pages."""
    found = required(compared(result), "no two settings of this result answered the same task")
    panels = []
    for one in found:
        shown = [name for name in _UNITS if one.family(name)]
        scores = [[one.family(name)[0].by_task[task] for task in one.tasks] for name in shown]
        labels, colours = zip(*(_UNITS[name] for name in shown), strict=True) if shown else ((), ())
        panels.append(Panel(
            title=one.title,
            marks=grouped(scores, labels, colours, fill=0.94, text={"offset": (0, 2)},
                          texts=[[f"{score:.0f}" for score in some] for some in scores]),
            x=Axis(names=[task.replace("_", "\n") for task in one.tasks], size=9.5),
            y=Axis(label="score, %", low=0, high=112, ticks=range(0, 101, 25)),
        ))  # fmt: skip
    return Chart(
        title=_title(found, "What is retrieved, when every step retrieves", model_of(result)),
        look=_SMALL_BOLD, size=(9.5, 0.9 + 3.0 * len(panels)), panels=[[one] for one in panels],
        legend={"ncols": 4, "fontsize": 10},
    )  # fmt: skip


# Segments -----------------------------------------------------------------------------------------


def segments(result: Result) -> Chart:
    """Segments by length, retrieving steps by layer, and how alike neighbouring layers cut.

    A colour for each tau, all lengths, budgets and tasks together (LouisKV, figs. 14 and 15).
    """
    by_tau = required(_by_tau(result), "no setting of this result has semantic boundaries")
    shades = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.82, len(by_tau)))
    width, longest = 0.84 / len(by_tau), 0
    lengths, layers, alike = [], [], []
    for number, (tau, counts) in enumerate(sorted(by_tau.items())):
        look = {"color": shades[number], "label": f"\u03c4 {tau:g}"}
        dots = {"marker": "o", "markersize": 5, **look}
        bins = np.array(counts["lengths"], dtype=float)
        at = np.arange(len(bins)) + alternating(len(by_tau), number, width)
        lengths.append(bars(at, bins / bins.sum(), width=width, **look))
        longest = max(longest, int(bins.nonzero()[0].max()))
        shares = np.array(counts["retrievals"]) / np.array(counts["steps"])
        layers.append(line(range(len(shares)), shares, **dots))
        both, either = np.array(counts["both"], dtype=float), np.array(counts["either"])
        alike.append(line(np.arange(len(both)) + 0.5, both / np.maximum(either, 1), **dots))
    names = [str(high) if high - low == 1 else f"{low + 1}\u2013{high}"
             for low, high in pairwise([0, *LENGTHS])]  # fmt: skip
    y = Axis(low=0, high=1.02, form=PERCENT)
    return Chart(
        title=f"Semantic boundaries of LouisKV{model_of(result)}, all tasks and budgets together",
        look=_SMALL_BOLD, size=(13.8, 4.6), widths=(1.35, 1, 1), panels=[[
            Panel(title="Segments by length", marks=lengths, y=y, legend={"fontsize": 10},
                  x=Axis(names=[*names, f">{LENGTHS[-1]}"][: longest + 1], size=9, low=-0.6,
                         high=longest + 0.6, label="steps of a segment")),
            Panel(title="Steps that retrieve, by layer", marks=layers, y=y,
                  x=Axis(whole=True, label="layer")),
            Panel(title="Boundaries that neighbours share", marks=alike, y=y,
                  x=Axis(whole=True, label="between layers (of what either has)")),
        ]],
    )  # fmt: skip


def _by_tau(result: Result) -> dict[float, Counts]:
    """Counts by threshold, of the lengths, budgets and tasks that all thresholds answered."""
    cells: dict[float, dict[tuple[Any, ...], Counts]] = {}
    for cell in result.figures["cells"]:
        policy = parse_setting(cell["setting"]).policy
        if not cell.get("retrieval") or not isinstance(policy, LouisKV):
            continue
        by_tau = policy.boundaries == "adaptive" and policy.units != "pages"
        if by_tau and policy.tau is not None:
            key = (cell["length"], cell["task"], policy.selected_tokens)
            cells.setdefault(policy.tau, {})[key] = cell["retrieval"]
    shared = set.intersection(*(set(found) for found in cells.values())) if cells else set()
    out: dict[float, Counts] = {}
    for tau, found in cells.items():
        for key in shared:
            both = add_counts(out.get(tau), found[key])
            assert both is not None
            out[tau] = both
    return out


# Budgets of tokens --------------------------------------------------------------------------------

MOST_SERIES = 10
"""More lines than this are a table's business."""
_BUDGET = "selected_tokens"
_STYLES = (("-", "o"), ("--", "s"), (":", "D"), ("-.", "^"))
Variant = tuple[str, tuple[str, ...]]
"""A method and its options but for the budget."""


@dataclass(frozen=True)
class _Scores:
    """Mean scores of one prompt length, by variant and selected tokens; of full attention."""

    tokens: int
    tasks: int
    samples: int
    full: float | None
    series: dict[Variant, dict[int, Estimate]]


def has_token_budgets(result: Result) -> bool:
    """Whether two methods or more were asked at several budgets of tokens each."""
    for scores in map(_scores_of, by_length(result)):
        several = {method for (method, _), found in scores.series.items() if len(found) > 1}
        if len(several) > 1 and len(scores.series) <= MOST_SERIES:
            return True
    return False


def token_budgets(result: Result) -> Chart:
    """Mean score over selected tokens, a line for each method and its options, a panel a length."""
    found = required([scores for scores in map(_scores_of, by_length(result)) if scores.series],
                     "no setting of this result has selected_tokens")  # fmt: skip
    variants = list(dict.fromkeys(variant for scores in found for variant in scores.series))
    looks = _looks(variants)
    panels = [_budget_panel(scores, looks) for scores in found]
    y = replace(panels[0].y, label="score, mean over tasks, %")
    panels[0] = replace(panels[0], y=y)
    tasks, samples = max(one.tasks for one in found), min(one.samples for one in found)
    return Chart(
        title=f"Score at equal numbers of selected tokens{model_of(result)}\n"
              f"{tasks} tasks of {samples} samples; bars are 95 % intervals",
        look=_SMALL_BOLD, size=(2.6 + 4.4 * len(panels), 5.4), panels=[panels],
        share=(False, True),
        legend={"ncols": 1 if len(panels) == 1 else 2, "fontsize": 10},
    )  # fmt: skip


def _budget_panel(scores: _Scores, looks: dict[Variant, Look]) -> Panel:
    budgets = sorted({budget for points in scores.series.values() for budget in points})
    marks = _full_rule(scores.full)
    for number, (variant, points) in enumerate(scores.series.items()):
        shift = alternating(len(scores.series), number, 0.5 / len(scores.series))
        x = [budgets.index(budget) + shift for budget in sorted(points)]
        found = [points[budget] for budget in sorted(points)]
        y = [one.value for one in found]
        look = looks[variant]
        marks += [intervals(x, y, **_around(found), fmt="none", ecolor=look["color"], alpha=0.45,
                            capsize=2),
                  line(x, y, markersize=6.5, clip_on=False, zorder=4, **look)]  # fmt: skip
    return Panel(
        title=f"{short_tokens(scores.tokens)} tokens", marks=marks,
        x=Axis(names=[f"{budget:,}" for budget in budgets], low=-0.5, high=len(budgets) - 0.5,
               label="tokens that a step selects"),
        y=Axis(low=0, high=105, ticks=range(0, 101, 20)),
    )  # fmt: skip


def _looks(variants: Sequence[Variant]) -> dict[Variant, Look]:
    """A colour for each method, a line and a marker for each of its variants; a name that says the
    options in which settings differ."""
    methods = list(dict.fromkeys(name for name, _ in variants))
    common = set.intersection(*(set(options) for _, options in variants))
    out: dict[Variant, Look] = {}
    for name in methods:
        for number, variant in enumerate(one for one in variants if one[0] == name):
            style, marker = _STYLES[number % len(_STYLES)]
            shown = ", ".join(option for option in variant[1] if option not in common)
            out[variant] = {"color": SERIES[methods.index(name) % len(SERIES)], "marker": marker,
                            "linestyle": style, "label": f"{name}: {shown}" if shown else name
            }  # fmt: skip
    return out


def _scores_of(result: Result) -> _Scores:
    """The settings that answered most tasks, over these tasks."""
    at = {
        (cell["setting"], cell["task"]): cell["scores"]
        for cell in result.figures.get("cells", []) if cell["scores"]
    }  # fmt: skip
    every = list(dict.fromkeys(task for _, task in at))
    texts = [text for text in dict.fromkeys(text for text, _ in at) if text != _REFERENCE]
    counts = {text: sum((text, task) in at for task in every) for text in texts}
    texts = [text for text in texts if counts[text] == max(counts.values())]
    tasks = _answered_by(at, texts)
    series: dict[Variant, dict[int, Estimate]] = {}
    for text in texts if tasks else []:
        variant, budget = _read(text)
        if budget is not None:
            score = mean_percent([at[text, task] for task in tasks])
            series.setdefault(variant, {})[budget] = score
    return _Scores(
        tokens=int(result.settings["tokens"]) if series else 0, tasks=len(tasks),
        samples=min((len(at[key]) for key in product(texts, tasks)), default=0),
        full=_full(at, tasks), series=series,
    )  # fmt: skip


def _read(text: str) -> tuple[Variant, int | None]:
    """A setting's method and options, and its budget of tokens."""
    head, _, rest = text.partition(":")
    options = [option for option in rest.split(",") if option]
    budgets = [option for option in options if option.startswith(f"{_BUDGET}=")]
    others = tuple(sorted(option for option in options if option not in budgets))
    return (head, others), int(budgets[0].partition("=")[2]) if budgets else None
