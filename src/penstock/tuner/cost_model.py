"""The cost model: tokens/s, time to first token, memory and traffic, before anything runs.

Source: KVSwap (arXiv 2511.11907), appendix A.3: a block's model delay and its I/O delay, the I/O
of one layer behind the work of the layer before.
"""

from dataclasses import dataclass, replace

from penstock.core.byte_size import format_bytes, is_share, parse_memory
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.devices.profile import DeviceProfile
from penstock.engine.head_rows import HeadRows
from penstock.engine.policy import SelectionPolicy
from penstock.engine.runtime_settings import STATE_COPIES
from penstock.tuner.hardware import Hardware
from penstock.tuner.model_sizes import ModelSizes
from penstock.tuner.step_work import PAPER_REUSE_RATE, StepWork, work_of

MEMORY_EFFICIENCY = 0.8
"""Share of peak memory bandwidth that a decode step's kernels reach: usual for GPUs, and what the
column without offloading of KVSwap's Table 4 says too (0.79 to 0.87 where everything fits)."""
COMPUTE_EFFICIENCY = 0.4
"""Share of peak FLOP/s that a prompt reaches: KVSwap, footnote 4, has 8K tokens of an 8B model in
7.6 s on the Orin (0.41)."""
SELECTING_LAUNCHES = 40
"""Operations of an eager layer that selects: about 15 of the block, 25 of ranking, slots and mask
(assumed). The host waits for the selection, so that they add to the device's time."""
PLAIN_LAUNCHES = 15
"""Operations of a plain layer; the host runs ahead of the device."""
READ_SUBMIT_S = 4e-6
"""Host time of handing one read to the kernel: 3.6 to 4.4 us by native AIO on a server's core
(research/notes/2026-11-22-fewer-calls.md); no source has an edge board's."""


