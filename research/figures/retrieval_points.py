"""Settings of a retrieval ablation as numbers: score and share of retrieving steps (LouisKV)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from penstock.engine.policy import SelectionPolicy
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.intervals import Estimate, mean_percent
from penstock.evaluate.result import Result
from penstock.evaluate.retrieval_counts import retrieving_share
from penstock.methods.louiskv.policy import CLUSTER_TOKENS, LouisKV
from research.figures.result_lengths import by_length

REFERENCE = "full"
_COMPARED = frozenset({"selected_tokens", "tau", "boundaries", "units"})
_UNIT_SIZE = frozenset({"cluster_tokens", "group_tokens"})
_ALIKE = ("window_tokens", "sink_tokens")
Rest = tuple[tuple[str, object], ...]
"""Options that a setting has besides those that the figures compare."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting: how often it retrieves and how well it answers."""

    policy: SelectionPolicy
    share: float
    """Steps that retrieve, of all steps of all layers; 1 for methods that always do."""
    score: Estimate
    """Mean over the panel's tasks, in per cent."""
    by_task: dict[str, float]
    """In per cent."""

    @property
    def budget(self) -> int | None:
        """Tokens that a step selects."""
        return getattr(self.policy, "selected_tokens", None)

    @property
    def place(self) -> float:
        """By what a line orders its points."""
        if not isinstance(self.policy, LouisKV):
            return 0.0
        return -self.policy.stride if self.policy.stride else self.policy.tau

    @property
    def family(self) -> str:
        """What a line of the figure joins: "tau", "stride", "every" or "pages" of LouisKV, or the
        method's name."""
        if not isinstance(self.policy, LouisKV):
            return self.policy.name
        if self.policy.units == "pages":
            return "pages"
        return "stride" if self.policy.stride else (
            "every" if self.policy.boundaries == "every" else "tau"
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Panel:
    """All settings of one length and one budget, over the tasks that all of them answered."""

    tokens: int
    budget: int
    tasks: tuple[str, ...]
    samples: int
    """Of the task that has fewest."""
    full: float | None
    """Score of full attention, in per cent."""
    points: tuple[Point, ...]
    rest: Rest = ()
    """What all of its settings have alike and those of another panel do not."""

    def family(self, name: str) -> list[Point]:
        """Its points, by rising tau or falling stride."""
        return sorted((p for p in self.points if p.family == name), key=lambda p: p.place)


def has_retrievals(result: Result) -> bool:
    """Whether a result counts at which steps layers retrieved, in settings that compare."""
    if result.kind != "accuracy":
        return False
    counts = any(cell.get("retrieval") for cell in result.figures.get("cells", []))
    return counts and bool(panels_of(result))


def panels_of(result: Result) -> list[Panel]:
    """Panels by length, then budget, then what else the settings have (clusters of 4 are not
    compared with clusters of 16); without those that have but one setting of LouisKV."""
    panels = []
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
                chosen = {
                    text: policy for text, policy in policies.items()
                    if text == REFERENCE or mine.get(text) == rest
                }  # fmt: skip
                if sum(isinstance(policy, LouisKV) for policy in chosen.values()) < 2:
                    continue
                panel = _panel(one.settings["tokens"], budget, chosen, cells)
                if panel is not None:
                    panels.append(replace(panel, rest=tuple(e for e in rest if e not in common)))
    return panels


def _sizes_itself(policy: SelectionPolicy) -> bool:
    return isinstance(policy, LouisKV) and policy.cluster_tokens is None


def _rest(policy: SelectionPolicy) -> Rest:
    """Window, sinks and the size of units, which methods have other defaults for, and whatever else
    is not the method's default."""
    named = {*_COMPARED, *_UNIT_SIZE, *_ALIKE}
    given = {
        option.name: getattr(policy, option.name) for option in fields(policy)
        if option.name not in named and getattr(policy, option.name) != option.default
    }  # fmt: skip
    sizes = [getattr(policy, name, None) or 1 for name in _UNIT_SIZE]
    given["unit_tokens"] = CLUSTER_TOKENS if _sizes_itself(policy) else max(sizes)
    given |= {name: getattr(policy, name, 0) for name in _ALIKE}
    return tuple(sorted(given.items()))


def _panel(
    tokens: int, budget: int, policies: dict[str, SelectionPolicy], cells: Sequence[Any]
) -> Panel | None:
    at = {(cell["setting"], cell["task"]): cell for cell in cells}
    answered = {text for text, _ in at if text in policies}
    tasks = [
        task for task in dict.fromkeys(cell["task"] for cell in cells)
        if all((text, task) in at for text in answered)
    ]  # fmt: skip
    if not tasks or answered <= {REFERENCE}:
        return None
    points = []
    for text in (text for text in policies if text in answered and text != REFERENCE):
        mine = [at[text, task] for task in tasks]
        shares = [retrieving_share(cell.get("retrieval")) for cell in mine]
        # Every task counts alike, as in the mean score.
        share = float(np.mean([1.0 if share is None else share for share in shares]))
        points.append(Point(
            policy=policies[text], share=share,
            score=mean_percent([cell["scores"] for cell in mine]),
            by_task={cell["task"]: 100 * float(np.mean(cell["scores"])) for cell in mine},
        ))  # fmt: skip
    full = None
    if REFERENCE in answered:
        full = mean_percent([at[REFERENCE, task]["scores"] for task in tasks]).value
    fewest = min(len(at[text, task]["scores"]) for text in answered for task in tasks)
    return Panel(
        tokens=tokens, budget=budget, tasks=tuple(tasks), samples=fewest, full=full,
        points=tuple(points),
    )  # fmt: skip
