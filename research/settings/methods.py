"""Settings A and B of the KVSwap paper: which methods, with which parameters and memory.

Source: KVSwap (arXiv 2511.11907), section 4.3 and Table 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cache

from penstock.core.byte_size import parse_memory
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.head_rows import HeadRows
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.methods import SelectionPolicy

KVSWAP, FULL, FLEXGEN = "kvswap", "full", "flexgen"
UNLIMITED = frozenset({FULL, FLEXGEN})
"""Outside the budget, as in the paper: all in memory, and all streamed from disk."""
PAPER_BASELINES = ("infinigen", "infinigen-star", "infinigen-star-reuse", "loki", "shadowkv")
"""What the paper's own table compares with."""
OTHER_BASELINES = ("quest", "arkvale", "leoam")
COARSE_KVSWAP = "kvswap:group_tokens=16"
"""Groups as large as the pages of Quest, ArkVale and LeoAM."""
METHODS = (FULL, KVSWAP, COARSE_KVSWAP, *PAPER_BASELINES, *OTHER_BASELINES, FLEXGEN)
KVSWAP_OPTIONS = {"nvme": "group_tokens=4", "emmc": "group_tokens=8"}
"""KVSwap's group size on each device (section 4.1); other devices: 4."""
BEST_CASE = {
    "shadowkv": "rank=160,landmark_units=1,selected_tokens=400",
    "loki": "key_ratio=0.25,selected_tokens=400",
    **dict.fromkeys(PAPER_BASELINES[:3], "key_ratio=0.5,selected_tokens=400"),
    "quest": "selected_tokens=400", "arkvale": "selected_tokens=400",
    "leoam": "selected_tokens=400",
}  # fmt: skip
"""Setting B: ShadowKV's and Loki's published parameters (Loki's share of components is from memory
of its paper), InfiniGen's 0.5 from KVSwap section 4.3, the others' defaults; all select alike."""
SECTOR_BYTES = 512
"""Of every simulated device."""
BATCHES = (1, 2, 4, 8, 16)
MOST_BATCH = BATCHES[-1]
"""KVSwap's largest batch (section 4.3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One method at one context and batch, with the whole model's plan."""

    method: str
    devices: tuple[str, ...]
    """Presets that it is measured on; its parameters may be for these alone."""
    context: int
    batch: int
    policy: SelectionPolicy | None
    """With its choices made; None when the budget is too small."""
    plan: SlotPlan | None
    limit_bytes: int | None
    refused: str | None = None
    budget: str = ""
    """As it was given: "1/13" of the full cache, or a total such as "2000MiB"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a plan needs to know besides the model."""

    shape: KVShape
    """Of the whole model, whatever part of it is measured."""
    device_is_cpu: bool
    predictor_bytes: int
    """Copies of the whole model's predicting weights."""
    new_tokens: int


def cases_of_a(
    methods: Sequence[str], devices: Sequence[str], contexts: Sequence[int],
    batches: Sequence[int], budget: str, machine: Machine,
) -> list[Case]:  # fmt: skip
    """Setting A: every method gets the same share of each sequence's full cache."""
    cases = []
    for context in contexts:
        for batch in batches:
            full = machine.shape.full_cache_bytes(batch, context + machine.new_tokens)
            limit = parse_memory(budget, full, full)
            for method in methods:
                for options, places in _variants(method, devices, best_case=False):
                    cases.append(
                        _case(method, options, places, context, batch, limit, budget, machine)
                    )
    return cases


def cases_of_b(
    methods: Sequence[str], devices: Sequence[str], contexts: Sequence[int],
    totals: Sequence[str], shares: Sequence[str], machine: Machine,
) -> list[Case]:  # fmt: skip
    """Setting B: one total budget; each method's best case at the largest batch that it allows.

    Args:
        totals: budgets for all sequences together.
        shares: KVSwap's share per sequence at each total, as in setting A.
    """
    cases = []
    for context in contexts:
        for total, share in zip(totals, shares, strict=True):
            one = machine.shape.full_cache_bytes(1, context + machine.new_tokens)
            limit = parse_memory(total, one, one)
            for method in methods:
                if method in UNLIMITED:
                    continue  # no budget, so no largest batch
                own = parse_memory(share, one, one) if is_kvswap(method) else None
                for options, places in _variants(method, devices, best_case=True):
                    cases.append(
                        _largest(method, options, places, context, limit, total, own, machine)
                    )
    return cases


def is_kvswap(method: str) -> bool:
    """Whether this is KVSwap, with whatever options."""
    return method.partition(":")[0] == KVSWAP


