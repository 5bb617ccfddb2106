"""LouisKV through the engine: what it reads, where it cuts, and lives against a naive twin."""

import random
from typing import Any

import pytest
import torch

from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods.louiskv.policy import SUMMARIES, LouisKV


def test_a_step_without_retrieval_reads_nothing() -> None:
    """Through the engine: reads stand still, and every unit wanted is there."""
    shape = KVShape(
        num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    config = RuntimeSettings(
        shape=shape, policy=LouisKV(tau=0.7, selected_tokens=20, window_tokens=4, sink_tokens=2),
        limit_bytes=None, store="memory", max_tokens=128, exact=False, adapter=None,
        device=torch.device("cpu"),
    )  # fmt: skip
    runtime = TieredRuntime(config, 1)
    torch.manual_seed(0)
    try:
        query = torch.randn(1, 4, 90, 16)
        keys, values = torch.randn(2, 1, 2, 90, 16)
        runtime.attend(0, AttentionCall(query, keys, values, 0.25))
        found, asked = [], []
        for sign in (1, 1, 1, -1, -1):
            new = torch.randn(2, 1, 2, 1, 16)
            runtime.attend(0, AttentionCall(sign * query[:, :, :1], new[0], new[1], 0.25))
            phase = runtime.stats.decode
            found.append((phase.read_bytes, phase.units_wanted - phase.units_hit))
            asked.append((phase.units_wanted, phase.units_reused))
        layer: Any = runtime.layers[0]
        counters = layer.index.counters
    finally:
        runtime.close()
    assert found[0] == found[1] == found[2]
    assert found[3] == found[4]
    assert found[0][0] < found[3][0]
    assert (counters.retrievals, counters.reuse_steps) == ((2,), (3,))
    assert counters.fetched_bytes == found[4][1] * shape.token_bytes // 2
    assert found[0][1] == 2 * 20
    assert asked == [(40, 0), (40, 40), (40, 80), (80, 80), (80, 120)]


def test_boundaries_are_cut_while_everything_is_still_attended_to() -> None:
    """A short prompt, then an answer that outgrows what is attended to anyway: its segments are
    those of the boundaries, not one for all that came before the first selection."""
    shape = KVShape(
        num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    for beside in (True, False):
        config = RuntimeSettings(
            shape=shape, policy=LouisKV(
                selected_tokens=8, window_tokens=4, sink_tokens=2, boundaries="stride:5",
                beside=beside,
            ),
            limit_bytes=None, store="memory", max_tokens=128, exact=False, adapter=None,
            device=torch.device("cpu"),
        )  # fmt: skip
        runtime = TieredRuntime(config, 1)
        try:
            for count in (3, *[1] * 27):
                query = torch.randn(1, 4, count, 16)
                keys, values = torch.randn(2, 1, 2, count, 16)
                runtime.attend(0, AttentionCall(query, keys, values, 0.25))
            layer: Any = runtime.layers[0]
            table = layer.index._pool._segments
            starts = table.starts[0, : table.columns]
        finally:
            runtime.close()
        assert starts.tolist() == [0, 3, 8, 13, 18, 23, 28]


def test_clusters_made_at_the_first_step_are_those_made_beside_the_prefill() -> None:
    """Through the engine: the same selections, and no block of keys is held between steps."""
    shape = KVShape(
        num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    outs, held = [], []
    for beside in (True, False):
        config = RuntimeSettings(
            shape=shape, policy=LouisKV(
                selected_tokens=20, window_tokens=4, sink_tokens=2, cluster_tokens=4,
                block_tokens=32, beside=beside, summary="mean",
            ),
            limit_bytes=None, store="memory", max_tokens=256, exact=False, adapter=None,
            device=torch.device("cpu"),
        )  # fmt: skip
        runtime = TieredRuntime(config, 2)
        torch.manual_seed(0)
        try:
            for count in (50, 60, *[1] * 9):
                for layer in range(2):
                    query = torch.randn(2, 4, count, 16)
                    keys, values = torch.randn(2, 2, 2, count, 16)
                    out = runtime.attend(layer, AttentionCall(query, keys, values, 0.25))
            outs.append(out)
            held.append(runtime.plan.index_bytes)
            # Another prompt: what was generated is clustered with it, where that is done later.
            for count in (40, 1, 1):
                for layer in range(2):
                    query = torch.randn(2, 4, count, 16)
                    keys, values = torch.randn(2, 2, 2, count, 16)
                    out = runtime.attend(layer, AttentionCall(query, keys, values, 0.25))
            assert out.isfinite().all()
            layers: Any = runtime.layers
            assert all((layer.index._blocks._halves is None) != beside for layer in layers)
            counts = [layer.index.counters.retrievals for layer in layers]
            assert all(11 >= retrieved > 9 for count in counts for retrieved in count)
        finally:
            runtime.close()
    assert torch.equal(*outs)
    assert held[1] < held[0]


@pytest.mark.parametrize("seed", range(5))
def test_units_partition_the_past_in_random_lives(seed: int) -> None:
    """Prompts, steps, crops and reorders: what may be selected is held by exactly one unit."""
    rnd = random.Random(seed)
    shape = KVShape(
        num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    policy = LouisKV(
        selected_tokens=rnd.choice([10, 20]), window_tokens=rnd.choice([0, 4, 9]),
        sink_tokens=rnd.choice([0, 2]), tau=rnd.choice([None, -0.5, 0.0, 0.5]),
        boundaries=rnd.choice(["adaptive", "stride:3", "every"]),
        units=rnd.choice(["clusters+segments", "pages"]), cluster_tokens=rnd.choice([2, 4, 16]),
        block_tokens=rnd.choice([32, 64, None]), beside=rnd.choice([True, False]),
        summary=rnd.choice(SUMMARIES),
    )  # fmt: skip
    config = RuntimeSettings(
        shape=shape, policy=policy, limit_bytes=None, store="memory", max_tokens=256, exact=False,
        adapter=None, device=torch.device("cpu"),
    )  # fmt: skip
    runtime = TieredRuntime(config, 2)
    generator = torch.Generator().manual_seed(seed)

    def take(batch: int, count: int) -> None:
        query = torch.randn(batch, 4, count, 16, generator=generator)
        keys, values = torch.randn(2, batch, 2, count, 16, generator=generator)
        assert runtime.attend(0, AttentionCall(query, keys, values, 0.25)).isfinite().all()
        layer: Any = runtime.layers[0]
        end = layer.window.first_window_unit(layer.length)
        if count > 1 or end <= layer._first_unit.min():
            return
        places, sizes = layer.index._pool.units(layer._first_unit, end)
        for row, first in enumerate(layer._first_unit):
            held = [
                int(token)
                for place, size in zip(places[row], sizes[row], strict=True)
                for token in layer.index._pool.members[row, place : place + size]
            ]
            assert sorted(held) == list(range(first, end))

    try:
        for batch, prompt, steps, crop in ((2, 70, 8, 31), (2, 21, 14, 50), (2, 150, 12, 0)):
            take(batch, prompt)
            for _ in range(steps):
                take(batch, 1)
            runtime.select_rows(torch.tensor([1, 0]))
            take(batch, 1)
            runtime.crop(crop)
    finally:
        runtime.close()
