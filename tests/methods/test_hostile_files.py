"""Adapters and indexes out of files that somebody has changed: a typed error, or a right result."""

import contextlib
import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.core.errors import AdapterError, ConfigError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LowRankAdapter, fit_layer
from penstock.methods.kvswap.index import BLOCK_GROUPS, LowRankIndex

RANK, UNITS = 16, BLOCK_GROUPS + 40
SHAPE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
METADATA = {"format": "penstock-adapter-1", "fingerprint": "f", "tokens": "9", "layers": "2"}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "short": lambda t: t[:-1],
    "long": lambda t: torch.cat([t, t[:1]]),
    "empty": lambda t: t[:0],
    "one number": lambda t: t.flatten()[:1],
    "a scalar": lambda t: t.flatten()[0],
    "another rank": lambda t: t.unsqueeze(0),
    "flat": lambda t: t.flatten(),
    "narrow": lambda t: t[..., :-1],
    "wide": lambda t: torch.cat([t, t[..., :1]], dim=-1),
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
    "integers": lambda t: t.to(torch.int64),
    "bytes": lambda t: t.to(torch.uint8),
    "booleans": lambda t: t != 0,
    "not a number": lambda t: _with(t, float("nan")),
    "infinite": lambda t: _with(t, float("inf")),
    "minus infinite": lambda t: _with(t, float("-inf")),
    "negative": lambda t: -t.abs() if t.is_floating_point() else t,
    "huge": lambda t: t * 1e30 if t.is_floating_point() else t,
    "tiny": lambda t: t * 1e-42 if t.is_floating_point() else t,
    "zero": lambda t: t * 0,
}


def _with(tensor: Tensor, number: float) -> Tensor:
    """One number of a tensor replaced; integers are as they were."""
    changed = tensor.clone()
    if changed.is_floating_point():
        changed.view(-1)[-1] = number
    return changed


@pytest.fixture(scope="module")
def adapter() -> LowRankAdapter:
    torch.manual_seed(3)
    layers = [fit_layer(torch.randn(200, SHAPE.joint_dim), RANK) for _ in range(2)]
    costs = ((0.5, 0.1), (0.4, 0.2))
    return LowRankAdapter(layers, "f", 9, prediction_cosine=(0.0, 0.5), selection_cost=costs)


@pytest.fixture(scope="module")
def tensors(adapter: LowRankAdapter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    path = tmp_path_factory.mktemp("whole") / "a"
    adapter.save(path)
    return load_file(path)


def make_index(bits: int, adapter: LowRankAdapter | None, batch: int = 1) -> LowRankIndex:
    return LowRankIndex(
        SHAPE, batch=batch, max_units=UNITS, group_tokens=2, rank=RANK, bits=bits,
        head_reduction="softmax", scaling=0.25, device=torch.device("cpu"),
        adapter=None if adapter is None else adapter.layers[0],
    )  # fmt: skip


def scores_and_best(index: LowRankIndex) -> tuple[Tensor, list[list[int]]]:
    """Everything that reads a basis, steps and codes."""
    torch.manual_seed(7)
    query = torch.randn(1, SHAPE.num_query_heads, SHAPE.head_dim)
    index.append(torch.randn(1, 2, SHAPE.num_kv_heads, SHAPE.head_dim), 2 * (UNITS - 1))
    best = index.best_units(query, 0, UNITS, 5)
    return index.score(query, UNITS), [] if best is None else best.tolist()


def loaded_or_refused(path: Path) -> LowRankAdapter | None:
    """What a model of `SHAPE` would go on with."""
    try:
        found = LowRankAdapter.load(path)
        found.check("f", SHAPE.num_layers, SHAPE.joint_dim)
    except AdapterError:
        return None
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "name",
    ["layers.0.basis", "layers.1.peak", "layers.0.peak", "prediction_cosine", "selection_cost"],
)
def test_no_changed_adapter_reaches_a_kernel(
    name: str, change: str, tensors: Mapping[str, Tensor], tmp_path: Path
) -> None:
    changed = {**tensors, name: CHANGES[change](tensors[name]).contiguous()}
    save_file(changed, tmp_path / "a", metadata=METADATA)
    found = loaded_or_refused(tmp_path / "a")
    if found is None:
        return
    layers = found.shared_layers()
    assert len(found.prediction_cosine) in {0, 2}
    assert all(0 < layer.rank_at(found.rank) <= layer.rank for layer in layers)
    if found.rank != RANK:
        return  # a policy of this rank refuses it
    for bits in (16, 8, 4):
        scores, best = scores_and_best(make_index(bits, found))
        assert scores.isfinite().all()
        assert all(0 <= unit < UNITS for row in best for unit in row)


