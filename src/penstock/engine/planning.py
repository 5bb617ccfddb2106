"""plan_cache(): divide a cache's budget, as its configuration and what it holds already want it."""

from dataclasses import replace

from penstock.core.errors import AdapterError, BudgetError, ConfigError
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.adapter import widest_ranks
from penstock.engine.head_rows import HeadRows
from penstock.engine.policy import SelectionPolicy
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.sizing import resident_plan, streaming_plan


def plan_cache(
    settings: RuntimeSettings, rows: HeadRows, batch: int, *, sector_bytes: int,
    current: tuple[SelectionPolicy, SlotPlan] | None,
) -> tuple[SelectionPolicy, SlotPlan]:  # fmt: skip
    """Divide the budget for `batch` sequences.

    Tokens that are held already stay where they are: a resident cache stays resident and a tiered
    one tiered, whatever the batch, and its window and index keep their form; only how many tokens
    are selected and kept follows the batch. A stored past is read where it lies.

    Args:
        sector_bytes: of the store; 1 where there is none.
        current: the policy and the plan under which the cache holds tokens; None: it holds none.

    Returns:
        The policy with every open choice made, and the plan.

    Raises:
        BudgetError: the budget is too small.
        AdapterError: the policy wants more components a token than the adapter has.
    """
    goes_on = current is not None and not current[1].is_resident
    request = _request(settings, rows, batch, sector_bytes=sector_bytes, must_tier=goes_on)
    states = settings.state_bytes * batch
    if current is not None and current[1].is_resident:
        plan = resident_plan(request)
        request.require(plan.total_bytes, "a larger batch of a resident cache")
        return settings.policy, replace(plan, state_bytes=states)
    if settings.exact:
        plan = streaming_plan(request, settings.policy.unit_tokens, "exact mode")
        return settings.policy, replace(plan, state_bytes=states)
    wanted = settings.policy if current is None else _as_current(settings.policy, current[0])
    policy, plan = wanted.plan(request)
    if current is not None and _form(plan) != _form(current[1]):
        raise BudgetError(
            f"with {batch} rows the budget makes another window than the one that holds the "
            "newest tokens; give more memory, or set window_tokens"
        )
    plan = replace(plan, state_bytes=states)
    if not plan.is_resident:
        _require_rank(policy, settings)
    if not settings.device_tier:
        plan = plan.with_predictor(settings.predictor_bytes, settings.limit_bytes)
    return policy, plan


def _request(
    settings: RuntimeSettings, rows: HeadRows, batch: int, *, sector_bytes: int, must_tier: bool
) -> SizingRequest:
    states, limit = settings.state_bytes * batch, settings.limit_bytes
    return SizingRequest(
        shape=rows.shape, batch=batch * rows.per_sequence, max_tokens=settings.max_tokens,
        limit_bytes=None if limit is None else max(1, limit - states), state_bytes=states,
        device_is_cpu=settings.device.type == "cpu", sector_bytes=sector_bytes,
        has_adapter=settings.adapter is not None,
        widest_ranks=widest_ranks(settings.adapter or ()),
        turns_keys=any(settings.rotations or ()),
        most_rank=min((layer.rank for layer in settings.adapter or ()), default=None),
        must_tier=must_tier or settings.shares_past or settings.must_tier,
        rows_per_sequence=rows.per_sequence, device_tier=settings.device_tier,
    )  # fmt: skip


def fits(settings: RuntimeSettings, batch: int, *, sector_bytes: int) -> bool:
    """Whether a cache that holds nothing yet could be planned; opens no store."""
    rows = HeadRows(settings.shape, per_head=settings.policy.per_head and not settings.exact)
    try:
        plan_cache(settings, rows, batch, sector_bytes=sector_bytes, current=None)
    except (BudgetError, ConfigError):
        return False
    return True


def least_bytes_with_adapter(
    settings: RuntimeSettings, batch: int, *, sector_bytes: int
) -> int | None:
    """The smallest budget of the policy if it had an adapter, in bytes; None: not known."""
    rows = HeadRows(settings.shape, per_head=settings.policy.per_head)
    request = _request(settings, rows, batch, sector_bytes=sector_bytes, must_tier=False)
    try:
        settings.policy.plan(replace(request, has_adapter=True, limit_bytes=1))
    except BudgetError as error:
        return error.needed_bytes
    return None


def _as_current(wanted: SelectionPolicy, made: SelectionPolicy) -> SelectionPolicy:
    """`wanted` with the choices that tokens were taken in under."""
    open_still = {
        name: getattr(wanted, name) for name in wanted.free_fields if hasattr(wanted, name)
    }
    return replace(made, **open_still)


def _form(plan: SlotPlan) -> tuple[int, int, int]:
    return plan.group_tokens, plan.window_slots, plan.sink_slots


def _require_rank(policy: SelectionPolicy, settings: RuntimeSettings) -> None:
    """Refuse an adapter with fewer components than the index is made for."""
    wanted = policy.wanted_rank
    if not settings.adapter or not policy.uses_adapter or wanted is None:
        return
    there = min(layer.rank for layer in settings.adapter)
    if wanted > there:
        raise AdapterError(
            f"the adapter has {there} components a token, and {policy.name} wants {wanted}; give "
            f"rank={there} or less, or make an adapter of rank {wanted} (penstock calibrate)"
        )
