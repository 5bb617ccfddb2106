"""LowRankIndex keeps the components that queries see, the strongest in two columns of 4 bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LowRankAdapter, fit_layer
from penstock.engine.key_scale import key_scale, mean_squares
from penstock.kernels.key_rotation import KeyRotation
from penstock.methods.kvswap.index import FINE_PART, LowRankIndex

HEADS, KV_HEADS, DIM, GROUP, GROUPS, RANK = 4, 2, 16, 4, 256, 16
JOINT, TOKENS = KV_HEADS * DIM, GROUP * GROUPS
ROTATION = KeyRotation(1e3 ** -(torch.arange(DIM // 2, dtype=torch.float64) / 8))
SHAPE = KVShape(
    num_layers=1, num_query_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32
)


@pytest.fixture
def keys() -> Tensor:
    """Keys of which the loudest components turn slowly. [1, TOKENS, KV_HEADS, DIM]"""
    loud = torch.ones(DIM)
    loud[[6, 7, 14, 15]] = 2.0
    return ROTATION.turned(
        torch.randn(1, TOKENS, KV_HEADS, DIM) * loud, torch.arange(TOKENS)[None, :, None]
    )


@pytest.fixture
def queries() -> Tensor:
    """Queries that have other components most. [1, HEADS, 8, DIM]"""
    size = torch.ones(DIM)
    size[[6, 7, 14, 15]], size[[3, 4, 11, 12]] = 0.02, 6.0
    return torch.randn(1, HEADS, 8, DIM) * size


def make_index(bits: int, rank: int = RANK, **changes: Any) -> LowRankIndex:
    options: dict[str, Any] = {
        "batch": 1, "max_units": GROUPS, "group_tokens": GROUP, "head_reduction": "softmax",
        "scaling": 0.3, "adapter": None, "device": torch.device("cpu"), "rotation": ROTATION,
    }  # fmt: skip
    return LowRankIndex(SHAPE, rank=rank, bits=bits, **{**options, **changes})


def filled(index: LowRankIndex, keys: Tensor, queries: Tensor | None = None) -> LowRankIndex:
    if queries is not None:
        assert index.wanted_queries == queries.shape[2]
        index.see_queries(queries)
    if not index.ready:
        index.fit(keys, torch.arange(TOKENS))
    assert index.wanted_queries == 0
    index.append(keys, 0)
    return index


def exact(keys: Tensor, query: Tensor) -> Tensor:
    """Groups' shares with whole keys. [1, GROUPS]"""
    per_head = keys.repeat_interleave(HEADS // KV_HEADS, dim=2)
    logits = torch.einsum("bhd,bnhd->bhn", query, per_head) * 0.3
    return logits.view(1, HEADS, GROUPS, GROUP).amax(-1).softmax(-1).sum(1)


def likeness(one: Tensor, two: Tensor) -> float:
    ranks = torch.stack([each.flatten().argsort().argsort().float() for each in (one, two)])
    return float(torch.corrcoef(ranks)[0, 1])


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_components_that_queries_see_are_kept(bits: int, keys: Tensor, queries: Tensor) -> None:
    query = queries[:, :, -1]
    expected = exact(keys, query)
    seen, energy = filled(make_index(bits), keys, queries), filled(make_index(bits), keys)
    found = [likeness(index.score(query, GROUPS), expected) for index in (seen, energy)]
    assert found[0] > found[1] + 0.05


def test_the_strongest_components_have_two_columns(keys: Tensor) -> None:
    """What a first column leaves is in the second one, to a sixteenth of a step."""
    index = filled(make_index(4, 2 * RANK), keys)
    fine = 2 * RANK // FINE_PART
    codes = index._codes[0, 0].transpose(0, 1).flatten(0, 1)
    values = torch.cat([codes & 15, codes >> 4], dim=1).float() - 7.5
    assert index._turns is not None
    turned = index._turns.keys(keys, 0)[0].flatten(1)
    components = turned @ index._encoder
    coarse, step = values * index._step, index._step[:fine]
    within = components[:, :fine].abs() < 7.4 * step
    both = coarse[:, :fine] + coarse[:, -fine:]
    torch.testing.assert_close(index._step[-fine:] * 16, step)
    assert ((components[:, :fine] - coarse[:, :fine]).abs()[within] > 0.2 * step.min()).any()
    error = (components[:, :fine] - both).abs() / step
    assert error[within].max() <= 1 / 32 + 1e-4
    torch.testing.assert_close(index._basis[:, -fine:], index._basis[:, :fine])


def test_pieces_and_put_equal_the_whole(keys: Tensor, queries: Tensor) -> None:
    whole = filled(make_index(4), keys, queries)
    pieces = make_index(4)
    pieces.take_rows_from(whole, torch.arange(1))
    pieces._codes.zero_()
    for start, end in ((0, 4), (4, 600), (600, TOKENS - 4)):
        pieces.append(keys[:, start:end], start)
    pieces.put(keys[:, TOKENS - 4 :], torch.tensor([GROUPS - 1]))
    assert torch.equal(whole._codes, pieces._codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_index_goes_on(dtype: torch.dtype, keys: Tensor, queries: Tensor) -> None:
    """As in bfloat16, where both matrices are rounded."""
    shape = KVShape(num_layers=1, num_query_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
                    dtype=dtype)  # fmt: skip
    options: dict[str, Any] = {
        "batch": 1, "max_units": GROUPS, "group_tokens": GROUP, "rank": RANK, "bits": 4,
        "head_reduction": "softmax", "scaling": 0.3, "adapter": None, "rotation": ROTATION,
        "device": torch.device("cpu"),
    }  # fmt: skip
    keys, queries = keys.to(dtype), queries.to(dtype)
    first, again = LowRankIndex(shape, **options), LowRankIndex(shape, **options)
    state = filled(first, keys, queries).state(GROUPS)
    assert state is not None
    again.load_state({name: each.clone() for name, each in state.items()}, GROUPS)
    tolerance: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(first._encoder, again._encoder, **tolerance)
    torch.testing.assert_close(first._basis, again._basis, **tolerance)
    again._codes.zero_()
    again.append(keys, 0)
    same = (first._codes == again._codes).float().mean()
    assert same == 1.0 if dtype == torch.bfloat16 else same > 0.99
    for name, wrong in (
        ("fine", torch.tensor([RANK])), ("fine", torch.tensor([-1])), ("fine", torch.ones(1)),
        ("scale", torch.zeros(JOINT)), ("scale", torch.full((JOINT,), torch.nan)),
        ("scale", torch.ones(JOINT - 1)), ("scale", torch.ones(JOINT, dtype=torch.float64)),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="cannot be used"):
            again.load_state({**state, name: wrong}, GROUPS)


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_scaled_and_turned_in_either_order(interleaved: bool) -> None:
    rotation = KeyRotation(torch.rand(6, dtype=torch.float64), interleaved)
    queries = torch.randn(2, HEADS, 5, DIM) * (1 + torch.arange(DIM))  # the last four do not turn
    scale = key_scale(mean_squares(queries, KV_HEADS), rotation)
    assert len(set(scale.tolist())) == KV_HEADS * (6 + 4)
    keys, places = torch.randn(3, KV_HEADS, DIM), torch.arange(3)[:, None] + 7
    by_head = scale.view(KV_HEADS, DIM)
    torch.testing.assert_close(
        rotation.turned(keys * by_head, places), rotation.turned(keys, places) * by_head
    )


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_queries_that_say_nothing(value: float) -> None:
    squares = torch.full((KV_HEADS, DIM), value)
    assert torch.equal(key_scale(squares, ROTATION), torch.ones(JOINT))


def test_an_adapter_has_the_scale(tmp_path: Any, keys: Tensor, queries: Tensor) -> None:
    seen = filled(make_index(4), keys, queries)
    assert seen._turns is not None
    turned = seen._turns.keys(keys, 0)[0].flatten(1)
    scale = key_scale(mean_squares(queries, KV_HEADS), ROTATION)
    LowRankAdapter([fit_layer(turned, RANK, 64, scale)], "", 1).save(tmp_path / "adapter")
    loaded = LowRankAdapter.load(tmp_path / "adapter").layers[0]
    assert loaded.scale is not None
    assert torch.equal(loaded.scale, scale)
    with_adapter = filled(make_index(4, adapter=loaded), keys)
    torch.testing.assert_close(with_adapter._encoder.abs(), seen._encoder.abs())
    query = queries[:, :, -1]
    scores = [index.score(query, GROUPS) for index in (seen, with_adapter)]
    assert likeness(*scores) > 0.999


def test_priced_as_stored(keys: Tensor, queries: Tensor) -> None:
    index = filled(make_index(4), keys, queries)
    priced = LowRankIndex.num_bytes(
        SHAPE, batch=1, max_units=GROUPS, group_tokens=GROUP, rank=RANK, bits=4, turned=True
    )
    assert index._scale is not None
    assert index._row_turn is not None
    held = (
        index._codes, index._basis, index._encoder, *[index._step] * 3, index._scale,
        index._row_turn, queries,
    )  # fmt: skip
    assert priced == sum(each.nbytes for each in held)
