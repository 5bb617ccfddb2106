"""How policies divide a budget: the parts that every plan has."""

from collections.abc import Callable
from dataclasses import replace

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest, SlotPlan, host_units, sharing_layers
from penstock.engine.device_tier.device_index import StepClock
from penstock.engine.device_tier.device_pool import DevicePool
from penstock.engine.device_tier.scored_units import ScoredUnits
from penstock.engine.policy import ceil_div
from penstock.engine.stream_blocks import BlockBuffer
from penstock.engine.tiers.slot_table import SlotTable
from penstock.kernels.slot_codes import coded_token_bytes

PlanBuilder = Callable[[int], SlotPlan]
"""From a number of slots to a priced plan."""

STREAM_SLOT_TOKENS = 4096
"""Tokens of the two halves of a stream buffer together."""


CODED_READS = 64
"""Most units of a row that are read at once into slots in 8 bits: they land beside them."""
STREAM_BLOCK_TOKENS = 2048
"""Most tokens of one block of a row that streams from host memory through a GPU's."""
STREAM_BLOCK_BYTES = 64 << 20
"""Most bytes of one such block, all rows together."""
STREAM_BLOCK_SHARE = 32
"""A block is at most one part in so many of a sequence, or"""
STREAM_BUDGET_SHARE = 48
"""one in so many of the budget, whichever is more: each block takes the launches of another."""


