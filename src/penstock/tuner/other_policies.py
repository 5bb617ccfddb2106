"""OtherPolicies: a few settings of every policy, held to full attention and run at the corners.

KVSwap has a model of its delays (`KVSwapSearch`); the others are measured where it counts, the
default first and then one choice at a time, and what lies between the corners is interpolated.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.core.byte_size import format_bytes
from penstock.core.errors import BudgetError, ConfigError, PenstockError
from penstock.engine.policy import SelectionPolicy
from penstock.methods import POLICIES
from penstock.methods.search_space import fields_of
from penstock.models.model_shape import inspect_model
from penstock.tuner.engine_run import (
    EngineRun,
    StepFigures,
    as_dict,
    at_one_pace,
    run_together,
)
from penstock.tuner.fidelity import Reference
from penstock.tuner.tuning_task import TuningTask

MOST_SETTINGS = 4
"""Of a policy that are held to full attention."""
MOST_RUN = 2
"""Of these that are run: the best two that stay under the floor, by quality and by bytes."""


@dataclass(frozen=True, kw_only=True)
class PolicySetting:
    """One setting of one policy, with what was measured."""

    policy: SelectionPolicy
    kl: float
    read_bytes_per_token: float
    figures: dict[tuple[int, int], StepFigures] = field(default_factory=dict)
    """By (batch, context), at the corners where it fits."""

    def step_s(self, batch: int, context: int) -> float | None:
        """Seconds of a step, between the corners linear in the logarithms; None: does not fit."""
        batches = sorted({b for b, _ in self.figures})
        contexts = sorted({c for _, c in self.figures})
        if len(self.figures) != len(batches) * len(contexts) or not self.figures:
            return None
        rows = [
            _between(context, contexts, [self.figures[b, c].step_s for c in contexts])
            for b in batches
        ]
        return _between(batch, batches, rows)

    def resident_bytes(self, batch: int, context: int) -> int:
        """The plan at the nearest corner that is at least as large."""
        covering = [place for place in self.figures if place[0] >= batch and place[1] >= context]
        return self.figures[min(covering, default=max(self.figures))].resident_bytes


def together(settings: Sequence[PolicySetting]) -> list[PolicySetting]:
    """The same settings, told at one pace: where nothing else was measured, the pace is
    not yet known (`TuningTask.pace_s`)."""
    told = iter(at_one_pace([each for one in settings for each in one.figures.values()]))
    return [replace(one, figures={place: next(told) for place in one.figures}) for one in settings]


def varied(name: str, most: int = MOST_SETTINGS) -> list[SelectionPolicy]:
    """A policy's default, then settings that differ from it in one choice: the leanest values.

    Args:
        name: of `POLICIES`.
        most: settings at most.
    """
    base = POLICIES[name]()
    out = [base]
    for choice in base.choices:
        value = choice.values[-1]
        try:
            setting = replace(base, **{choice.field: value})
        except (ConfigError, TypeError):
            continue
        if setting not in out:
            out.append(setting)
    return out[:most]


class OtherPolicies:
    """Measures policies by name; what cannot run says why in `refused`."""

    def __init__(
        self, task: TuningTask, reference: Reference,
        faithful: dict[str, list[tuple[float, float, SelectionPolicy]]] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            faithful: of another device with the same budget, where that is known.
        """
        self._task = task
        self._reference = reference
        self.faithful = {} if faithful is None else faithful
        """KL, bytes read a token and setting, by policy: what does not depend on the device."""
        self.refused: dict[str, str] = {}
        """Why a policy has no setting here."""

    def settings(self, names: Sequence[str]) -> Iterator[PolicySetting]:
        """Every setting of these policies that stays under the floor and fits, measured."""
        for number, name in enumerate(names):
            share = number / len(names)
            self._task.say(share, f"holding {name} to full attention")
            if name not in self.faithful:
                self.faithful[name] = self._faithful(name)
            good = self.faithful[name]
            self._task.say(share, f"running {name}")
            found = False
            for kl, read_bytes, policy in good[:MOST_RUN]:
                figures = self._run(name, policy)
                if figures:
                    found = True
                    yield PolicySetting(
                        policy=policy, kl=kl, read_bytes_per_token=read_bytes, figures=figures
                    )
            if found:
                self.refused.pop(name, None)
            else:
                self.refused.setdefault(name, "nothing of it fits and keeps quality")

    def _faithful(self, name: str) -> list[tuple[float, float, SelectionPolicy]]:
        """Settings under the floor: the most faithful first, then by bytes read."""
        task, out = self._task, []
        closest = math.inf
        per_sequence = task.limit_for(1)
        for policy in varied(name):
            key = {"kl": name, "fields": fields_of(policy), "limit": per_sequence}
            try:
                found = task.journal.measured(key, partial(self._hold, policy))
            except PenstockError as error:
                self.refused[name] = _briefly(error)
                continue
            closest = min(closest, found[0])
            self.refused.pop(name, None)
            if found[0] <= task.floor:
                out.append((found[0], found[1], policy))
        if not out and closest < math.inf:
            self.refused[name] = f"KL {closest:.2g}"
        out.sort(key=lambda each: (each[1], each[0]))
        return out

    def _hold(self, policy: SelectionPolicy) -> list[float]:
        """KL and bytes read a token, at the budget's share of the calibration text's length."""
        task = self._task
        shape = inspect_model(task.model).kv
        share = task.limit_for(1) / shape.full_cache_bytes(1, task.max_context)
        limit = int(share * shape.full_cache_bytes(1, self._reference.longest))
        found = self._reference.measure(policy, memory=limit, adapter=task.adapter)
        return [found.kl, found.read_bytes_per_token]

    def _run(self, name: str, policy: SelectionPolicy) -> dict[tuple[int, int], StepFigures]:
        """At every corner; empty where one does not fit."""
        task, out = self._task, {}
        for batch, context in task.corners:
            limit = task.limit_for(batch)
            key = {
                "run": name, "disk": task.store, "batch": batch, "context": context, "limit": limit,
                "fields": fields_of(policy),
            }  # fmt: skip

            def measure(b: int = batch, c: int = context, most: int = limit) -> object:
                work = task.workpiece(b, c)
                with EngineRun(work, policy, store=task.store, limit_bytes=most) as run:
                    return as_dict(run_together([run])[0])

            try:
                figures = StepFigures(**task.journal.measured(key, measure))
                out[batch, context] = figures.at(task.pace_s)
            except PenstockError as error:
                self.refused[name] = _briefly(error)
                return {}
        return out


def _briefly(error: PenstockError) -> str:
    """Why a policy cannot run here, in a few words where the error is about memory."""
    needed = error.needed_bytes if isinstance(error, BudgetError) else None
    return str(error) if needed is None else f"needs {format_bytes(needed)}"


def _between(at: int, places: Sequence[int], values: Sequence[float]) -> float:
    """Linear in both logarithms; outside, the nearest."""
    if len(places) == 1:
        return values[0]
    low, high = math.log(places[0]), math.log(places[-1])
    share = min(1.0, max(0.0, (math.log(at) - low) / (high - low)))
    return math.exp((1 - share) * math.log(values[0]) + share * math.log(values[-1]))
