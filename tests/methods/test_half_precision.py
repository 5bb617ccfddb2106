"""Indexes in float16: products of large keys are ranked as they are in float32, not as infinite."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.engine.attended import slot_weights
from penstock.engine.attention_call import AttentionCall
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest
from penstock.engine.tiers.token_pool import TokenPool
from penstock.kernels.scaled_query import scaled_down
from penstock.methods import POLICIES
from penstock.methods.baselines.attention_history import HeavyHitters, ObservationVotes, TimeStamps
from penstock.methods.baselines.shadow_keys import ShadowKeyIndex
from penstock.methods.kvswap.index import LowRankIndex

TOKENS, DIM, SCALING = 256, 64, 0.125
CPU = torch.device("cpu")


def shape_of(dtype: torch.dtype) -> KVShape:
    return KVShape(num_layers=1, num_kv_heads=1, num_query_heads=2, head_dim=DIM, dtype=dtype)


def made(name: str, dtype: torch.dtype) -> KeyIndex:
    shape = shape_of(dtype)
    sizes: dict[str, Any] = {"batch": 1, "max_units": TOKENS // 8, "device": CPU}
    if name in ("quest", "arkvale"):
        return POLICIES[name]().make_index(
            IndexRequest(
                shape=shape, group_tokens=8, scaling=SCALING, adapter=None, score_tokens=0,
                selected_units=4, **sizes,
            )
        )  # fmt: skip
    if name == "shadowkv":
        return ShadowKeyIndex(
            shape, group_tokens=8, rows_per_sequence=1, rank=16, landmark_units=1, num_outliers=0,
            scaling=SCALING, rotary=None, **sizes,
        )  # fmt: skip
    if name == "kvswap":
        return LowRankIndex(
            shape, group_tokens=8, rank=DIM, bits=16, head_reduction="sum", scaling=SCALING,
            adapter=None, **sizes,
        )  # fmt: skip
    sizes["max_units"] = TOKENS
    if name == "raas":
        return TimeStamps(shape, scaling=SCALING, selected_units=20, **sizes)
    return (HeavyHitters if name == "h2o" else ObservationVotes)(shape, scaling=SCALING, **sizes)


def large() -> tuple[Tensor, Tensor]:
    """Keys about a large mean and a query along it: products of 80,000, logits of 10,000 whose
    differences are small, as attention has them in a model with biases."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.full((DIM,), 50.0)
    keys = mean + torch.randn(1, TOKENS, 1, DIM, generator=generator)
    keys[:, 80:88] += 10.0
    return keys, torch.full((1, 2, DIM), 25.0)


@pytest.mark.parametrize("name", ["quest", "arkvale", "shadowkv", "kvswap", "snapkv", "h2o"])
def test_large_products_have_their_places(name: str) -> None:
    keys, query = large()
    assert (query[0] @ keys[0, :, 0].T).min() > torch.finfo(torch.float16).max
    found = []
    for dtype in (torch.float32, torch.float16):
        index = made(name, dtype)
        index.see_queries(query[:, :, None].expand(1, 2, 8, DIM).to(dtype))
        index.fit(keys.to(dtype), torch.arange(TOKENS))
        index.look(keys.to(dtype), 0)
        index.append(keys.to(dtype), 0)
        scores = index.score(query.to(dtype), 200 if name in ("snapkv", "h2o") else TOKENS // 8)
        assert scores.isfinite().all(), dtype
        found.append(scores)
    wanted = range(80, 88) if name in ("snapkv", "h2o") else (10,)
    assert int(found[0].argmax()) in wanted
    assert int(found[1].argmax()) in wanted


@pytest.mark.parametrize("name", ["h2o", "raas"])
def test_what_is_learnt_of_a_step_is_a_number(name: str) -> None:
    keys, query = large()
    half = torch.float16
    pool = TokenPool(
        torch.zeros(12, 2 * DIM * 2, dtype=torch.uint8), shape_of(half), batch=1, num_slots=10,
        kept_slots=2, group_tokens=1,
    )  # fmt: skip
    pool.tokens[:, :, 0] = keys[:, 78:90].to(half)
    pool.mask.zero_()
    new = torch.zeros(1, 1, 1, DIM, dtype=half)
    call = AttentionCall(query[:, :, None].to(half), new, new, SCALING, visible=None)
    slots = np.arange(10)[None]
    weights = slot_weights(pool, call, slots)
    assert weights.isfinite().all()
    assert int(weights.argmax()) in range(2, 10)
    index = made(name, half)
    index.fit(keys.to(half), torch.arange(TOKENS))
    index.append(keys.to(half), 0)
    index.score(query, 100)
    index.observe(Selection(slots + 78), weights)
    assert not index.score(query, 100).isnan().any()


def test_digits_stay() -> None:
    """Other dtypes are given back, and float16 is off by a power of two."""
    query = torch.linspace(-4.0, 4.0, 32)
    for dtype in (torch.float32, torch.bfloat16):
        assert scaled_down(query.to(dtype))[0].dtype == dtype
        assert scaled_down(query.to(dtype))[1] == 1.0
    small, factor = scaled_down(query.half())
    assert torch.equal(small.float() * factor, query.half().float())