def streaming_plan(request: SizingRequest, group_tokens: int, what: str) -> SlotPlan:
    """Plan for methods that stream everything: two shared pools and a small window per layer.

    Raises:
        BudgetError: the budget holds less than two units per pool.
    """
    slots = max(2, min(STREAM_SLOT_TOKENS, 2 * request.max_tokens) // group_tokens)
    if request.device_tier:
        slots = 2  # the past streams through blocks of its own

    def build(num_slots: int) -> SlotPlan:
        return make_plan(
            request, group_tokens=group_tokens, num_slots=num_slots, selected_units=0,
            sink_slots=0, window_slots=2,
            shared_every=0 if request.device_tier else 1, compact=False, index_bytes=0,
            scratch_bytes=0,
        )  # fmt: skip

    request.require(build(2).total_bytes, what)
    return largest_plan(request, build, 2, slots)


def resident_plan(request: SizingRequest) -> SlotPlan:
    """The plan that keeps the whole cache in memory and needs no store."""
    tokens = request.max_tokens
    size = request.shape.full_cache_bytes(request.batch, tokens)
    # One additive mask per row serves all layers.
    mask = request.batch * request.max_tokens * request.shape.dtype.itemsize
    return SlotPlan(
        batch=request.batch, max_units=request.max_tokens, group_tokens=1, num_slots=0,
        selected_units=0, sink_slots=0, window_slots=0, shared_every=0, compact=False,
        index_bytes=0, fixed_bytes=mask + request.shape.padding_bytes(request.batch * tokens),
        unit_bytes=request.shape.token_bytes, staging_slots=0,
        pool_bytes=size,
    )  # fmt: skip


def whole_layers_apart(
    request: SizingRequest, full_layers: int
) -> tuple[SizingRequest, SlotPlan | None]:
    """The layers that retrieve, with the budget that the whole ones leave them, and the plan of the
    whole ones (None where there are none); `with_whole_layers` puts the two together.

    Raises:
        ConfigError: nothing is left to retrieve for.
    """
    if not full_layers:
        return request, None
    layers, limit = request.shape.num_layers, request.limit_bytes
    if full_layers >= layers:
        raise ConfigError(
            f"full_layers={full_layers} leaves none of {layers} layers to retrieve for; the policy "
            "full keeps all"
        )
    whole = resident_plan(replace(request, shape=request.shape.of_layers(full_layers)))
    if request.device_tier:  # a mask for each of them
        whole = replace(whole, fixed_bytes=full_layers * whole.fixed_bytes)
    rest = replace(
        request, shape=request.shape.of_layers(layers - full_layers),
        limit_bytes=None if limit is None else limit - whole.total_bytes,
    )  # fmt: skip
    return rest, whole


def with_whole_layers(plan: SlotPlan, whole: SlotPlan | None) -> SlotPlan:
    """The plan of the layers that retrieve, and of those beside them that stay whole."""
    if whole is None:
        return plan
    return replace(
        plan, pool_bytes=plan.pool_bytes + whole.pool_bytes,
        fixed_bytes=plan.fixed_bytes + whole.fixed_bytes,
    )  # fmt: skip


def make_plan(
    request: SizingRequest,
    *,
    group_tokens: int,
    num_slots: int,
    selected_units: int,
    sink_slots: int,
    window_slots: int,
    shared_every: int,
    compact: bool,
    index_bytes: int,
    scratch_bytes: int,
    score_tokens: int = 0,
    read_units: int | None = None,
    coded: bool = False,
) -> SlotPlan:
    """Price one division of the memory; pure arithmetic.

    Args:
        coded: whether slots hold units in 8 bits; outside the device tier they are
            `fewest_coded_slots` at least.
        shared_every: as in the plan. More than 1 is for slots in 8 bits.
        read_units: of a row that a step usually misses, at most; None: all that it selects.
        window_slots: made at least 2, a closed unit beside the unfinished one.
    """
    window_slots = max(2, window_slots)
    shape, batch = request.shape, request.batch
    max_units = ceil_div(request.max_tokens, group_tokens)
    unit_bytes = group_tokens * shape.token_bytes
    kept = sink_slots + window_slots
    assert shared_every <= 1 or coded  # or sinks and windows would lie in the shared pool
    sharing = sharing_layers(shape.num_layers, shared_every)
    pools = shape.num_layers - sharing + min(sharing, 2 if shared_every == 1 else 1)
    slot_bytes = coded_unit_bytes(shape, group_tokens) if coded else unit_bytes
    kept_copies = pools * (not coded) + shape.num_layers * (sharing > 0 or coded)
    mask_slots = batch * (shape.num_layers * (num_slots + kept) + sharing * kept)
    mask_bytes = mask_slots * group_tokens * shape.dtype.itemsize
    staging_slots = 0
    if not request.device_tier and (coded or not request.is_direct(group_tokens)):
        read_units = selected_units if read_units is None else read_units
        staging_slots = batch * max(read_units, num_slots // 2, 1)
        if coded:  # which nothing streams through
            staging_slots = batch * max(2, min(read_units, CODED_READS))
    places = max((num_slots + kept) * group_tokens, min(STREAM_BLOCK_TOKENS, request.max_tokens))
    fixed = mask_bytes + scratch_bytes + 8 * batch * max_units + shape.padding_bytes(batch * places)
    staging_bytes, block = 3 * staging_slots * request.padded_bytes(group_tokens), 0
    if request.device_is_cpu:
        fixed += staging_bytes
    if request.device_tier:
        block = stream_block_units(batch, unit_bytes, group_tokens, max_units, request.limit_bytes)
        fixed = mask_bytes + scratch_bytes + 2 * batch * block * unit_bytes
        fixed += StepClock.num_bytes(batch)
        wanted = max(1, selected_units)
        fixed += pools * DevicePool.table_bytes(batch, num_slots, max_units, wanted)
        fixed += shape.num_layers * ScoredUnits.num_bytes(rows=batch, wanted=wanted)
        row_bytes = host_units(max_units, unit_bytes) * unit_bytes
        staging_bytes = shape.num_layers * batch * row_bytes
    elif selected_units:
        fixed += shape.num_layers * SlotTable.num_bytes(batch, num_slots, max_units)
    if compact:
        fixed += batch * (selected_units + kept) * (unit_bytes + group_tokens * 4)
    return SlotPlan(
        batch=batch, max_units=max_units, group_tokens=group_tokens, num_slots=num_slots,
        selected_units=selected_units, sink_slots=sink_slots, window_slots=window_slots,
        shared_every=shared_every, compact=compact, index_bytes=index_bytes, fixed_bytes=fixed,
        unit_bytes=unit_bytes, coded_bytes=slot_bytes if coded else None,
        staging_slots=staging_slots, stream_units=block, score_tokens=score_tokens,
        host_bytes=0 if request.device_is_cpu else staging_bytes,
        pool_bytes=batch * (pools * num_slots * slot_bytes + kept_copies * kept * unit_bytes),
    )  # fmt: skip


def coded_unit_bytes(shape: KVShape, group_tokens: int) -> int:
    """Bytes of a unit in 8 bits."""
    return group_tokens * coded_token_bytes(shape.num_kv_heads, shape.head_dim)


def fewest_coded_slots(request: SizingRequest, group_tokens: int) -> int:
    """Slots in 8 bits that the past can stream through, unit by unit as the store has them."""
    block = BlockBuffer.num_bytes(
        1, 1, group_tokens * request.shape.token_bytes, request.padded_bytes(group_tokens)
    )
    return ceil_div(block, coded_unit_bytes(request.shape, group_tokens))


def stream_block_units(
    batch: int, unit_bytes: int, group_tokens: int, max_units: int, limit_bytes: int | None
) -> int:
    """Units of one block of a row that streams from host memory through a GPU's.

    Args:
        limit_bytes: the budget; None: there is none.
    """
    fitting = STREAM_BLOCK_BYTES // (batch * unit_bytes)
    share = ceil_div(max_units, STREAM_BLOCK_SHARE)
    if limit_bytes is not None:
        share = max(share, limit_bytes // STREAM_BUDGET_SHARE // (batch * unit_bytes))
    return max(1, min(STREAM_BLOCK_TOKENS // group_tokens, fitting, share, max_units))


def largest_plan(
    request: SizingRequest, build: PlanBuilder, fewest_slots: int, most_slots: int
) -> SlotPlan:
    """The plan with the most slots that the budget allows; `build(fewest_slots)` must fit.

    A slot more costs about as much as any other: most plans are found where a straight line says.
    """
    limit, over = request.limit_bytes, build(most_slots)
    if limit is None or over.total_bytes <= limit:
        return over
    low, high, best, halves = fewest_slots, most_slots, build(fewest_slots), False
    while high - low > 1:
        share = (limit - best.total_bytes) / max(1, over.total_bytes - best.total_bytes)
        middle = low + int((high - low) * (0.5 if halves else share))
        middle = min(max(middle, low + 1), high - 1)
        plan, before = build(middle), high - low
        if plan.total_bytes <= limit:
            low, best = middle, plan
        else:
            high, over = middle, plan
        halves = not halves and high - low > before // 2  # where it is no line, halves at least
    return best
