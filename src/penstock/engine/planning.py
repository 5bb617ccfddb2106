"""plan_cache(): divide a cache's budget, as its configuration and what it holds already want it."""

from dataclasses import replace

from penstock.core.errors import AdapterError, BudgetError, ConfigError
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.adapter import widest_ranks
from penstock.engine.head_rows import HeadRows
from penstock.engine.policy import SelectionPolicy
from penstock.engine.runtime_config import RuntimeConfig
from penstock.engine.sizing import resident_plan, streaming_plan


def plan_cache(
    config: RuntimeConfig, rows: HeadRows, batch: int, *, sector_bytes: int,
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
    request = _request(config, rows, batch, sector_bytes=sector_bytes, must_tier=goes_on)
    if current is not None and current[1].is_resident:
        plan = resident_plan(request)
        request.require(plan.total_bytes, "a larger batch of a resident cache")
        return config.policy, plan
    if config.exact:
        return config.policy, streaming_plan(request, config.policy.unit_tokens, "exact mode")
    wanted = config.policy if current is None else _as_current(config.policy, current[0])
    policy, plan = wanted.plan(request)
    if current is not None and _form(plan) != _form(current[1]):
        raise BudgetError(
            f"with {batch} rows the budget makes another window than the one that holds the "
            "newest tokens; give more memory, or set window_tokens"
        )
    if not plan.is_resident:
        _require_rank(policy, config)
    if not config.device_tier:
        plan = plan.with_predictor(config.predictor_bytes, config.limit_bytes)
    return policy, plan


def _request(
    config: RuntimeConfig, rows: HeadRows, batch: int, *, sector_bytes: int, must_tier: bool
) -> SizingRequest:
    return SizingRequest(
        shape=rows.shape, batch=batch * rows.per_sequence, max_tokens=config.max_tokens,
        limit_bytes=config.limit_bytes, device_is_cpu=config.device.type == "cpu",
        sector_bytes=sector_bytes, has_adapter=config.adapter is not None,
        widest_ranks=widest_ranks(config.adapter or ()),
        must_tier=must_tier or config.shares_past or config.must_tier,
        rows_per_sequence=rows.per_sequence, device_tier=config.device_tier,
    )  # fmt: skip


def fits(config: RuntimeConfig, batch: int, *, sector_bytes: int) -> bool:
    """Whether a cache that holds nothing yet could be planned; opens no store."""
    rows = HeadRows(config.shape, per_head=config.policy.per_head and not config.exact)
    try:
        plan_cache(config, rows, batch, sector_bytes=sector_bytes, current=None)
    except (BudgetError, ConfigError):
        return False
    return True


def least_bytes_with_adapter(config: RuntimeConfig, batch: int, *, sector_bytes: int) -> int | None:
    """The smallest budget of the policy if it had an adapter, in bytes; None: not known."""
    rows = HeadRows(config.shape, per_head=config.policy.per_head)
    request = _request(config, rows, batch, sector_bytes=sector_bytes, must_tier=False)
    try:
        config.policy.plan(replace(request, has_adapter=True, limit_bytes=1))
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


def _require_rank(policy: SelectionPolicy, config: RuntimeConfig) -> None:
    """Refuse an adapter with fewer components than the index is made for."""
    wanted = policy.wanted_rank
    if not config.adapter or not policy.uses_adapter or wanted is None:
        return
    there = min(layer.rank for layer in config.adapter)
    if wanted > there:
        raise AdapterError(
            f"the adapter has {there} components a token, and {policy.name} wants {wanted}; give "
            f"rank={there} or less, or make an adapter of rank {wanted} (penstock calibrate)"
        )