def limit_of(memory: str, full_bytes: int, free_bytes: int, state_bytes: int) -> int:
    """What a `memory=` setting leaves for KV: as in a cache, recurrent states are a part of a size,
    and come on top of a share."""
    limit = parse_memory(memory, full_bytes, free_bytes)
    return limit if is_share(memory) else max(1, limit - STATE_COPIES * state_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is to run, and on what."""

    model: ModelSizes
    hardware: Hardware
    disk: DeviceProfile
    context: int
    """Tokens of a sequence."""
    batch: int
    limit_bytes: int
    """Memory for KV: index, slots, window and the like. Recurrent states come on top."""
    reuse_rate: float = PAPER_REUSE_RATE

    def __post_init__(self) -> None:
        if self.context < 1 or self.batch < 1:
            raise ConfigError(f"context={self.context} and batch={self.batch} must be at least 1")
        if not 0 <= self.reuse_rate <= 1:
            raise ConfigError(f"reuse_rate={self.reuse_rate} is not a share in [0, 1]")

    @property
    def state_bytes(self) -> int:
        """What a cache holds of recurrent states, all sequences."""
        return STATE_COPIES * self.batch * self.model.beside.state_bytes

    @property
    def full_bytes(self) -> int:
        """The whole KV cache."""
        return self.model.shape.full_cache_bytes(self.batch, self.context)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What to expect of one policy. Times in seconds, sizes in bytes; all sequences together."""

    policy: str
    group_tokens: int
    selected_tokens: int
    """Tokens that a step selects in a layer; the context where all is attended to."""
    tokens_per_s: float
    step_s: float
    block_s: float
    """One layer: weights, activations, attention, launches (T_model without the prediction)."""
    rank_s: float
    """One layer: prediction and ranking, before its reads can start."""
    io_s: float
    """One layer: its reads (T_io)."""
    submit_s: float
    """One layer: the host's part of its reads. The disk is at work meanwhile, the layer is not."""
    stall_share: float
    """Of a step, waiting for the disk."""
    first_token_s: float
    """All prompts together, written to disk as they go where the policy offloads."""
    resident_bytes: int
    """KV memory, as the policy's own plan divides it."""
    read_bytes_per_token: float
    written_bytes: int
    """Of the prompts."""
    written_bytes_per_token: int
    waves: int = 1
    """Parts of the batch that run one after the other, since not all fits."""


def predict(policy: SelectionPolicy, load: Workload) -> Prediction:
    """Predict one policy.

    Raises:
        BudgetError: the KV budget is too small; names the smallest that would do. Or weights and KV
            together pass the machine's memory.
    """
    check_weights(load)
    if policy.stays_resident:
        return _predict_resident(policy, load)
    chosen, plan = plan_of(policy, load)
    _check_total(plan.total_bytes + load.state_bytes, load)
    work = work_of(chosen, plan, load.model.shape, context=load.context, reuse_rate=load.reuse_rate)
    return predict_work(chosen.name, plan, work, load)


def plan_of(policy: SelectionPolicy, load: Workload) -> tuple[SelectionPolicy, SlotPlan]:
    """The policy's own division of the budget, by rows where it selects per head."""
    rows = HeadRows(load.model.shape, per_head=policy.per_head)
    request = SizingRequest(
        shape=rows.shape,
        batch=load.batch * rows.per_sequence,
        max_tokens=load.context,
        limit_bytes=load.limit_bytes,
        sector_bytes=load.disk.sector_bytes,
        device_is_cpu=load.hardware.link_bandwidth == 0,
        has_adapter=True,
        rows_per_sequence=rows.per_sequence,
    )
    return policy.plan(request)


def predict_work(name: str, plan: SlotPlan, work: StepWork, load: Workload) -> Prediction:
    """Predict from the work itself, for methods as others describe them."""
    layers, shape = load.model.shape.num_layers, load.model.shape
    block, rank, io = block_s(work, load), rank_s(work, load), io_s(work, load)
    submit = load.batch * work.reads * READ_SUBMIT_S
    if not work.reads:
        layer, first = block + rank, block + rank
    elif work.is_prefetched and load.model.beside.recurrent:
        # Reads are hidden by one layer before, which has no keys and values.
        before = beside_s(load) / load.model.beside.recurrent
        layer = first = rank + block + submit + max(0.0, io - before)
    elif work.is_prefetched:  # the first layer has no layer before it
        layer, first = rank + max(block + submit, io), rank + block + max(submit, io)
    else:
        layer = first = rank + block + max(submit, io)
    others = beside_s(load) + head_s(load)
    step = first + (layers - 1) * layer + others
    busy = layers * (block + rank + submit) + others
    writes = 0 if plan.is_resident else load.full_bytes
    prefill = prefill_s(load)
    return Prediction(
        policy=name,
        group_tokens=plan.group_tokens,
        selected_tokens=plan.selected_units * plan.group_tokens or load.context,
        tokens_per_s=load.batch / step,
        step_s=step,
        block_s=block,
        rank_s=rank,
        io_s=io,
        submit_s=submit,
        stall_share=1 - busy / step,
        first_token_s=max(prefill, writes / load.disk.write_bandwidth),
        resident_bytes=plan.total_bytes + load.state_bytes,
        read_bytes_per_token=layers * work.reads * _page_bytes(work.request_bytes, load.disk),
        written_bytes=writes,
        written_bytes_per_token=layers * shape.token_bytes if writes else 0,
    )


def block_s(work: StepWork, load: Workload) -> float:
    """One layer of all sequences: through memory or through the arithmetic, whichever is longer."""
    model, shape, batch = load.model, load.model.shape, load.batch
    size = shape.dtype.itemsize
    activations = batch * (8 * model.hidden + 3 * model.intermediate)
    moved = model.layer_bytes(model.layer_weights) + activations * size
    moved += batch * work.attended_tokens * shape.token_bytes
    flops = 2.0 * batch * model.layer_weights + batch * work.rebuild_flops
    widths = shape.head_dim + shape.value_width
    flops += 2.0 * batch * work.attended_tokens * shape.num_query_heads * widths
    device = max(_memory_s(moved, load), _compute_s(flops, load))
    if work.selects:
        return device + SELECTING_LAUNCHES * load.hardware.launch_s
    return max(device, PLAIN_LAUNCHES * load.hardware.launch_s)


def rank_s(work: StepWork, load: Workload) -> float:
    """One layer of all sequences: the query's projection, index and scores, slots' bookkeeping."""
    if not work.selects:
        return 0.0
    moved = load.batch * work.scanned_bytes
    if work.is_prefetched:
        moved += load.model.layer_bytes(load.model.query_weights)
    return _memory_s(moved, load) + load.batch * load.hardware.reuse_unit_s * work.reused_units


def io_s(work: StepWork, load: Workload) -> float:
    """One layer of all sequences: reads in whole pages, by the disk's request-size curve."""
    if not work.reads:
        return 0.0
    reads = load.batch * work.reads
    read_bytes = reads * _page_bytes(work.request_bytes, load.disk)
    time_s = load.disk.steady_read_time_s(reads, read_bytes)
    if load.hardware.link_bandwidth:
        time_s = max(time_s, reads * work.request_bytes / load.hardware.link_bandwidth)
    return time_s + load.disk.latency_s


def beside_s(load: Workload) -> float:
    """All layers without keys and values, of all sequences: their weights, and states there and
    back."""
    beside = load.model.beside
    moved = load.model.layer_bytes(beside.weights) + 2 * load.batch * beside.state_bytes
    device = max(_memory_s(moved, load), _compute_s(2.0 * load.batch * beside.weights, load))
    return max(device, beside.recurrent * PLAIN_LAUNCHES * load.hardware.launch_s)


def head_s(load: Workload) -> float:
    """The output layer, once a step."""
    return _memory_s(load.model.head_bytes(load.model.head_weights), load)


def prefill_s(load: Workload) -> float:
    """All prompts through the model."""
    flops = load.batch * load.model.prefill_flops(load.context)
    return max(_compute_s(flops, load), _memory_s(load.model.weight_bytes, load))


def check_weights(load: Workload) -> None:
    """Refuse a model whose weights alone pass the memory.

    Raises:
        BudgetError: they do.
    """
    if load.model.weight_bytes > load.hardware.memory_bytes:
        raise BudgetError(
            f"{load.hardware.title} has {format_bytes(load.hardware.memory_bytes)}, less than the "
            f"weights of {load.model.name} ({format_bytes(load.model.weight_bytes)}); take a "
            f"smaller model"
        )


def _check_total(kv_bytes: int, load: Workload) -> None:
    if load.model.weight_bytes + kv_bytes > load.hardware.memory_bytes:
        raise BudgetError(
            f"weights ({format_bytes(load.model.weight_bytes)}) and KV ({format_bytes(kv_bytes)}) "
            f"pass the {format_bytes(load.hardware.memory_bytes)} of {load.hardware.title}"
        )


def _predict_resident(policy: SelectionPolicy, load: Workload) -> Prediction:
    """Everything in memory; sequences that do not fit beside each other run in waves."""
    shape = load.model.shape
    states = STATE_COPIES * load.model.beside.state_bytes
    one = shape.full_cache_bytes(1, load.context) + states
    free = load.hardware.memory_bytes - load.model.weight_bytes
    room = min(load.limit_bytes + load.state_bytes, free)
    fitting = min(load.batch, room // one)
    if fitting < 1:
        raise BudgetError(
            f"policy full keeps {format_bytes(one)} for a sequence of {load.context} tokens, and "
            f"there is room for {format_bytes(room)}", needed_bytes=one,
        )  # fmt: skip
    waves = [fitting] * (load.batch // fitting)
    if load.batch % fitting:
        waves.append(load.batch % fitting)
    work = StepWork(
        reads=0, request_bytes=0, attended_tokens=load.context, scanned_bytes=0.0,
        is_prefetched=False, selects=False, reused_units=0,
    )  # fmt: skip
    parts = [replace(load, batch=batch) for batch in waves]
    steps = [
        shape.num_layers * block_s(work, part) + beside_s(part) + head_s(part) for part in parts
    ]
    return Prediction(
        policy=policy.name, group_tokens=1, selected_tokens=load.context,
        tokens_per_s=load.batch / sum(steps), step_s=steps[0], block_s=block_s(work, parts[0]),
        rank_s=0.0, io_s=0.0, submit_s=0.0, stall_share=0.0, first_token_s=prefill_s(parts[0]),
        resident_bytes=fitting * one, read_bytes_per_token=0.0, written_bytes=0,
        written_bytes_per_token=0, waves=len(waves),
    )  # fmt: skip


def _page_bytes(request_bytes: int, disk: DeviceProfile) -> int:
    return -(-request_bytes // disk.flash_page_bytes) * disk.flash_page_bytes


def _memory_s(moved_bytes: float, load: Workload) -> float:
    return moved_bytes / (MEMORY_EFFICIENCY * load.hardware.memory_bandwidth)


def _compute_s(flops: float, load: Workload) -> float:
    return flops / (COMPUTE_EFFICIENCY * load.hardware.flops)
