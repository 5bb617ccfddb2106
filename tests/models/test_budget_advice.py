"""A refused budget says what else would do; a cache says what it is."""

import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock import TieredCache
from penstock.core.errors import BudgetError, UnsupportedModelError
from penstock.methods import POLICIES
from penstock.models import first_look
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import tiny_model

TOKENS = 300


@functools.cache
def llama() -> PreTrainedModel:
    return tiny_model("llama")


def refused(policy: str, memory: int) -> BudgetError:
    with pytest.raises(BudgetError, match="1 sequence of 300 tokens") as caught:
        TieredCache(llama(), policy, memory, "memory", max_tokens=TOKENS)
    return caught.value


@pytest.mark.parametrize("policy", [name for name, each in POLICIES.items() if not each.drops])
def test_what_is_advised_holds(policy: str) -> None:
    error = refused(policy, 1)
    assert error.fitting == ()
    assert error.needed_bytes is not None
    error = refused(policy, error.needed_bytes - 1)
    assert policy not in error.fitting
    for name in error.fitting:
        if name == "hillinfer" and policy != "flexgen":
            continue  # each opening starts processes
        memory = (error.needed_bytes or 0) - 1
        with TieredCache(llama(), name, memory, "memory", max_tokens=TOKENS) as cache:
            assert cache.policy.name == name


def test_some_policy_fits_where_the_largest_does_not() -> None:
    least = {name: refused(name, 1).needed_bytes or 0 for name in ("kvswap", "flexgen", "quest")}
    largest = max(least, key=lambda name: least[name])
    assert refused(largest, least[largest] - 1).fitting


def test_an_adapter_is_advised_where_it_would_save() -> None:
    without = refused("kvswap", 1)
    assert without.adapter_bytes is None or without.adapter_bytes < (without.needed_bytes or 0)
    assert refused("quest", 1).adapter_bytes is None


@torch.no_grad()
def test_a_notice_stands_only_where_tokens_are_selected() -> None:
    model = tiny_model("llama")
    with TieredCache(model, memory="auto", store="memory", max_tokens=13) as cache:
        assert cache.plan.is_resident
        assert cache.notices == []
    with TieredCache(model, memory="auto", store="memory", max_tokens=13, must_tier=True) as cache:
        assert "no low-rank adapter" in cache.notices[0]


@torch.no_grad()
def test_a_cache_says_what_it_is() -> None:
    model: Any = tiny_model("llama")
    with TieredCache(model, "quest", store="memory", max_tokens=40, batch_size=2) as cache:
        said = repr(cache)
        assert said.startswith("TieredCache(quest, memory 0 B of ")
        assert said.endswith(", store fast memory, 0 of 40 tokens)")
        model(torch.ones(2, 7, dtype=torch.int64), **cache_argument(model, cache))
        assert repr(cache).endswith(", store fast memory, 7 of 40 tokens in 2 rows)")
    assert "store closed" in repr(cache)
    with TieredCache(model, exact=True, memory="1/2", store="memory", max_tokens=400) as cache:
        assert repr(cache).startswith("TieredCache(kvswap, exact, memory 0 B of ")
    assert repr(TieredCache.__new__(TieredCache)) == "TieredCache(not made)"


def test_a_model_on_an_apple_gpu_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_look, "model_device", lambda _: torch.device("mps"))
    with pytest.raises(UnsupportedModelError, match="on mps: Apple's GPUs are not supported"):
        TieredCache(tiny_model("llama"), memory="1/2", store="memory", max_tokens=40)
