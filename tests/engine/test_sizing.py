"""Plans never pass their budget, and a refusal names a budget that works."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import BudgetError, ConfigError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.engine.sizing import streaming_plan
from penstock.methods import POLICIES, FlexGen, Full, KVSwap, SelectionPolicy

LIMITS = st.integers(1, 1 << 33)
BUDGETS = st.none() | LIMITS


@st.composite
def requests(draw: st.DrawFn, *, budgets: st.SearchStrategy[int | None] = BUDGETS) -> SizingRequest:
    kv_heads = draw(st.sampled_from([1, 2, 4, 8, 32]))
    shape = KVShape(
        num_layers=draw(st.integers(1, 40)), num_query_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads, head_dim=draw(st.sampled_from([8, 16, 64, 80, 128, 256])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )  # fmt: skip
    return SizingRequest(
        shape=shape, batch=draw(st.integers(1, 8)), max_tokens=draw(st.integers(1, 100_000)),
        limit_bytes=draw(budgets), sector_bytes=draw(st.sampled_from([512, 4096])),
        device_is_cpu=draw(st.booleans()), has_adapter=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def kvswaps(draw: st.DrawFn) -> KVSwap:
    group = draw(st.sampled_from([1, 4, 8, 16]))
    return KVSwap(
        group_tokens=group,
        selected_tokens=draw(st.none() | st.integers(group, 4000)),
        reuse_tokens=draw(st.none() | st.integers(0, 8000)),
        rank=draw(st.none() | st.integers(1, 600)),
        index_bits=draw(st.sampled_from([None, 16, 8, 4])),
        window_tokens=draw(st.integers(0, 200)),
        sink_tokens=draw(st.integers(0, 20)),
        attend=draw(st.sampled_from(["resident", "selected"])),
    )  # fmt: skip


POLICY = st.one_of(kvswaps(), st.builds(FlexGen, group_tokens=st.integers(1, 128)), st.just(Full()))


@settings(deadline=None, max_examples=60)
@given(POLICY, requests())
def test_a_plan_keeps_its_budget(policy: SelectionPolicy, request: SizingRequest) -> None:
    limit = request.limit_bytes
    try:
        chosen, plan = policy.plan(request)
    except BudgetError as error:
        assert limit is not None
        needed = error.needed_bytes or 0
        assert needed > limit
        message = str(error)
        assert f"({needed} bytes)" in message
        _, plan = policy.plan(replace(request, limit_bytes=needed))
        assert plan.total_bytes <= needed
        if not policy.retrieves:
            with pytest.raises(BudgetError):
                policy.plan(replace(request, limit_bytes=needed - 1))
        return
    if limit is not None:
        assert plan.total_bytes <= limit
    assert type(chosen) is type(policy)
    assert plan.batch == request.batch
    assert plan.max_units * plan.group_tokens >= request.max_tokens
    if plan.is_resident:
        assert plan.total_bytes >= request.shape.full_cache_bytes(request.batch, request.max_tokens)
        return
    if policy.retrieves:
        assert 1 <= plan.selected_units <= plan.num_slots
    if not policy.stays_resident:
        assert plan.window_slots >= 2
        assert plan.num_slots >= 2
        # What becomes codes on its way into slots lands beside them.
        is_coded = isinstance(chosen, KVSwap) and chosen.slot_bits == 8
        direct = request.is_direct(plan.group_tokens) and not is_coded
        assert (plan.staging_slots == 0) == direct


@settings(deadline=None)
@given(POLICY, requests(budgets=LIMITS), st.integers(0, 1 << 30))
def test_more_memory_is_never_worse(
    policy: SelectionPolicy, request: SizingRequest, more: int
) -> None:
    assert request.limit_bytes is not None
    larger = replace(request, limit_bytes=request.limit_bytes + more)
    try:
        before, small = policy.plan(request)
    except BudgetError:
        return
    after, large = policy.plan(larger)
    if isinstance(policy, KVSwap):  # may trade index for slots
        assert isinstance(before, KVSwap)
        assert isinstance(after, KVSwap)
        if not (small.is_resident or large.is_resident):
            worth = policy.worth(larger, after, large)
            assert worth >= policy.worth(request, before, small) - 1e-12
        return
    assert large.index_bytes >= small.index_bytes
    if small.index_bytes == large.index_bytes and small.shared_pools == large.shared_pools:
        assert large.num_slots >= small.num_slots


@settings(deadline=None)
@given(requests(), st.integers(1, 100))
def test_streaming_works_from_its_smallest_budget_on(
    request: SizingRequest, group_tokens: int
) -> None:
    try:
        plan = streaming_plan(request, group_tokens, "streaming")
    except BudgetError as error:
        request = replace(request, limit_bytes=error.needed_bytes)
        plan = streaming_plan(request, group_tokens, "streaming")
    assert request.limit_bytes is None or plan.total_bytes <= request.limit_bytes
    assert plan.num_slots >= 2
    assert plan.shared_pools


def test_no_limit_selects_everything() -> None:
    shape = KVShape(
        num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    request = SizingRequest(
        shape=shape, batch=1, max_tokens=1000, limit_bytes=None, sector_bytes=512,
        device_is_cpu=True, has_adapter=True,
    )  # fmt: skip
    _, plan = KVSwap().plan(request)
    assert plan.is_resident
    _, plan = KVSwap().plan(replace(request, must_tier=True))
    assert plan.selected_units == plan.num_slots == plan.max_units == 250
    assert not plan.shared_pools


def test_a_budget_for_the_full_cache_keeps_it_in_memory() -> None:
    shape = KVShape(
        num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    full = shape.full_cache_bytes(1, 1000)
    request = SizingRequest(
        shape=shape, batch=1, max_tokens=1000, limit_bytes=2 * full, sector_bytes=512,
        device_is_cpu=True, has_adapter=True,
    )  # fmt: skip
    assert KVSwap().plan(request)[1].is_resident
    assert not KVSwap().plan(replace(request, limit_bytes=full // 2))[1].is_resident
    assert not KVSwap(selected_tokens=400).plan(request)[1].is_resident


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"group_tokens": 0}, "group_tokens=0"),
        ({"selected_tokens": 3}, "selected_tokens=3 is less than one group of 4"),
        ({"rank": 0}, "rank=0"),
        ({"index_bits": 5}, "index_bits=5"),
        ({"window_tokens": -1}, "window_tokens"),
        ({"sink_tokens": -1}, "sink_tokens"),
    ],
)
def test_impossible_settings(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        KVSwap(**options)


def test_the_table_of_policies() -> None:
    for name, policy in POLICIES.items():
        assert policy.name == name
        assert policy() == policy()
        with pytest.raises(AttributeError):
            policy().drops = True  # type: ignore[misc]
