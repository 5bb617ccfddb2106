"""Cases of the settings program: methods and their plans, and measuring them.

Source: KVSwap (arXiv 2511.11907), section 4.3 and Table 1.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.byte_size import format_bytes, parse_memory
from penstock.core.errors import BudgetError, ConfigError, PenstockError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest, SlotPlan, sharing_layers
from penstock.devices.presets import PRESETS
from penstock.devices.profile import DeviceProfile
from penstock.engine.adapter import LowRankAdapter
from penstock.engine.head_rows import HeadRows
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.decode_loop import Bench, LiveRow
from penstock.evaluate.throughput_rows import FLOORS, Row
from penstock.methods import SelectionPolicy
from penstock.models.loader import CausalLM
from penstock.models.query_projection import decoder_layers
from penstock.workloads.selection_streams import OverlapStream, streamed
from penstock.workloads.synthetic_kv import SyntheticKV

# Which methods, with which parameters and memory --------------------------------------------------

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
    slots = plan.batch * plan.num_slots * plan.slot_bytes

    def own_bytes(count: int) -> int:
        own = count - sharing_layers(count, plan.shared_every)
        return count * kept + own * slots

    return replace(
        plan, index_bytes=-(-plan.index_bytes * num_layers // of_layers),
        pool_bytes=plan.pool_bytes - own_bytes(of_layers) + own_bytes(num_layers),
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


# Fill a cache once, decode on every device, put a step together -----------------------------------

_MS = 1e3
"""Milliseconds of a second."""


@dataclass(kw_only=True)
class Measurement:
    """What all cases share."""

    model: CausalLM
    """The layers that are measured."""
    adapter: LowRankAdapter
    of_layers: int
    """Layers of the whole model."""
    machine: Machine
    overlap: float
    steps: int
    most_s: float
    """Longest step that is run, in seconds."""
    seed: int
    documents: dict[int, SyntheticKV] = field(default_factory=dict)
    """The newest batch's."""

    @property
    def num_layers(self) -> int:
        """Layers that are measured."""
        return len(decoder_layers(self.model))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        found: torch.device = self.model.get_input_embeddings().weight.device
        return found

    def bench(self, case_context: int, batch: int, memory: str) -> Bench:
        """For a row of this batch; makes the document where there is none."""
        if batch not in self.documents:
            shape: KVShape = self.machine.shape.of_layers(self.num_layers)
            self.documents = {batch: SyntheticKV(shape, batch, self.device, self.seed)}
        return Bench(
            model=self.model, adapter=self.adapter, document=self.documents[batch],
            context=case_context, batch=batch, memory=memory,
            new_tokens=self.machine.new_tokens,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """A decode step, in milliseconds; medians over the measured steps."""

    step_ms: float
    """Of the measured layers, embedding and head."""
    layer_ms: float
    """An inner layer."""
    whole_ms: float
    """Of the whole model: first layer, inner layers, last layer and the rest."""
    p10_ms: float
    p90_ms: float
    steps: int


class LayerClock:
    """Times every layer of a model and the steps around them.

    On a GPU each layer is waited for: its kernels run long after they were launched.
    """

    def __init__(self, model: Any) -> None:
        self._layers = decoder_layers(model)
        self._device = model.get_input_embeddings().weight.device
        self.waits = self._device.type == "cuda"
        self._began = 0.0
        self._now: list[float] = []
        self.steps_s: list[list[float]] = []
        """By step, the seconds of each layer."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is decoded meanwhile."""
        hooks = []
        for number, layer in enumerate(self._layers):
            hooks.append(layer.register_forward_pre_hook(self._enter, prepend=True))
            hooks.append(layer.register_forward_hook(self._leave(number)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: Any, inputs: Any) -> None:
        self._wait()
        self._began = time.perf_counter()

    def _wait(self) -> None:
        if self.waits:
            torch.cuda.synchronize(self._device)

    def _leave(self, number: int) -> Any:
        def note(module: Any, inputs: Any, outputs: Any) -> None:
            if number == 0:
                self.steps_s.append([])
            self._wait()
            self.steps_s[-1].append(time.perf_counter() - self._began)

        return note


def put_together(steps_s: list[float], layers_s: list[list[float]], of_layers: int) -> StepCost:
    """The whole model's step from those of its first layers.

    Args:
        steps_s: seconds of each step.
        layers_s: seconds of each layer in the same steps, four or more of them.
        of_layers: layers of the whole model.
    """
    steps = np.array(steps_s)
    layers: NDArray[np.float64] = np.array(layers_s)
    # The second layer's reads are queued while the first, which nothing predicts, waits for its
    # own: it is as much too fast as that one is too slow.
    inner = (layers[:, 2:-1] if layers.shape[1] > 3 else layers).mean(axis=1)
    whole = steps + inner * (of_layers - layers.shape[1])
    return StepCost(
        step_ms=_MS * float(np.median(steps)), layer_ms=_MS * float(np.median(inner)),
        whole_ms=_MS * float(np.median(whole)), p10_ms=_MS * float(np.percentile(whole, 10)),
        p90_ms=_MS * float(np.percentile(whole, 90)), steps=len(steps_s),
    )  # fmt: skip


class Floor:
    """A row with hardly any context: what the weights alone cost at one batch, now.

    Machines drift; it is decoded before and after every row, so that rows that were measured at
    different times can be compared.
    """

    def __init__(self, bench: Measurement, batch: int) -> None:
        self.batch = batch
        self._bench = bench
        self._row = LiveRow(
            Row(name=FLOORS[0], plain="dynamic", is_floor=True), bench.bench(0, batch, "1/2"),
            "memory",
        )  # fmt: skip

    def whole_ms(self) -> float:
        """A step of the whole model now, in milliseconds."""
        return _decode(self._row, self._bench)[0].whole_ms

    def close(self) -> None:
        """Give everything back."""
        self._row.close()


def measure_case(bench: Measurement, case: Case, floor: Floor) -> list[dict[str, Any]]:
    """Rows of the result, one for each device."""
    rows = [_begin(bench, case, device) for device in case.devices]
    if case.policy is None:
        return rows
    on_disk = not case.policy.stays_resident
    if on_disk:
        assert case.plan is not None
        plan = part_of(case.plan, bench.num_layers, bench.of_layers)
        policy = planned(case.policy, plan)
        policy = streamed(policy, OverlapStream(overlap=bench.overlap, seed=bench.seed))
        memory = str(plan.total_bytes)
    else:
        policy, memory = case.policy, ""
    row = Row(
        name=case.method, policy=policy, budget="given" if memory else "none",
        device=case.devices[0] if on_disk else "real",
    )  # fmt: skip
    try:
        live = LiveRow(row, bench.bench(case.context, case.batch, memory), case.devices[0])
    except PenstockError as error:
        return [{**found, "skipped": str(error)} for found in rows]
    try:
        for found in rows:
            _measure_on(found, live, bench, floor, on_disk=on_disk)
    finally:
        live.close()
    return rows


def _begin(bench: Measurement, case: Case, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "method": case.method, "context": case.context, "batch": case.batch, "device": device,
        "budget": case.budget, "limit_bytes": case.limit_bytes, "skipped": case.refused,
        "overlap": None if case.method in UNLIMITED else bench.overlap,
    }  # fmt: skip
    if case.plan is not None and case.policy is not None:
        found["ledger_bytes"] = case.plan.total_bytes
        found["policy"] = {k: v for k, v in asdict(case.policy).items() if v is not None}
        found["plan"] = _choices(case.plan)
    return found


def _choices(plan: SlotPlan) -> dict[str, Any]:
    return {
        "num_slots": plan.num_slots, "selected_groups": plan.selected_units,
        "group_tokens": plan.group_tokens, "shared_pools": plan.shared_pools,
        "index": format_bytes(plan.index_bytes), "unit_bytes": plan.unit_bytes,
        "predicting_weights": plan.predictor_bytes,
    }  # fmt: skip


def _measure_on(
    found: dict[str, Any], live: LiveRow, bench: Measurement, floor: Floor, *, on_disk: bool
) -> None:
    device, batch = found["device"], found["batch"]
    if on_disk:
        profile = PRESETS[device]
        store = live.cache.tiers._store
        store.throttle.profile = profile
        known = live.measured.counters
        if known:  # what the device before this one had to read in a step
            reads, read_bytes = known["reads"], known["read_bytes"]
            read_s = profile.steady_read_time_s(reads, read_bytes) / known["steps"]
            if read_s > bench.most_s:
                found["skipped"] = f"a step of {bench.num_layers} layers would read {read_s:.0f} s"
                found.update(_predict(profile, known, batch, bench, floor.whole_ms()))
                return
    before = dict(live.measured.counters)
    floor_ms = floor.whole_ms()
    cost, seconds = _decode(live, bench)
    floor_ms = (floor_ms + floor.whole_ms()) / 2
    found.update(
        median_ms=cost.step_ms, steps=cost.steps, layer_ms=cost.layer_ms, whole_ms=cost.whole_ms,
        p10_ms=cost.p10_ms, p90_ms=cost.p90_ms, floor_ms=floor_ms,
        tokens_per_s=_MS * batch / cost.step_ms,
        whole_model_tokens_per_s=_MS * batch / cost.whole_ms,
    )  # fmt: skip
    if not on_disk:
        return
    now = live.measured.counters
    counted = {name: value - before.get(name, 0.0) for name, value in now.items()}
    wanted = counted["units_wanted"]
    found.update(
        hit_rate=counted["units_hit"] / wanted if wanted else None,
        read_bytes_per_token=counted["read_bytes"] / counted["tokens"] * _scale(bench),
        reads_per_token=counted["reads"] / counted["tokens"] * _scale(bench),
        stall_share=counted["stall_s"] / seconds,
        **_predict(profile, counted, batch, bench, floor_ms),
    )  # fmt: skip
    blocks = counted["steps"] * bench.num_layers
    parts = {"io wait": counted["stall_s"], "select": counted["predict_s"]}
    breakdown = {name: _MS * value / blocks for name, value in parts.items()}
    breakdown["compute and rest"] = max(0.0, cost.layer_ms - sum(breakdown.values()))
    found["breakdown_ms"] = breakdown


def _scale(bench: Measurement) -> float:
    return bench.of_layers / bench.num_layers


def _predict(
    profile: DeviceProfile, counted: dict[str, float], batch: int, bench: Measurement,
    floor_ms: float,
) -> dict[str, float]:  # fmt: skip
    """The whole model's step if reads ran wholly under compute: the longer of the two."""
    per_step = _scale(bench) / counted["steps"]
    read_ms = _MS * profile.steady_read_time_s(
        counted["reads"] * per_step, counted["read_bytes"] * per_step
    )
    predicted_ms = max(floor_ms, read_ms)
    return {
        "device_read_ms": read_ms, "predicted_ms": predicted_ms,
        "predicted_tokens_per_s": _MS * batch / predicted_ms,
    }  # fmt: skip


def _decode(live: LiveRow, bench: Measurement) -> tuple[StepCost, float]:
    """Steps of one row, and the seconds they took together."""
    clock = LayerClock(live._model)
    done = len(live.measured.rounds_s)
    # A GPU is not made to wait in every layer where the whole model's step needs no layers.
    is_timed = not (clock.waits and bench.num_layers == bench.of_layers)
    with clock.running() if is_timed else nullcontext():
        live.run_round(bench.steps, bench.steps * bench.most_s / 4)
    steps_s = [s for steps in live.measured.rounds_s[done:] for s in steps]
    if is_timed:
        layers_s = clock.steps_s[-len(steps_s) :]
    else:
        layers_s = [[s / bench.num_layers] * bench.num_layers for s in steps_s]
    return put_together(steps_s, layers_s, bench.of_layers), sum(steps_s)
