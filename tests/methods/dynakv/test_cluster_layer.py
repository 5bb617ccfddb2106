"""Layers whose tokens lie by cluster: the same answers as in the order of tokens, byte for byte."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import CacheStateError, FetchError, StorageError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods import POLICIES
from penstock.methods.dynakv import layout as cluster_layout
from penstock.methods.dynakv.layer import ClusterLayer
from penstock.storage.memory_file import MemoryFile

SHAPE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
MAX_TOKENS = 400


def make(
    *, batch: int = 1, store: str = "memory", num_layers: int = 2, **options: Any
) -> TieredRuntime:
    """A cache that selects 48 tokens of clusters of 8."""
    wanted: dict[str, Any] = {
        "selected_tokens": 48, "window_tokens": 6, "sink_tokens": 2, "tokens_per_cluster": 8,
        "buffer_entries": 4,
    }  # fmt: skip
    config = RuntimeSettings(
        shape=replace(SHAPE, num_layers=num_layers), policy=POLICIES["dynakv"](**wanted | options),
        limit_bytes=None, store=store, max_tokens=MAX_TOKENS, exact=False, adapter=None,
        device=torch.device("cpu"),
    )  # fmt: skip
    return TieredRuntime(config, batch)


class Script:
    """The same random tokens for any cache, keys that move on as the sequence does."""

    def __init__(self, seed: int = 0, batch: int = 1) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._batch = batch
        self._centres = torch.randn(40, 16, generator=self._generator)
        self._done = 0

    def _draw(self, heads: int, tokens: int) -> Tensor:
        first = self._done // 12
        topics = torch.randint(first, first + 8, (self._batch, heads, tokens),
                               generator=self._generator) % 40  # fmt: skip
        noise = torch.randn(*topics.shape, 16, generator=self._generator)
        return self._centres[topics] + 0.3 * noise

    def run(self, runtime: TieredRuntime, tokens: int) -> list[Tensor]:
        """One forward pass of so many tokens through all layers; the outputs."""
        out = []
        for layer in range(runtime.settings.shape.num_layers):
            keys, values = self._draw(2, tokens), self._draw(2, tokens)
            call = AttentionCall(
                query=2 * self._draw(4, tokens), keys=keys, values=values, scaling=0.25
            )
            out.append(runtime.attend(layer, call))
        self._done += tokens
        return out

    def run_steps(self, runtime: TieredRuntime, steps: int) -> None:
        """So many decode steps."""
        for _ in range(steps):
            self.run(runtime, 1)


def layers(runtime: TieredRuntime) -> Iterator[ClusterLayer]:
    for layer in runtime.layers:
        assert isinstance(layer, ClusterLayer)
        layer.drain()
        yield layer


def test_clusters_on_disk_give_what_the_order_of_tokens_gives() -> None:
    laid_out, in_order = make(), make(layout="tokens")
    a, b = Script(), Script()
    for tokens in (90, *[1] * 40, 40, *[1] * 10):
        for one, other in zip(a.run(laid_out, tokens), b.run(in_order, tokens), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for here, there in zip(layers(laid_out), layers(in_order), strict=True):
        assert here.followed.clusters.num_splits == there.followed.clusters.num_splits > 0
        np.testing.assert_array_equal(here.followed.owners(), there.followed.owners())
    assert laid_out.stats.decode.reads < in_order.stats.decode.reads
    laid_out.close()
    in_order.close()


def check_bytes(runtime: TieredRuntime) -> None:
    """Every token of every row is where the layout says, with the bytes of the region in order."""
    for layer in layers(runtime):
        layout, followed = layer._layout, layer.followed
        assert layout is not None
        assert layout.live
        for row in range(layer.setup.plan.batch):
            expected = layer.follower.read_tokens(row, np.arange(followed.base, layer.length))
            seen = np.zeros(len(expected), dtype=np.int64)
            for cluster in range(followed.clusters.num_clusters):
                members = followed.clusters.members(row, cluster)
                if len(members):
                    found = layout.read(row, cluster)
                    np.testing.assert_array_equal(
                        found, expected[layout.in_file_order(row, members)]
                    )
                seen[members] += 1
                for entry in followed.clusters.buffered(row, cluster).tolist():
                    np.testing.assert_array_equal(layout.waiting(row, entry), expected[entry])
                    seen[entry] += 1
            assert (seen == 1).all()


@pytest.mark.parametrize(("store", "update"), [("auto", "adaptive"), ("memory", "static")])
def test_every_byte_is_where_the_layout_says(store: str, update: str) -> None:
    runtime, script = make(batch=2, store=store, update=update), Script(batch=2)
    script.run(runtime, 60)
    for step in range(31 if store == "memory" else 16):
        script.run(runtime, 1)
        if step % 15 == 0:
            check_bytes(runtime)
    script.run(runtime, 33)  # another prompt: everything is clustered anew
    script.run(runtime, 1)
    check_bytes(runtime)
    runtime.crop(100)
    script.run(runtime, 1)
    check_bytes(runtime)
    runtime.close()


def test_entries_that_wait_are_bounded() -> None:
    runtime, script = make(threshold_factor=0.0), Script()
    script.run(runtime, 60)
    for _ in range(60):
        script.run(runtime, 1)
        for layer in layers(runtime):
            assert layer.followed.clusters.entries.num_buffered < 4
            assert layer._layout is not None
            assert len(layer._layout._waiting) == layer.followed.clusters.entries.num_buffered
    assert any(layer.followed.clusters.num_loaded for layer in layers(runtime))
    runtime.close()


def test_reordered_rows_go_on_in_the_order_of_tokens() -> None:
    """Beams: both caches give the same, and the layout comes back with the next prompt."""
    laid_out, in_order = make(batch=3), make(batch=3, layout="tokens")
    a, b = Script(batch=3), Script(batch=3)
    orders = {5: [1, 0, 2], 9: [0, 0, 1], 20: [2, 1, 0]}
    for step, tokens in enumerate((70, *[1] * 24, 20, *[1] * 4)):
        if step in orders:
            for runtime in (laid_out, in_order):
                runtime.select_rows(torch.tensor(orders[step]))
        for one, other in zip(a.run(laid_out, tokens), b.run(in_order, tokens), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    check_bytes(laid_out)
    laid_out.close()
    in_order.close()


def test_a_failed_write_is_told_and_a_reset_cures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, script = make(), Script()
    script.run(runtime, 60)
    for _ in range(4):
        script.run(runtime, 1)
    broken = MemoryFile.write_at

    def fails(self: MemoryFile, offset: int, data: Any) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(MemoryFile, "write_at", fails)
    with pytest.raises(StorageError, match="the disk is gone"):
        script.run_steps(runtime, 8)
    monkeypatch.setattr(MemoryFile, "write_at", broken)
    with pytest.raises(CacheStateError, match=r"reset\(\)"):
        script.run(runtime, 1)
    runtime.reset()
    script.run(runtime, 60)
    for _ in range(4):
        script.run(runtime, 1)
    check_bytes(runtime)
    runtime.close()


def test_the_plan_is_the_memory_that_is_used() -> None:
    runtime = make()
    Script().run(runtime, 60)
    assert runtime.report().used_bytes == runtime.plan.total_bytes
    runtime.close()


@pytest.mark.parametrize(("reuse", "num_layers"), [(96, 2), (None, 3)])
def test_a_virtual_cache_gives_the_same_from_two_pools(reuse: int | None, num_layers: int) -> None:
    """As a cache of as many slots for every layer gives."""
    virtual, own = (
        make(virtual=on, reuse_tokens=reuse, num_layers=num_layers) for on in (True, False)
    )
    a, b = Script(), Script()
    for tokens in (90, *[1] * 12, 30, *[1] * 5):
        for one, other in zip(a.run(virtual, tokens), b.run(own, tokens), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert virtual.plan.shared_pools
    check_bytes(virtual)
    hits = [runtime.stats.decode.units_hit for runtime in (virtual, own)]
    assert 0 < hits[0] <= hits[1]
    assert (hits[0] == hits[1]) == (num_layers % 2 == 0), "an odd first layer shares with the last"
    assert num_layers == 2 or virtual.plan.pool_bytes < own.plan.pool_bytes
    virtual.crop(80)
    for _ in range(5):
        a.run(virtual, 1)
    check_bytes(virtual)
    for runtime in (virtual, own):
        runtime.close()


def test_rounds_behind_the_first_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small buffer reads the same in more rounds, and says so."""
    plain, script = make(), Script()
    for tokens in (90, *[1] * 20):
        script.run(plain, tokens)
    wanted = plain.stats.decode
    in_rounds, script = make(), Script()
    script.run(in_rounds, 90)

    def small(padded: np.ndarray[Any, Any], room: int) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in range(len(padded))]

    monkeypatch.setattr(cluster_layout, "_rounds", small)
    for _ in range(20):
        script.run(in_rounds, 1)
    found = in_rounds.stats.decode
    assert found.units_hit == wanted.units_hit
    assert found.read_bytes >= wanted.read_bytes > 0
    assert found.reads > wanted.reads
    check_bytes(in_rounds)


def test_a_crop_forgives_what_could_not_be_read_behind_the_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its clusters are made anew anyway; the crop that an error asks for is not refused again."""
    runtime, script = make(), Script()
    script.run(runtime, 90)
    script.run_steps(runtime, 3)

    def refuse(*_: Any) -> None:
        raise FetchError("not read on purpose")

    for layer in layers(runtime):
        monkeypatch.setattr(layer.follower, "follow", refuse)
    with pytest.raises(FetchError, match="on purpose"):
        script.run_steps(runtime, 2)  # which of them hears of it is the threads'
    monkeypatch.undo()
    runtime.crop(93)
    assert not runtime.is_torn
    script.run_steps(runtime, 5)
    check_bytes(runtime)
    runtime.close()
