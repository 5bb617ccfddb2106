"""The device tier's host memory: rows that do not clash, and what a plan says of them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest, SlotPlan, host_units
from penstock.engine.device_tier.host_memory import HostMemory
from penstock.methods import Quest, SelectionPolicy
from penstock.methods.baselines.arkvale import ArkVale
from penstock.methods.louiskv.policy import LouisKV

SHAPE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
CLASH = 128 << 10
CPU = torch.device("cpu")


def plan_of(policy: SelectionPolicy, max_tokens: int) -> SlotPlan:
    request = SizingRequest(
        shape=SHAPE, batch=3, max_tokens=max_tokens, limit_bytes=None, sector_bytes=4096,
        device_is_cpu=False, has_adapter=False, device_tier=True,
    )  # fmt: skip
    return policy.plan(request)[1]


@given(groups=st.integers(1, 1 << 20), unit=st.integers(1, 64).map(lambda n: 512 * n))
def test_rows_never_lie_a_clash_apart(groups: int, unit: int) -> None:
    held = host_units(groups, unit)
    assert held - groups in (0, 1)
    assert held * unit % CLASH
    assert (held == groups) == bool(groups * unit % CLASH)


def test_units_that_are_multiples_themselves_are_left_alone() -> None:
    assert host_units(100, CLASH) == 100


@pytest.mark.parametrize(
    "policy",
    [
        LouisKV(selected_tokens=64),
        ArkVale(group_tokens=16, selected_tokens=64),
        Quest(group_tokens=8, selected_tokens=64),
    ],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("max_tokens", [8192, 8193, 16384])
def test_a_plan_counts_what_is_taken(policy: SelectionPolicy, max_tokens: int) -> None:
    plan = plan_of(policy, max_tokens)
    assert not plan.is_resident
    shape = replace(SHAPE, num_layers=1)
    memory = HostMemory(plan, shape, CPU)
    assert plan.host_bytes == SHAPE.num_layers * memory.units.nbytes
    assert memory.units.stride(0) % CLASH
    assert memory.tokens.shape[1] >= max_tokens
    assert memory.tokens.is_contiguous()


def test_units_and_tokens_are_the_same_bytes() -> None:
    plan = plan_of(Quest(group_tokens=8, selected_tokens=64), 8192)
    assert plan.host_units == plan.max_units + 1
    memory = HostMemory(plan, SHAPE, CPU)
    memory.units.zero_()
    memory.tokens[1, 8191] = 1.0
    assert memory.units[1, plan.max_units - 1].view(SHAPE.dtype).sum() == 2 * SHAPE.head_dim
    assert not memory.units[[0, 2]].any()
    assert not memory.units[:, plan.max_units :].any()