def _variants(
    method: str, devices: Sequence[str], *, best_case: bool
) -> list[tuple[str, tuple[str, ...]]]:
    """Options beside those in its name, and the devices they are for."""
    if ":" in method:
        return [("", tuple(devices))]
    if method == KVSWAP:
        chosen: dict[str, list[str]] = {}
        for device in devices:
            chosen.setdefault(KVSWAP_OPTIONS.get(device, "group_tokens=4"), []).append(device)
        return [(options, tuple(places)) for options, places in chosen.items()]
    return [(BEST_CASE.get(method, "") if best_case else "", tuple(devices))]


def _largest(
    method: str, options: str, devices: tuple[str, ...], context: int, limit: int, total: str,
    own_bytes: int | None, machine: Machine,
) -> Case:  # fmt: skip
    case = None
    for batch in range(MOST_BATCH, 0, -1):
        if own_bytes is not None and own_bytes * batch > limit:
            continue
        bytes_now = limit if own_bytes is None else own_bytes * batch
        case = _case(method, options, devices, context, batch, bytes_now, total, machine)
        if case.refused is None:
            return case
    return case or Case(
        method=method, devices=devices, context=context, batch=1, policy=None, plan=None,
        limit_bytes=limit, budget=total, refused=f"one sequence takes more than {total}",
    )  # fmt: skip


def _case(
    method: str, options: str, devices: tuple[str, ...], context: int, batch: int, limit: int,
    budget: str, machine: Machine,
) -> Case:  # fmt: skip
    setting = parse_setting(f"{method}:{options}" if options else method)
    policy = setting.policy
    limit_bytes = None if method in UNLIMITED else limit
    case = Case(
        method=method, devices=devices, context=context, batch=batch, policy=None, plan=None,
        limit_bytes=limit_bytes, budget="none" if limit_bytes is None else budget,
    )  # fmt: skip
    if policy.stays_resident:
        return replace(case, policy=policy)
    try:
        chosen, plan = plan_whole(policy, context, batch, limit_bytes, machine)
    except BudgetError as error:
        return replace(case, refused=str(error))
    return replace(case, policy=chosen, plan=plan)


def plan_whole(
    policy: SelectionPolicy, context: int, batch: int, limit_bytes: int | None, machine: Machine
) -> tuple[SelectionPolicy, SlotPlan]:
    """A policy's choices for the whole model.

    Raises:
        BudgetError: the budget is too small.
    """
    rows = HeadRows(machine.shape, per_head=policy.per_head)
    request = SizingRequest(
        shape=rows.shape, batch=batch * rows.per_sequence,
        max_tokens=context + machine.new_tokens, limit_bytes=limit_bytes,
        sector_bytes=SECTOR_BYTES, device_is_cpu=machine.device_is_cpu,
        has_adapter=policy.uses_adapter, must_tier=True, rows_per_sequence=rows.per_sequence,
    )  # fmt: skip
    chosen, plan = policy.plan(request)
    if policy.predicts:
        plan = plan.with_predictor(machine.predictor_bytes, limit_bytes)
    return chosen, plan


def part_of(plan: SlotPlan, num_layers: int, of_layers: int) -> SlotPlan:
    """The plan for the first `num_layers` of a model, with the choices made for all of them.

    What belongs to layers shrinks with their number; what they share stays.
    """
    kept = plan.batch * plan.kept_slots * plan.unit_bytes
    per_layer = kept if plan.shared_pools else plan.batch * plan.num_slots * plan.unit_bytes + kept
    shared = plan.pool_bytes - of_layers * per_layer
    return replace(
        plan, index_bytes=-(-plan.index_bytes * num_layers // of_layers),
        pool_bytes=shared + num_layers * per_layer,
        predictor_bytes=-(-plan.predictor_bytes * num_layers // of_layers),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlannedPolicy(SelectionPolicy):
    """Laid over a method's class by `planned`."""

    its_plan: SlotPlan

    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """The plan that was made before, for as many rows."""
        if request.batch != self.its_plan.batch:
            raise ConfigError(f"planned for {self.its_plan.batch} rows, not {request.batch}")
        return self, replace(self.its_plan, predictor_bytes=0)


def planned(policy: SelectionPolicy, plan: SlotPlan) -> SelectionPolicy:
    """The same policy with its plan made already."""
    chosen = {f.name: getattr(policy, f.name) for f in fields(policy) if f.init}
    return _planned_class(type(policy))(**chosen, its_plan=plan)


@cache
def _planned_class(method: type[SelectionPolicy]) -> type[PlannedPolicy]:
    made: type[PlannedPolicy] = make_dataclass(
        f"Planned{method.__name__}", [], bases=(PlannedPolicy, method), frozen=True, kw_only=True
    )
    return made
