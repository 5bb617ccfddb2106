"""FusedFetch: taken where everything is of its kind, and then the same as step by step."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.errors import FetchError, StorageError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.engine.tiers.fifo import FIFO
from penstock.kernels.native import compiled
from penstock.methods import KVSwap, SelectionPolicy
from penstock.storage.native_aio import AioQueue

SHAPE = KVShape(num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float32)
POLICY = KVSwap(
    group_tokens=8, window_tokens=8, rank=16, index_bits=8, selected_tokens=64, reuse_tokens=128
)
needs = pytest.mark.skipif(compiled.kernel("fetch_groups") is None, reason="no VNNI here")


def open_runtime(folder: Path, policy: SelectionPolicy = POLICY, **more: Any) -> TieredRuntime:
    config = RuntimeSettings(
        shape=SHAPE, policy=policy, limit_bytes=1 << 21, store=str(folder), max_tokens=2000,
        exact=False, adapter=None, device=torch.device("cpu"),
    )  # fmt: skip
    return TieredRuntime(replace(config, **more), 1)


def step(runtime: TieredRuntime, count: int, seed: int, batch: int = 1) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    out = []
    for layer in range(SHAPE.num_layers):
        dim = runtime.settings.shape.head_dim
        keys, values = torch.randn(2, batch, 2, count, dim, generator=made)
        query = torch.randn(batch, 4, count, dim, generator=made)
        if count == 1 and runtime.layers:
            runtime.begin_fetch(layer, query[:, :, 0])
        out.append(runtime.attend(layer, AttentionCall(query, keys, values, 0.2)))
    return out


def run(runtime: TieredRuntime, batch: int = 1) -> tuple[list[torch.Tensor], int, int]:
    out = step(runtime, 500, 0, batch)
    for seed in range(1, 20):
        out += step(runtime, 1, seed, batch)
    decode = runtime.stats.decode
    return out, decode.units_hit, decode.read_bytes


def is_fused(runtime: TieredRuntime) -> bool:
    layers = [layer for layer in runtime.layers if isinstance(layer, RetrievalLayer)]
    assert len(layers) == SHAPE.num_layers
    return all(layer._fused._prepared is not None for layer in layers)


def require_direct(runtime: TieredRuntime) -> None:
    if "direct I/O" not in runtime.describe_store():
        pytest.skip("no direct I/O on this file system")


@needs
@pytest.mark.parametrize(
    ("batch", "changes"),
    [
        (1, {}),
        (3, {"keep": 2.0}),
        (3, {"keep": 2.0, "slot_bits": 8}),
        (2, {"keep": 2.0, "slot_bits": 8, "shared_every": 2}),
        (1, {"group_tokens": 1, "selected_tokens": 100, "slot_bits": 8}),  # more than land at once
        (2, {"group_tokens": 3}),  # with another shape, in units that are padded to sectors
    ],
    ids=str,
)
def test_as_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, changes: dict[str, Any]
) -> None:
    policy = replace(POLICY, **changes)
    size = {"shape": replace(SHAPE, head_dim=16 if policy.group_tokens == 3 else 32)}
    runtime = open_runtime(tmp_path, policy, limit_bytes=batch << 21, **size)
    require_direct(runtime)
    plan = runtime.plan
    assert plan.is_coded == (policy.slot_bits == 8)
    assert (plan.staging_slots > 0) == (plan.is_coded or policy.group_tokens == 3)
    fused = run(runtime, batch)
    assert is_fused(runtime)
    assert fused[1] > 0
    runtime.close()
    monkeypatch.setattr(RetrievalLayer, "may_fuse", False)
    runtime = open_runtime(tmp_path, policy, limit_bytes=batch << 21, **size)
    stepwise = run(runtime, batch)
    assert not is_fused(runtime)
    runtime.close()
    assert fused[1:] == stepwise[1:]
    for one, other in zip(fused[0], stepwise[0], strict=True):
        assert torch.equal(one, other)


@needs
def test_a_queue_with_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected_runtime = open_runtime(tmp_path)
    require_direct(expected_runtime)
    expected = run(expected_runtime)
    expected_runtime.close()
    before = AioQueue.__init__
    monkeypatch.setattr(AioQueue, "__init__", lambda self, *_: before(self, 3))
    runtime = open_runtime(tmp_path)
    found = run(runtime)
    assert is_fused(runtime)
    runtime.close()
    assert found[1:] == expected[1:]
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(one, other)


@needs
def test_rows_that_are_reordered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outs = []
    for may_fuse in (True, False):
        monkeypatch.setattr(RetrievalLayer, "may_fuse", may_fuse)
        runtime = open_runtime(tmp_path, limit_bytes=1 << 23)
        require_direct(runtime)
        out = step(runtime, 500, 0, 2)
        for seed in range(1, 12):
            out += step(runtime, 1, seed, 2)
            if seed % 3 == 0:  # both rows share units then, which are read in no file's order
                runtime.select_rows(torch.tensor([1, 1] if seed % 2 else [1, 0]))
        assert is_fused(runtime) is may_fuse
        runtime.close()
        outs.append(out)
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)


class _Chooser(KVSwap):
    def select(self, *args: Any) -> Any:
        return super().select(*args)


class _OtherFIFO(FIFO):
    pass


class _Replacer(KVSwap):
    def make_replacement(self, batch: int, num_slots: int) -> FIFO:
        return _OtherFIFO(batch, num_slots)


FIELDS = {field.name: getattr(POLICY, field.name) for field in fields(POLICY)}


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        (_Chooser(**FIELDS), {}),
        (_Replacer(**FIELDS), {}),
        (replace(POLICY, head_reduction="sum"), {}),
        (replace(POLICY, index_bits=16), {}),
        (POLICY, {"store": "nvme"}),
    ],
    ids=["selects", "replaces", "sums", "16 bits", "simulated"],
)
def test_others_go_step_by_step(
    tmp_path: Path, policy: SelectionPolicy, more: dict[str, Any]
) -> None:
    runtime = open_runtime(tmp_path, policy, **more)
    run(runtime)
    assert not is_fused(runtime)
    runtime.close()


@needs
def test_failed_reads_and_a_closed_store(tmp_path: Path) -> None:
    runtime = open_runtime(tmp_path)
    require_direct(runtime)
    step(runtime, 900, 0)
    step(runtime, 1, 1)
    assert is_fused(runtime)
    layer = runtime.layers[0]
    assert isinstance(layer, RetrievalLayer)
    # Units far behind the end of the file: nothing can be read there.
    layer.setup.units.table[:, :100] += 1 << 30
    with pytest.raises(FetchError, match="gave only 0"):
        step(runtime, 1, 2)
    layer.setup.units.table[:, :100] -= 1 << 30
    runtime.crop(901)
    step(runtime, 1, 3)
    layer.transfer.region.file.close()
    with pytest.raises(StorageError):
        step(runtime, 1, 4)
    runtime.close()
