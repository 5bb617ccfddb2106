"""The ledger's claim is what is really allocated: tensors and buffers, counted one by one."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.adapter import LayerAdapter, LowRankAdapter
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.kernels.key_rotation import KeyRotation
from penstock.methods import FlexGen, Full, KVSwap, Quest, SelectionPolicy
from penstock.methods.dynakv.index import PROMPT_QUERIES
from penstock.methods.dynakv.policy import DynaKV
from penstock.methods.dynakv.replacement import ClusterAligned
from penstock.methods.hillinfer.hot_cold import HotCold
from penstock.methods.hillinfer.index import NearIndex
from penstock.methods.hillinfer.near_storage.cold_keys import ColdKeys
from penstock.methods.hillinfer.policy import HillInfer
from penstock.methods.kvswap.index import LowRankIndex
from penstock.methods.louiskv.device_index import DeviceSemanticUnits
from penstock.methods.louiskv.policy import LouisKV
from penstock.storage.unit_region import UnitRegion
from penstock.testing.allocated_memory import allocated_bytes

SHAPE = KVShape(num_layers=4, num_query_heads=8, num_kv_heads=4, head_dim=32, dtype=torch.bfloat16)
MAX_TOKENS, BATCH = 8192, 2
FULL_BYTES = SHAPE.full_cache_bytes(BATCH, MAX_TOKENS)
SLACK = 0.04

ROTATION = KeyRotation(torch.logspace(0, -4, 16, dtype=torch.float64))
_BASIS = torch.eye(SHAPE.joint_dim)[:, :64]
MEASURED = LowRankAdapter(
    [LayerAdapter(_BASIS, torch.ones(64), block_tokens=64)] * SHAPE.num_layers, "", 1,
    selection_cost=((0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.0, 0.0), *([(0.1,) * 8] * 3)),
).shared_layers()  # fmt: skip
"""Of layers of which the first wants 56 components, and the others as many as there are."""

SETTINGS: dict[str, tuple[SelectionPolicy, dict[str, Any]]] = {
    "direct": (KVSwap(), {"limit_bytes": FULL_BYTES // 3}),
    "staged": (KVSwap(group_tokens=5), {"limit_bytes": FULL_BYTES // 3}),
    "shared": (KVSwap(reuse_tokens=0), {"limit_bytes": FULL_BYTES // 3}),
    "shared-staged": (KVSwap(reuse_tokens=0, group_tokens=5), {"limit_bytes": FULL_BYTES // 3}),
    "selected": (
        KVSwap(attend="selected", reuse_tokens=1600), {"limit_bytes": FULL_BYTES // 2},
    ),
    "in-8-bits": (KVSwap(slot_bits=8), {"limit_bytes": FULL_BYTES // 3}),
    "in-8-bits-shared": (
        KVSwap(slot_bits=8, reuse_tokens=0, group_tokens=5), {"limit_bytes": FULL_BYTES // 3},
    ),
    "in-8-bits-some-shared": (
        KVSwap(slot_bits=8, shared_every=2), {"limit_bytes": FULL_BYTES // 3},
    ),
    "no-limit": (KVSwap(), {}),
    "exact": (KVSwap(), {"exact": True, "limit_bytes": FULL_BYTES // 3}),
    "flexgen": (FlexGen(), {}),
    "flexgen-staged": (FlexGen(group_tokens=7), {}),
    "full": (Full(), {}),
    "clusters": (DynaKV(selected_tokens=512), {}),
    "clusters-virtual": (DynaKV(selected_tokens=512, virtual=True, reuse_tokens=1024), {}),
    "clusters-in-order": (DynaKV(selected_tokens=512, layout="tokens"), {}),
    "clusters-flash": (DynaKV(selected_tokens=512, representatives="flash"), {}),
    "near": (HillInfer(alpha=0.1, hot_tokens=1600), {"limit_bytes": FULL_BYTES // 2}),
    "near-products": (
        HillInfer(alpha=0.1, rule="products", devices=2), {"limit_bytes": FULL_BYTES},
    ),
    "near-local": (HillInfer(alpha=0.1, near=False), {"limit_bytes": FULL_BYTES}),
    "near-host": (
        HillInfer(alpha=0.1, near=False, host_memory=FULL_BYTES // 4), {"limit_bytes": FULL_BYTES},
    ),
    "measured-ranks": (
        KVSwap(rank=24, index_bits=8), {"limit_bytes": FULL_BYTES // 3, "adapter": MEASURED},
    ),
    "device-measured-ranks": (
        KVSwap(rank=24, index_bits=4, selected_tokens=512),
        {"device_tier": True, "adapter": MEASURED},
    ),
    "device-louiskv": (LouisKV(selected_tokens=512), {"device_tier": True}),
    "device-louiskv-spread": (
        LouisKV(selected_tokens=512, summary="mean+spread"), {"device_tier": True}
    ),
    "device-quest": (Quest(selected_tokens=512), {"device_tier": True}),
    "device-kvswap": (KVSwap(selected_tokens=512), {"device_tier": True}),
    "device-in-8-bits": (
        KVSwap(slot_bits=8), {"device_tier": True, "limit_bytes": FULL_BYTES // 3},
    ),
    "device-flexgen": (FlexGen(), {"device_tier": True}),
}  # fmt: skip


def used_runtime(
    policy: SelectionPolicy, options: dict[str, Any], tokens: int = 320
) -> TieredRuntime:
    settings: dict[str, Any] = {
        "shape": SHAPE, "policy": policy, "limit_bytes": None, "store": "memory",
        "max_tokens": MAX_TOKENS, "exact": False, "adapter": None, "device": torch.device("cpu"),
        "rotations": [ROTATION] * SHAPE.num_layers,
    }  # fmt: skip
    runtime = TieredRuntime(RuntimeSettings(**{**settings, **options}), BATCH)
    for count in (tokens, 1, 1):
        step(runtime, count)
    return runtime


def step(runtime: TieredRuntime, count: int) -> None:
    for layer in range(SHAPE.num_layers):
        query = torch.randn(BATCH, 8, count, 32).bfloat16()
        keys = torch.randn(BATCH, 4, count, 32).bfloat16()
        runtime.attend(layer, AttentionCall(query, keys, keys.clone(), 0.2))


def near_temporary_bytes(policy: HillInfer, plan: SlotPlan) -> int:
    """Choices, logits and masks of HillInfer; the shared memory stays."""
    hot = plan.host_slots or plan.num_slots
    places = hot + policy.window_tokens + policy.sink_tokens + 2
    choice = HotCold.scratch_bytes(plan.batch, hot)
    logits = NearIndex.scratch_bytes(plan.batch, 8, places, MAX_TOKENS)
    codes = 0
    if not policy.near:
        codes = ColdKeys.scratch_bytes(policy.settings_for(SHAPE, plan.batch, MAX_TOKENS))
    return choice + logits + codes + plan.batch * (2 * places + 4 * MAX_TOKENS)


def temporary_bytes(runtime: TieredRuntime) -> int:
    """What the plan sets aside for tensors that live during a call only."""
    policy, plan = runtime.policy, runtime.plan
    if runtime.settings.device_tier and isinstance(policy, LouisKV):
        shape, rows = replace(SHAPE, num_query_heads=2, num_kv_heads=1), plan.batch
        sizes = policy._device_sizes(MAX_TOKENS)
        scratch = DeviceSemanticUnits.scratch_bytes(shape, sizes, rows=rows, max_tokens=MAX_TOKENS)
        return scratch + 4 * rows * MAX_TOKENS
    if isinstance(policy, DynaKV):
        request = SizingRequest(
            shape=replace(SHAPE, num_query_heads=2, num_kv_heads=1), batch=plan.batch,
            max_tokens=MAX_TOKENS, limit_bytes=None, sector_bytes=512, device_is_cpu=True,
            has_adapter=False, rows_per_sequence=4,
        )  # fmt: skip
        [(_, size)] = policy.index_sizes(request)
        choice = ClusterAligned.scratch_bytes(plan.batch, plan.num_slots)
        # Queries of the prompt are forgotten when it is clustered.
        queries = SHAPE.num_layers * 2 * plan.batch * PROMPT_QUERIES * 32 * 2
        return size.scratch_bytes + choice + 4 * plan.batch * MAX_TOKENS + queries
    if isinstance(policy, HillInfer):
        return near_temporary_bytes(policy, plan)
    if isinstance(policy, Quest):
        return plan.batch * (16 * plan.max_units + 4 * MAX_TOKENS)
    if not isinstance(policy, KVSwap) or runtime.settings.exact or plan.is_resident:
        return 0
    assert policy.rank is not None
    assert policy.index_bits is not None
    scratch = LowRankIndex.scratch_bytes(
        SHAPE, batch=BATCH, max_units=plan.max_units, group_tokens=plan.group_tokens,
        rank=policy.rank if runtime.settings.adapter is None else 56, bits=policy.index_bits,
        turned=True,
    )  # fmt: skip
    return scratch + 16 * SHAPE.joint_dim**2


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_claim_is_what_is_allocated(setting: str) -> None:
    policy, options = SETTINGS[setting]
    runtime = used_runtime(policy, options)
    try:
        report = runtime.report()
        claimed = report.used_bytes - temporary_bytes(runtime)
        allocated = allocated_bytes(runtime)
        # The bases of an index may stand where its temporaries are booked.
        assert claimed * (1 - SLACK) <= allocated <= report.used_bytes * (1 + SLACK)
        assert report.used_bytes <= report.limit_bytes
        assert report.full_cache_bytes == FULL_BYTES
        assert sum(report.items.values()) == report.used_bytes
    finally:
        runtime.close()
    assert runtime.report().used_bytes == 0


@pytest.mark.parametrize("batch", [1, 3])
def test_another_batch_is_booked_anew(batch: int) -> None:
    runtime = used_runtime(KVSwap(), {})
    runtime.select_rows(torch.arange(batch) % BATCH)
    report = runtime.report()
    assert report.used_bytes == runtime.plan.total_bytes
    assert report.full_cache_bytes == SHAPE.full_cache_bytes(batch, MAX_TOKENS)
    runtime.close()


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    runtime = used_runtime(KVSwap(), {"limit_bytes": FULL_BYTES // 3})
    before = runtime.report()
    with pytest.raises(ValueError, match="smallest budget that would do"):
        runtime.select_rows(torch.zeros(40, dtype=torch.int64))
    assert runtime.report() == before
    assert runtime.batch == BATCH
    keys = torch.randn(BATCH, 4, 1, 32).bfloat16()
    for layer in range(SHAPE.num_layers):
        runtime.attend(layer, AttentionCall(keys.repeat(1, 2, 1, 1), keys, keys, 0.2))
    runtime.close()


@pytest.mark.parametrize(
    "policy",
    [
        KVSwap(selected_tokens=2000, reuse_tokens=2000),
        KVSwap(selected_tokens=2000, reuse_tokens=0, group_tokens=5),
        KVSwap(selected_tokens=2000, reuse_tokens=2000, slot_bits=8),
    ],
    ids=["direct", "shared-staged", "in 8 bits"],
)
def test_slots_lend_a_prompt_their_memory(policy: SelectionPolicy) -> None:
    """No byte more is held, and the next decode step has them back, empty."""
    runtime = used_runtime(policy, {}, tokens=600)
    decoding = runtime.report()
    assert "prompt workspace" not in decoding.items
    assert runtime._setup is not None
    pool = runtime._setup.workspace._pools[-1]
    pool.tensor.fill_(1)
    step(runtime, 40)
    reading, blocks = runtime.report(), runtime._setup.workspace.blocks
    assert blocks is not None
    assert blocks.units * runtime.plan.group_tokens > 1200, "of large blocks"
    lent = reading.items["prompt workspace"]
    # Slots lend whole pages.
    unit = runtime.plan.unit_bytes
    needed = blocks.num_bytes(BATCH, blocks.units, unit, runtime._setup.store.padded_bytes)
    assert needed <= lent < needed + 4096 * len(runtime.layers) * BATCH
    held = decoding.items["slots and window"] - reading.items["slots and window"]
    assert held == lent - (reading.used_bytes - decoding.used_bytes)
    assert reading.peak_bytes <= reading.limit_bytes
    assert int((pool.tensor == 0).sum()) > 0.9 * min(held, pool.tensor.numel()), "given back"
    step(runtime, 1)
    assert runtime.report().items == decoding.items
    runtime.close()


def test_slots_lend_no_page_that_is_still_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that came in outside a pass may be on their way to the disk when one begins."""
    written, past, new = UnitRegion.write, 800, 40

    def late(*args: Any) -> int:
        time.sleep(0.03)
        return written(*args)

    monkeypatch.setattr(UnitRegion, "write", late)
    settings = RuntimeSettings(
        shape=SHAPE, policy=KVSwap(), limit_bytes=FULL_BYTES // 3, store="memory",
        max_tokens=MAX_TOKENS, exact=False, adapter=None, device=torch.device("cpu"),
        rotations=[ROTATION] * SHAPE.num_layers,
    )  # fmt: skip
    runtime = TieredRuntime(settings, BATCH)
    draw = torch.Generator().manual_seed(5)
    keys = torch.randn(BATCH, 4, past + new, 32, generator=draw).bfloat16()
    query = torch.randn(BATCH, 8, new, 32, generator=draw).bfloat16()
    for layer in range(SHAPE.num_layers):
        runtime.append(layer, keys[:, :, :past], keys[:, :, :past])
    mask = torch.ones(new, past + new, dtype=torch.bool).tril(past)
    expected = scaled_dot_product_attention(
        query.float(), keys.float(), keys.float(), attn_mask=mask, scale=0.2, enable_gqa=True
    ).transpose(1, 2)
    for layer in range(SHAPE.num_layers):
        fresh = keys[:, :, past:]
        out = runtime.attend(layer, AttentionCall(query, fresh, fresh, 0.2))
        assert (out.float() - expected).abs().max() < 0.02, layer
    runtime.close()