@pytest.mark.parametrize("name", ["layers.0.basis", "layers.1.peak"])
@pytest.mark.parametrize(
    "change",
    ["short", "empty", "a scalar", "another rank", "integers", "not a number", "infinite", "huge"],
)
def test_these_changes_are_refused_by_name(
    name: str, change: str, tensors: Mapping[str, Tensor], tmp_path: Path
) -> None:
    changed = {**tensors, name: CHANGES[change](tensors[name]).contiguous()}
    save_file(changed, tmp_path / "a", metadata=METADATA)
    with pytest.raises(AdapterError, match="penstock calibrate"):
        LowRankAdapter.load(tmp_path / "a").check("f", SHAPE.num_layers, SHAPE.joint_dim)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": "0"}, {"layers": "-1"}, {"layers": "3"}, {"layers": "1e9"}, {"layers": ""},
        {"tokens": "many"}, {"format": "penstock-adapter-2"},
    ],
)  # fmt: skip
def test_a_changed_heading_of_an_adapter_is_refused(
    wrong: dict[str, str], tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "a", metadata={**METADATA, **wrong})
    with pytest.raises(AdapterError):
        LowRankAdapter.load(tmp_path / "a")


@pytest.mark.parametrize("seed", range(20))
def test_a_file_with_changed_bytes_is_an_adapter_or_an_error(
    seed: int, adapter: LowRankAdapter, tmp_path: Path
) -> None:
    """Its heading, where sizes and dtypes are, and the numbers behind it."""
    draw = np.random.default_rng(seed)
    adapter.save(tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    heading = 8 + struct.unpack("<Q", data[:8])[0]
    assert json.loads(data[8:heading])["layers.0.peak"]
    end = heading if seed % 2 else len(data)
    for at in draw.integers(0, end, size=3):
        data[at] = int(draw.integers(256))
    (tmp_path / "a").write_bytes(data[: None if seed % 3 else len(data) - seed])
    try:
        found = LowRankAdapter.load(tmp_path / "a")
    except AdapterError:
        return
    assert all(layer.basis.isfinite().all() for layer in found.layers)


def stored_index(bits: int, adapter: LowRankAdapter) -> dict[str, Tensor]:
    index = make_index(bits, adapter)
    torch.manual_seed(5)
    index.append(torch.randn(1, 2 * UNITS, SHAPE.num_kv_heads, SHAPE.head_dim), 0)
    state = index.state(UNITS)
    assert state is not None
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_stored_index_goes_on_as_it_was(bits: int, adapter: LowRankAdapter) -> None:
    state = stored_index(bits, adapter)
    index, again = make_index(bits, adapter), make_index(bits, None)
    torch.manual_seed(5)
    index.append(torch.randn(1, 2 * UNITS, SHAPE.num_kv_heads, SHAPE.head_dim), 0)
    again.load_state(state, UNITS)
    expected, found = scores_and_best(index), scores_and_best(again)
    assert torch.equal(expected[0], found[0])
    assert expected[1] == found[1]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["codes", "basis", "step"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_no_changed_index_reaches_a_kernel(
    bits: int, name: str, change: str, adapter: LowRankAdapter
) -> None:
    """Refused with nothing changed; or as long as it must be, and finite."""
    state, index = stored_index(bits, adapter), make_index(bits, None)
    state[name] = CHANGES[change](state[name])
    before = index._codes.clone()
    with contextlib.suppress(ConfigError):
        index.load_state(state, UNITS)
    if not index.ready:
        assert torch.equal(index._codes, before)
        return
    assert index._basis.shape == (SHAPE.joint_dim, RANK)
    assert index._step.shape == index._per_step.shape == index._scaled_step.shape == (RANK,)
    scores, best = scores_and_best(index)
    assert scores.isfinite().all()
    assert all(0 <= unit < UNITS for row in best for unit in row)


@pytest.mark.parametrize("name", ["codes", "basis", "step"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_short_index_is_refused(name: str, bits: int, adapter: LowRankAdapter) -> None:
    state = stored_index(bits, adapter)
    state[name] = state[name][:-1]
    with pytest.raises(ConfigError, match=r"stored index|numbers do not belong"):
        make_index(bits, None).load_state(state, UNITS)


def test_another_kind_of_index_is_refused(adapter: LowRankAdapter) -> None:
    state = stored_index(8, adapter)
    for wrong in ({}, {"codes": state["codes"]}, {**state, "more": state["step"]}):
        with pytest.raises(ConfigError, match=re.escape("another kind of index")):
            make_index(8, None).load_state(wrong, UNITS)
