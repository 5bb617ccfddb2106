"""Adapters: fitted as an SVD fits, saved whole, and refused by models that they do not fit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file

from penstock import KVSwap, TieredCache
from penstock.core.errors import AdapterError
from penstock.engine.adapter import LayerAdapter, LowRankAdapter, fit_basis, fit_layer
from penstock.models.cache_argument import cache_argument
from penstock.models.calibrate import calibrate
from penstock.testing.tiny_models import tiny_model

JOINT, RANK = 12, 5


def fitted(seed: int = 0) -> tuple[LayerAdapter, torch.Tensor]:
    torch.manual_seed(seed)
    keys = torch.randn(300, JOINT) @ torch.randn(JOINT, JOINT) + torch.randn(JOINT)
    return fit_layer(keys, RANK), keys


@pytest.fixture
def adapter() -> LowRankAdapter:
    return LowRankAdapter([fitted(i)[0] for i in range(3)], fingerprint="f" * 32, tokens=300)


def test_the_basis_is_that_of_an_svd() -> None:
    layer, keys = fitted()
    _, _, right = torch.linalg.svd(keys.double(), full_matrices=False)
    expected = right[:RANK].T.float()
    signs = (layer.basis * expected).sum(dim=0).sign()
    assert torch.allclose(layer.basis * signs, expected, atol=1e-4)
    assert torch.allclose(layer.basis.T @ layer.basis, torch.eye(RANK), atol=1e-5)
    components = keys @ layer.basis
    assert torch.allclose(layer.peak, components.abs().amax(dim=0))


def test_truncation_keeps_the_strongest() -> None:
    layer, keys = fitted()
    small = layer.truncated(2)
    assert (small.rank, small.peak.shape) == (2, (2,))
    moments = (keys @ layer.basis).square().mean(dim=0)
    assert torch.equal(moments.argsort(descending=True), torch.arange(RANK))
    assert torch.equal(small.basis, layer.basis[:, :2])


def test_the_moment_of_any_number_of_tokens_will_do() -> None:
    layer, keys = fitted()
    moment = torch.zeros(JOINT, JOINT, dtype=torch.float64)
    for part in (keys[:70], keys[70:]):
        moment += part.double().T @ part.double()
    basis = fit_basis(moment, RANK)
    assert torch.allclose((basis * layer.basis).sum(dim=0).abs(), torch.ones(RANK), atol=1e-4)


def test_save_and_load(adapter: LowRankAdapter, tmp_path: Path) -> None:
    adapter.save(tmp_path / "adapter.safetensors")
    loaded = LowRankAdapter.load(tmp_path / "adapter.safetensors")
    assert (loaded.fingerprint, loaded.tokens, loaded.rank) == ("f" * 32, 300, RANK)
    for mine, theirs in zip(adapter.layers, loaded.layers, strict=True):
        assert torch.equal(mine.basis, theirs.basis)
        assert torch.equal(mine.peak, theirs.peak)


ERROR = ((0.9, 0.9, 0.0), (0.4, 0.1, 0.1), (0.4, 0.0, 0.0))


@pytest.fixture
def measured() -> LowRankAdapter:
    layers = [LayerAdapter(torch.eye(30)[:, :24], torch.ones(24)) for _ in ERROR]
    return LowRankAdapter(layers, fingerprint="f" * 32, tokens=300, selection_cost=ERROR)


def test_layers_share_what_calibration_measured(measured: LowRankAdapter, tmp_path: Path) -> None:
    measured.save(tmp_path / "a")
    loaded = LowRankAdapter.load(tmp_path / "a")
    assert torch.tensor(loaded.selection_cost).allclose(torch.tensor(ERROR))
    layers = loaded.shared_layers()
    assert [layer.rank_at(16) for layer in layers] == [24, 8, 16]
    assert [layer.rank_at(7) for layer in layers] == [7, 7, 7]
    assert [layer.rank_at(24) for layer in layers] == [24, 24, 24]
    assert loaded.widest_ranks()[15] == 24
    assert len(loaded.widest_ranks()) == 24
    assert [layer.truncated(9).rank for layer in layers] == [9, 9, 9]


def test_layers_are_alike_where_nothing_was_measured(adapter: LowRankAdapter) -> None:
    assert [layer.rank_at(4) for layer in adapter.shared_layers()] == [4, 4, 4]
    assert adapter.widest_ranks() == ()


@pytest.mark.parametrize(
    "wrong", [ERROR[:2], tuple(row[:2] for row in ERROR), ((math.nan, 0.0, 0.0), *ERROR[1:])]
)
def test_a_wrong_measurement_is_refused(
    wrong: tuple[tuple[float, ...], ...], measured: LowRankAdapter, tmp_path: Path
) -> None:
    replace(measured, selection_cost=wrong).save(tmp_path / "a")
    with pytest.raises(AdapterError, match="error of 3 layers at 3 ranks"):
        LowRankAdapter.load(tmp_path / "a")


def test_truncated_adapters_can_be_saved(adapter: LowRankAdapter, tmp_path: Path) -> None:
    small = LowRankAdapter([layer.truncated(2) for layer in adapter.layers], "f", 1)
    small.save(tmp_path / "a")
    assert LowRankAdapter.load(tmp_path / "a").rank == 2


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="cannot read the adapter"):
        LowRankAdapter.load(tmp_path / "nothing")


def test_garbage(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"not safetensors at all")
    with pytest.raises(AdapterError, match="cannot read the adapter"):
        LowRankAdapter.load(tmp_path / "a")


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        LowRankAdapter.load(tmp_path)


def test_other_safetensors(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "a")
    with pytest.raises(AdapterError, match="not a Penstock adapter"):
        LowRankAdapter.load(tmp_path / "a")


@pytest.mark.parametrize("missing", ["layers.2.peak", "tokens", "layers", "fingerprint"])
def test_missing_parts(missing: str, adapter: LowRankAdapter, tmp_path: Path) -> None:
    tensors = {
        f"layers.{i}.{part}": getattr(layer, part)
        for i, layer in enumerate(adapter.layers)
        for part in ("basis", "peak")
    }
    tensors["prediction_cosine"] = torch.ones(3)
    metadata = {"format": "penstock-adapter-1", "fingerprint": "f", "tokens": "1", "layers": "3"}
    save_file(tensors, tmp_path / "a", metadata=metadata)
    assert LowRankAdapter.load(tmp_path / "a").tokens == 1
    tensors.pop(missing, None)
    metadata.pop(missing, None)
    save_file(tensors, tmp_path / "a", metadata=metadata)
    with pytest.raises(AdapterError, match="cannot read the adapter"):
        LowRankAdapter.load(tmp_path / "a")


def test_another_model_is_refused(adapter: LowRankAdapter) -> None:
    adapter.check("f" * 32, num_layers=3, joint_dim=JOINT)
    with pytest.raises(AdapterError, match=r"another model \(fingerprint ffffffffffff, this .* gg"):
        adapter.check("g" * 32, num_layers=3, joint_dim=JOINT)
    for layers, width in ((4, JOINT), (3, JOINT + 1)):
        with pytest.raises(AdapterError, match="3 layers of key width"):
            adapter.check("f" * 32, num_layers=layers, joint_dim=width)


def test_calibration_measures_what_layers_need() -> None:
    model = tiny_model("llama")
    torch.manual_seed(3)
    text = torch.randint(3, 120, (600,))
    short = calibrate(model, [text[:500]], rank=16)
    made = calibrate(model, [text, text[:400]], rank=16)
    assert short.selection_cost == ()
    assert len(made.selection_cost) == len(made.layers)
    assert all(len(row) == 2 and min(row) >= 0 for row in made.selection_cost)
    assert max(row[0] for row in made.selection_cost) > 0


@pytest.mark.parametrize("layer_ranks", ["measured", "equal"])
def test_an_index_for_each_layer(layer_ranks: Literal["measured", "equal"]) -> None:
    model = tiny_model("llama")
    made = calibrate(model, [torch.arange(3, 103)], rank=16, window_tokens=64)
    layers = len(made.layers)
    error = tuple((0.9, 0.0) if i == 1 else (0.1, 0.1) for i in range(layers))
    made = replace(made, selection_cost=error)
    policy = KVSwap(
        window_tokens=8, selected_tokens=16, rank=11, index_bits=8, layer_ranks=layer_ranks
    )
    with TieredCache(model, policy, store="memory", max_tokens=400, adapter=made) as cache:
        model.generate(torch.arange(3, 103)[None], **cache_argument(model, cache), max_new_tokens=2)
        runtime: Any = cache.tiers
        ranks = [layer.index.rank for layer in runtime.layers]
    expected = {"equal": [11, 11, 11], "measured": [9, 16, 8]}[layer_ranks]
    assert ranks == expected


def test_fewer_components_than_the_policy_wants_are_refused() -> None:
    model = tiny_model("llama")
    made = calibrate(model, [torch.arange(3, 103)], rank=8, window_tokens=64)
    few = KVSwap(window_tokens=8, selected_tokens=16, rank=8)
    with TieredCache(model, few, store="memory", max_tokens=100, adapter=made) as cache:
        assert isinstance(cache.policy, KVSwap)
        assert cache.policy.rank == 8
    with pytest.raises(AdapterError, match=r"8 components a token, .* wants 9; give rank=8 or"):
        TieredCache(model, replace(few, rank=9), store="memory", max_tokens=100, adapter=made)
    everything = KVSwap(rank=9)
    with TieredCache(model, everything, store="memory", max_tokens=100, adapter=made) as cache:
        assert cache.plan.is_resident, "no index, no components"
