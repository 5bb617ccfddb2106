"""What KVSwap makes of a budget, over shapes of models, lengths and fractions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import BudgetError, ConfigError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.methods.kvswap.division import column_choices, kept_share, least_columns
from penstock.methods.kvswap.policy import (
    SHARED_READS,
    SHARED_TOKENS,
    SOME_SHARED_TOKENS,
    KVSwap,
)

SMALL = KVShape(
    num_layers=24, num_query_heads=14, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16
)
"""Qwen2.5-0.5B."""


def asked(
    tokens: int, fraction: int, shape: KVShape = SMALL, *, has_adapter: bool = True,
    sector_bytes: int = 4096, batch: int = 1, device_tier: bool = False,
) -> SizingRequest:  # fmt: skip
    return SizingRequest(
        shape=shape, batch=batch, max_tokens=tokens, sector_bytes=sector_bytes, device_is_cpu=True,
        limit_bytes=shape.full_cache_bytes(batch, tokens) // fraction, has_adapter=has_adapter,
        most_rank=min(128, shape.joint_dim) if has_adapter else None, device_tier=device_tier,
    )  # fmt: skip


@st.composite
def gqa_shapes(draw: st.DrawFn) -> KVShape:
    kv_heads = draw(st.sampled_from([2, 3, 4, 8]))
    return KVShape(
        num_layers=draw(st.integers(16, 40)), num_query_heads=kv_heads * draw(st.integers(2, 8)),
        num_kv_heads=kv_heads, head_dim=draw(st.sampled_from([64, 80, 96, 128])),
        dtype=torch.bfloat16,
    )  # fmt: skip


@given(
    gqa_shapes(), st.integers(2048, 131_072), st.sampled_from([34, 20, 13, 8, 4]),
    st.sampled_from([512, 4096]), st.integers(1, 4),
)  # fmt: skip
def test_every_gqa_shape_has_a_plan(
    shape: KVShape, tokens: int, fraction: int, sector_bytes: int, batch: int
) -> None:
    if fraction > 13 and tokens < 8192:
        return
    request = asked(tokens, fraction, shape, sector_bytes=sector_bytes, batch=batch)
    policy, plan = KVSwap().plan(request)
    assert isinstance(policy, KVSwap)
    assert policy.rank is not None
    assert request.limit_bytes is not None
    assert plan.total_bytes <= request.limit_bytes
    assert 16 <= plan.selected_units <= plan.num_slots
    assert policy.rank >= shape.joint_dim // 32
    assert policy.rank <= (request.most_rank or shape.joint_dim)


@given(st.integers(2048, 131_072), st.sampled_from([34, 20, 13, 8, 4]))
def test_without_an_adapter_too(tokens: int, fraction: int) -> None:
    if fraction > 13 and tokens < 8192:
        return
    KVSwap().plan(asked(tokens, fraction, has_adapter=False))


@pytest.mark.parametrize(
    ("tokens", "sector_bytes"), [(16_384, 512), (16_384, 4096), (30_000, 512), (30_000, 4096)]
)
def test_layers_have_slots_of_their_own_at_a_thirteenth(tokens: int, sector_bytes: int) -> None:
    _, plan = KVSwap().plan(asked(tokens, 13, sector_bytes=sector_bytes))
    assert not plan.shared_pools
    assert plan.num_slots >= 64


def test_reuse_that_is_stated_has_slots_of_its_own() -> None:
    _, plan = KVSwap(reuse_tokens=340).plan(asked(8192, 13, sector_bytes=512))
    assert not plan.shared_pools
    assert plan.num_slots == plan.selected_units >= 64
    assert KVSwap(slot_bits=16).plan(asked(8192, 13, sector_bytes=512))[1].shared_pools


def test_slots_are_in_8_bits_where_that_holds_more() -> None:
    """Not on a GPU over a disk, of widths that no kernel knows, or where they can hold all."""
    policy, plan = KVSwap().plan(asked(16_384, 13))
    _, former = KVSwap(slot_bits=16).plan(asked(16_384, 13))
    assert plan.is_coded
    assert isinstance(policy, KVSwap)
    assert policy.slot_bits == 8
    assert plan.num_slots > 1.5 * former.num_slots
    assert plan.slot_bytes == 4 * 2 * 2 * (64 + 2)
    on_device = asked(16_384, 13, device_tier=True)
    own: dict[str, Any] = {"reuse_tokens": 16_384}
    coded, former = (KVSwap(slot_bits=bits, **own).plan(on_device)[1] for bits in (8, 16))
    assert KVSwap(**own).plan(on_device)[1] == coded
    assert coded.is_coded
    assert coded.staging_slots == 0
    assert coded.num_slots > 1.5 * former.num_slots
    narrow = replace(SMALL, head_dim=72)
    assert not KVSwap().plan(asked(16_384, 13, narrow))[1].is_coded
    assert KVSwap(slot_bits=8).plan(asked(16_384, 13, narrow))[1].is_coded
    for slot_bits in (None, 8):
        roomy = replace(asked(16_384, 1), must_tier=True, limit_bytes=1 << 30)
        everything = KVSwap(slot_bits=slot_bits).plan(roomy)[1]
        assert everything.num_slots == everything.max_units
        assert not everything.is_coded
    with pytest.raises(ConfigError, match="not do for a GPU"):
        KVSwap(slot_bits=8).plan(replace(asked(16_384, 13), device_is_cpu=False))
    for faulty in (
        {"slot_bits": 4},
        {"slot_bits": 8, "mass": 0.9},
        {"slot_bits": 8, "tail": "mean"},
    ):
        with pytest.raises(ConfigError, match="slot_bits="):
            KVSwap(**faulty)


def test_every_third_layer_shares_where_own_slots_are_few() -> None:
    """The same bytes hold more for all layers than slots of their own would."""
    request = asked(8192, 13)
    policy, plan = KVSwap().plan(request)
    assert isinstance(policy, KVSwap)
    assert plan.shared_every == 3
    assert not plan.shared_pools
    assert plan.is_coded
    assert [i for i in range(24) if plan.shares(i)] == list(range(2, 24, 3))
    assert plan.sharing(24) == pytest.approx(1 / 3)
    assert plan.sharing(4) == pytest.approx(1 / 4)
    own = KVSwap(shared_every=0).plan(request)[1]
    assert (own.shared_every, own.sharing(24)) == (0, 0.0)
    assert plan.num_slots > 1.25 * own.num_slots
    assert plan.num_slots * plan.group_tokens <= SOME_SHARED_TOKENS
    made = replace(
        policy, selected_tokens=4 * plan.selected_units, reuse_tokens=4 * plan.num_slots,
        shared_every=plan.shared_every, keep=policy.resident_factor(plan.selected_units),
    )  # fmt: skip
    assert made.plan(request)[1] == plan, "a tuner states what was chosen"
    for other in (asked(16_384, 13), asked(8192, 4), asked(8192, 13, device_tier=True)):
        assert KVSwap().plan(other)[1].shared_every in (0, 1)


def test_shared_pools_are_all_or_some_by_what_is_stated() -> None:
    request = asked(8192, 13)
    assert KVSwap(shared_every=1).plan(asked(4096, 13))[1] == KVSwap().plan(asked(4096, 13))[1]
    assert KVSwap(shared_every=5).plan(request)[1].sharing(24) == pytest.approx(4 / 24)
    for faulty in (
        {"shared_every": -1}, {"shared_every": 3, "reuse_tokens": 0},
        {"shared_every": 1, "reuse_tokens": 400}, {"shared_every": 2, "slot_bits": 16},
        {"shared_every": 2, "mass": 0.9}, {"shared_every": 4, "attend": "selected"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="shared_every="):
            KVSwap(**faulty)
    for where in (
        asked(8192, 13, device_tier=True), replace(request, device_is_cpu=False),
        asked(8192, 13, replace(SMALL, value_dim=32)),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="shared_every=3"):
            KVSwap(shared_every=3).plan(where)


def test_shared_pools_hold_one_selection() -> None:
    _, plan = KVSwap().plan(asked(4096, 13))
    assert plan.shared_pools
    assert plan.selected_units == plan.num_slots >= 64


@pytest.mark.parametrize(("tokens", "fraction"), [(8192, 13), (16_384, 13), (30_000, 34)])
def test_shared_pools_over_host_memory_hold_what_a_link_has_time_for(
    tokens: int, fraction: int
) -> None:
    narrow, wide = SMALL, replace(SMALL, num_layers=32, num_kv_heads=8)
    _, plan = KVSwap().plan(asked(tokens, fraction, narrow, device_tier=True))
    reads = plan.selected_units * plan.unit_bytes * narrow.num_layers
    assert plan.shared_pools
    assert plan.selected_units == plan.num_slots > 300
    assert 0.5 * SHARED_READS < reads <= SHARED_READS
    _, plan = KVSwap().plan(asked(tokens, fraction, wide, device_tier=True))
    assert not plan.shared_pools or plan.num_slots * plan.group_tokens <= SHARED_TOKENS


@settings(max_examples=15)
@given(gqa_shapes(), st.integers(8192, 65_536), st.integers(3, 8), st.booleans())
def test_a_larger_budget_is_used(
    shape: KVShape, tokens: int, fraction: int, device_tier: bool
) -> None:
    # Over host memory pools may be shared by the best plan, unless reuse is stated.
    own: dict[str, Any] = {"reuse_tokens": tokens} if device_tier else {}
    request = asked(tokens, fraction, shape, device_tier=device_tier)
    _, plan = KVSwap(**own).plan(request)
    assert request.limit_bytes is not None
    assert not plan.shared_pools
    assert plan.total_bytes > 0.9 * request.limit_bytes
    assert plan.selected_units >= max(min(100, plan.num_slots), plan.num_slots // 3)
    more = replace(request, limit_bytes=request.limit_bytes * 5 // 4)
    assert KVSwap(**own).plan(more)[1].num_slots > plan.num_slots


@settings(max_examples=15)
@given(gqa_shapes(), st.integers(2048, 65_536), st.integers(4, 34), st.integers(1, 1 << 26))
def test_more_memory_keeps_more(shape: KVShape, tokens: int, fraction: int, more: int) -> None:
    request = asked(tokens, fraction, shape)
    assert request.limit_bytes is not None
    policy = KVSwap()
    larger = replace(request, limit_bytes=request.limit_bytes + more)
    try:
        made, plan = policy.plan(request)
    except BudgetError:
        return
    after, grown = policy.plan(larger)
    assert isinstance(made, KVSwap)
    assert isinstance(after, KVSwap)
    if not grown.is_resident:
        assert policy.worth(larger, after, grown) >= policy.worth(request, made, plan) - 1e-12


@pytest.mark.parametrize(
    "stated",
    [
        {"rank": 40}, {"rank": 24, "index_bits": 8}, {"selected_tokens": 160},
        {"selected_tokens": 160, "reuse_tokens": 480}, {"reuse_tokens": 0},
    ],
)  # fmt: skip
def test_what_is_stated_stays(stated: dict[str, Any]) -> None:
    made, plan = KVSwap(**stated).plan(asked(16_384, 8))
    for name, value in stated.items():
        assert getattr(made, name) == value
    selected, reused = stated.get("selected_tokens"), stated.get("reuse_tokens")
    if selected is not None:
        assert plan.selected_units == selected // 4
        assert plan.num_slots == max(selected, reused or 0) // 4
    if reused == 0:
        assert plan.shared_pools
        assert plan.num_slots == plan.selected_units


@pytest.mark.parametrize("has_adapter", [True, False])
def test_the_fewest_columns_have_the_largest_selection(has_adapter: bool) -> None:
    request = asked(8704, 34, has_adapter=has_adapter, sector_bytes=512)
    policy, plan = KVSwap().plan(request)
    assert isinstance(policy, KVSwap)
    assert policy.rank == least_columns(SMALL.joint_dim, turned=True, has_adapter=has_adapter)
    assert plan.shared_pools
    assert plan.num_slots >= 100


def test_a_refusal_names_what_would_do() -> None:
    with pytest.raises(BudgetError) as refused:
        KVSwap().plan(asked(1024, 34))
    least = refused.value.needed_bytes
    assert least is not None
    _, plan = KVSwap().plan(replace(asked(1024, 34), limit_bytes=least))
    assert plan.total_bytes <= least


@given(st.integers(1, 64), st.integers(1, 999), st.integers(1, 1000))
def test_what_is_kept_grows_with_both_parts(columns: int, slots: int, max_units: int) -> None:
    kept = kept_share(columns, 8, slots, max_units)
    assert 0 <= kept < 1
    assert kept_share(columns + 1, 8, slots, max_units) >= kept
    assert kept_share(columns, 8, slots + 1, max_units) >= kept


def test_columns_by_the_width_of_the_keys() -> None:
    assert least_columns(128, turned=True, has_adapter=False) == 8
    assert least_columns(128, turned=False, has_adapter=True) == 16
    assert least_columns(128, turned=False, has_adapter=False) == 24
    assert list(column_choices(128, 8, 128)) == [64, 48, 32, 24, 16, 8]
    assert list(column_choices(1024, 32, 128)) == [64, 32]
    assert list(column_choices(1024, 32, 20)) == [20]
    assert list(column_choices(16, 8, 16)) == [16, 8]


def test_a_step_selects_what_the_slots_hold() -> None:
    """A factor of 1, or a stated selection, is the paper's: the oldest slots are let go."""
    factors = []
    for tokens in (30_000, 60_000):
        policy, plan = KVSwap(slot_bits=16).plan(asked(tokens, 13))
        assert plan.selected_units == plan.num_slots
        factors.append(policy.resident_factor(plan.selected_units))
    assert 1 < factors[0] < factors[1], "more slots, and yet no more reads"
    for former in (KVSwap(keep=1), KVSwap(selected_tokens=200, reuse_tokens=800)):
        policy, plan = former.plan(asked(30_000, 13))
        assert policy.resident_factor(plan.selected_units) == 1
        assert plan.selected_units < plan.num_slots
    for faulty in (0.5, 2000.0):
        with pytest.raises(ConfigError, match="keep="):
            KVSwap(keep=faulty)
