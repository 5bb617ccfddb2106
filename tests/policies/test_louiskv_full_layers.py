"""LouisKV's first layers kept whole: exact, booked, and the others retrieve all the same."""

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.kernels.reference import attention_reference
from penstock.policies.louiskv import LouisKV
from penstock.runtime.attention_call import AttentionCall
from penstock.runtime.runtime_config import RuntimeConfig
from penstock.runtime.tiered_runtime import TieredRuntime


def test_the_first_layers_can_stay_whole() -> None:
    """Layer 0 is exact at any budget, its memory is booked, and layer 1 still retrieves."""
    shape = KVShape(
        num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    used = []
    for whole in (0, 1):
        policy = LouisKV(selected_tokens=10, window_tokens=4, sink_tokens=2, full_layers=whole)
        config = RuntimeConfig(
            shape=shape, policy=policy, limit_bytes=None, store="memory", max_tokens=128,
            exact=False, adapter=None, device=torch.device("cpu"),
        )  # fmt: skip
        runtime = TieredRuntime(config, 1)
        try:
            random = torch.Generator().manual_seed(0)
            past = torch.zeros(2, 1, 2, 0, 16)
            for count in (60, 1, 1, 1):
                query = torch.randn(1, 4, count, 16, generator=random)
                new = torch.randn(2, 1, 2, count, 16, generator=random)
                past = torch.cat([past, new], dim=3)
                call = AttentionCall(query, new[0], new[1], 0.25)
                outs = [runtime.attend(layer, call).transpose(1, 2) for layer in range(2)]
            exact, _ = attention_reference(query, past[0], past[1], scaling=0.25)
            assert [bool((out - exact).abs().max() < 1e-5) for out in outs] == [whole == 1, False]
            report = runtime.report()
            assert report.used_bytes <= report.limit_bytes
            used.append(report.items["slots and window"])
        finally:
            runtime.close()
    # 16 places of two KV heads in a layer before, and all 128 tokens of both instead.
    assert used[1] - used[0] == (128 - 17) * 2 * 128


def test_whole_layers_share_the_life_of_the_others() -> None:
    """Steps, a reorder, a larger batch, a crop and a reset: the whole layer stays exact."""
    shape = KVShape(
        num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    config = RuntimeConfig(
        shape=shape, policy=LouisKV(
            selected_tokens=10, window_tokens=4, sink_tokens=2, full_layers=1
        ),
        limit_bytes=None, store="memory", max_tokens=128, exact=False, adapter=None,
        device=torch.device("cpu"),
    )  # fmt: skip
    runtime = TieredRuntime(config, 2)
    random = torch.Generator().manual_seed(0)
    past = torch.zeros(2, 2, 2, 0, 16)

    def take(count: int) -> None:
        nonlocal past
        batch = past.shape[1]
        query = torch.randn(batch, 4, count, 16, generator=random)
        new = torch.randn(2, batch, 2, count, 16, generator=random)
        past = torch.cat([past, new], dim=3)
        call = AttentionCall(query, new[0], new[1], 0.25)
        whole, selected = (runtime.attend(layer, call).transpose(1, 2) for layer in range(2))
        exact, _ = attention_reference(query, past[0], past[1], scaling=0.25)
        if count == 1:
            assert (whole - exact).abs().max() < 1e-5
            assert (selected - exact).abs().max() > 1e-3
        report = runtime.report()
        assert report.used_bytes <= report.limit_bytes

    try:
        for count in (60, 1, 1):
            take(count)
        for rows in ([1, 0], [0, 1, 1]):
            runtime.select_rows(torch.tensor(rows))
            past = past[:, rows]
            take(1)
        runtime.crop(50)
        past = past[:, :, :, :50]
        take(1)
        runtime.reset()
        past = past[:, :, :, :0]
        for count in (40, 1):
            take(count)
    finally:
        runtime.close()


def test_refuses_a_negative_number() -> None:
    with pytest.raises(ConfigError, match="full_layers=-1"):
        LouisKV(full_layers=-1)


def test_refuses_to_keep_all_layers_whole() -> None:
    shape = KVShape(
        num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    config = RuntimeConfig(
        shape=shape, policy=LouisKV(selected_tokens=10, full_layers=2), limit_bytes=None,
        store="memory", max_tokens=128, exact=False, adapter=None, device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="leaves none of 2 layers"):
        TieredRuntime(config, 1)
