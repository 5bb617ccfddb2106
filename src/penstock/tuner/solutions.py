"""config_of(): everything that was found, as a TunedConfig: solutions, picks, Pareto front."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from penstock.core.errors import BudgetError
from penstock.devices.presets import PRESETS
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import fields_of
from penstock.methods.tuned_config import Figures, Solution, TunedConfig
from penstock.models.model_shape import inspect_model
from penstock.tuner.block_profile import BlockProfile
from penstock.tuner.engine_run import StepFigures
from penstock.tuner.explain import paragraph, reason
from penstock.tuner.kvswap_search import Found, KVSwapSearch
from penstock.tuner.other_policies import PolicySetting
from penstock.tuner.tuning_task import TuningTask


def config_of(
    task: TuningTask, search: KVSwapSearch | None, others: Sequence[PolicySetting],
    refused: dict[str, str], *, fingerprint: str,
) -> TunedConfig:  # fmt: skip
    """Put together what was found.

    Raises:
        BudgetError: nothing was.
    """
    solutions: list[Solution] = []
    solved: list[Found] = []
    if search is not None and search.profile is not None:
        solved = [_as_held(task, found) for found in search.found]
        solutions += [_of_kvswap(task, search.profile, found) for found in solved]
    solutions += _of_others(task, others)
    if not solutions:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise BudgetError(f"no policy has a setting that fits and keeps quality: {reasons}")
    solutions = with_picks(solutions)
    name, said = task.store.split(":", 1)[0], _on_others(solutions)
    words = "" if search is None or search.profile is None else paragraph(
        solved, search.profile, floor=task.floor,
        joint_dim=inspect_model(task.model).kv.joint_dim,
    )  # fmt: skip
    return TunedConfig(
        model=task.loaded.name, fingerprint=fingerprint,
        disk=name if name in PRESETS or name == "memory" else "real", simulated=name in PRESETS,
        max_context=task.max_context, max_batch=task.max_batch, limit_bytes=task.limit_bytes,
        floor=task.floor, adapter=None, explanation=f"{words} {said}".strip(),
        versions={each: version(each) for each in ("penstock", "torch", "transformers")},
        solutions=tuple(solutions), front=tuple(pareto_front(solutions)),
    )  # fmt: skip


def with_picks(solutions: Sequence[Solution]) -> list[Solution]:
    """The same, with the fastest of each (batch, context) marked."""
    best: dict[tuple[int, int], Solution] = {}
    for each in solutions:
        place = (each.batch, each.context)
        if place not in best or _speed(each) > _speed(best[place]):
            best[place] = each
    return [replace(each, is_pick=each is best[each.batch, each.context]) for each in solutions]


def pareto_front(solutions: Sequence[Solution]) -> list[dict[str, Any]]:
    """What nothing else beats in quality, throughput and memory at once, at the largest (b, S)."""
    last = max((each.batch, each.context) for each in solutions)
    there = [each for each in solutions if (each.batch, each.context) == last]

    def marks(each: Solution) -> tuple[float, float, float]:
        return each.predicted["kl"] or 0.0, -_speed(each), each.predicted["resident_bytes"]

    def is_beaten(each: Solution) -> bool:
        own = marks(each)
        return any(
            marks(other) != own and all(a <= b for a, b in zip(marks(other), own, strict=True))
            for other in there
        )

    return [
        {
            "policy": each.policy, "fields": each.fields, "kl": each.predicted["kl"],
            "tokens_per_s": _speed(each), "resident_bytes": each.predicted["resident_bytes"],
        }
        for each in sorted(there, key=lambda each: -_speed(each)) if not is_beaten(each)
    ]  # fmt: skip


def _speed(each: Solution) -> float:
    """Measured tokens per second where there are some, else predicted."""
    return (each.measured or each.predicted)["tokens_per_s"]


def _as_held(task: TuningTask, found: Found) -> Found:
    """The same with the divergence that was measured of its setting, where that was done."""
    candidate = found.best.candidate
    key = {"kl": KVSwap.name, "fields": fields_of(candidate.policy)}
    if not task.journal.knows(key):
        return found
    held = replace(candidate, kl=float(task.journal.recall(key)))
    return replace(found, best=replace(found.best, candidate=held))


def _of_kvswap(task: TuningTask, profile: BlockProfile, found: Found) -> Solution:
    candidate = found.best.candidate
    kl = candidate.kl
    batch, context = found.spot.batch, found.spot.context
    return Solution(
        batch=batch, context=context, policy=KVSwap.name, fields=fields_of(candidate.policy),
        limit_bytes=found.spot.limit_bytes,
        predicted=_figures(
            task, batch, context, found.best.step_s, candidate.resident_bytes,
            profile.merged(candidate.work).read_bytes / batch, kl,
        ),
        measured=None if found.measured is None else _measured(task, batch, context,
                                                               found.measured, kl),
        reason=reason(found, profile, task.floor), is_pick=False,
    )  # fmt: skip


def _of_others(task: TuningTask, settings: Sequence[PolicySetting]) -> list[Solution]:
    """For every (b, S) the fastest setting of each policy."""
    out = []
    for name in dict.fromkeys(each.policy.name for each in settings):
        own = [each for each in settings if each.policy.name == name]
        for batch in task.batches:
            for context in task.contexts:
                timed = [(each.step_s(batch, context), each) for each in own]
                fitting = [(step, each) for step, each in timed if step is not None]
                if fitting:
                    step, setting = min(fitting, key=lambda pair: pair[0])
                    out.append(_of_other(task, batch, context, step, setting))
    return out


def _of_other(
    task: TuningTask, batch: int, context: int, step_s: float, setting: PolicySetting
) -> Solution:
    figures = setting.figures.get((batch, context))
    chosen = fields_of(setting.policy)
    return Solution(
        batch=batch, context=context, policy=setting.policy.name, fields=chosen,
        limit_bytes=task.limit_for(batch),
        predicted=_figures(
            task, batch, context, step_s, setting.resident_bytes(batch, context),
            setting.read_bytes_per_token, setting.kl,
        ),
        measured=None if figures is None else _measured(task, batch, context, figures, setting.kl),
        reason="Measured where the grid ends, interpolated between.", is_pick=False,
    )  # fmt: skip


def _figures(
    task: TuningTask, batch: int, context: int, step_s: float, resident_bytes: int,
    read_bytes_per_token: float, kl: float | None,
) -> Figures:  # fmt: skip
    written = inspect_model(task.model).kv.full_cache_bytes(batch, context)
    return Figures(
        tokens_per_s=batch / step_s, resident_bytes=resident_bytes, kl=kl,
        read_bytes_per_token=read_bytes_per_token,
        first_token_s=task.prefill.first_token_s(
            batch, context, written_bytes=written, write_bandwidth=task.device.write_bandwidth
        ),
    )  # fmt: skip


def _measured(
    task: TuningTask, batch: int, context: int, figures: StepFigures, kl: float | None
) -> Figures:
    return _figures(
        task, batch, context, figures.step_s, figures.resident_bytes, figures.read_bytes / batch, kl
    )


def _on_others(solutions: Sequence[Solution]) -> str:
    """A sentence on the other policies at the largest (b, S)."""
    last = max((each.batch, each.context) for each in solutions)
    there = [each for each in solutions if (each.batch, each.context) == last]
    others = sorted((each for each in there if not each.is_pick), key=lambda each: -_speed(each))
    if not others:
        return ""
    pick = next(each for each in there if each.is_pick)
    names = ", ".join(f"{each.policy} {_speed(each):.3g}" for each in others)
    return (
        f"Of all policies that keep quality there {pick.policy} is the fastest with "
        f"{_speed(pick):.3g} tokens/s ({names})."
    )
