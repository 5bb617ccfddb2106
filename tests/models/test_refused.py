"""A call that is refused leaves the cache as it was: the next, right call gives right logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import KVSwap, TieredCache
from penstock.core.errors import CacheStateError, ConfigError, PenstockError
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import tiny_model

HELD, LENGTH, MOST = 40, 52, 60
IDS = torch.randint(3, 160, (2, 80), generator=torch.Generator().manual_seed(9))
Refused = Callable[[Any, TieredCache], object]


def run(model: Any, cache: TieredCache, ids: Tensor, **others: Any) -> Tensor:
    logits: Tensor = model(ids, **others, **cache_argument(model, cache)).logits
    return logits


def square(model: Any, cache: TieredCache) -> None:
    mask = torch.ones(2, 1, LENGTH - HELD, LENGTH, dtype=torch.bool)
    run(model, cache, IDS[:, HELD:LENGTH], attention_mask=mask)


def square_for_one_token(model: Any, cache: TieredCache) -> None:
    mask = torch.zeros(2, 1, 1, HELD + 1)
    run(model, cache, IDS[:, HELD : HELD + 1], attention_mask=mask)


REFUSALS: dict[str, Refused] = {
    "a 4D mask": square,
    "a 4D mask of a step": square_for_one_token,
    "too many tokens": lambda model, cache: run(model, cache, IDS[:, : MOST + 5]),
    "a row less": lambda model, cache: run(model, cache, IDS[:1, HELD:LENGTH]),
    "a row more": lambda model, cache: run(model, cache, IDS[[0, 1, 1], HELD:LENGTH]),
    "no rows": lambda _, cache: cache.batch_select_indices(torch.tensor([False, False])),
    "a row that is not there": lambda _, cache: cache.reorder_cache(torch.tensor([0, 2])),
    "a row before the first": lambda _, cache: cache.batch_select_indices(torch.tensor([-1])),
    "more rows than memory": lambda _, cache: cache.batch_repeat_interleave(500),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "tiers"),
    [
        ("llama", "tiers"), ("llama", "device tier"), ("gemma2", "tiers"),
        ("gemma3", "device tier"), ("gpt_oss", "exact"), ("gpt_oss", "resident"),
    ],
)  # fmt: skip
def test_nothing_stays_of_a_refused_call(family: str, tiers: str) -> None:
    model = tiny_model(family)
    right = model(IDS[:, :LENGTH]).logits[:, -1]
    store = "host" if tiers == "device tier" else "memory"
    with TieredCache(
        model, KVSwap(window_tokens=8, reuse_tokens=64), 900_000, store, max_tokens=MOST,
        batch_size=2, exact=tiers == "exact", must_tier=tiers != "resident",
    ) as cache:  # fmt: skip
        for first in (True, False):  # before any call was right, and afterwards
            for name, refused in REFUSALS.items():
                if first and "row" in name:
                    continue
                if not first:
                    run(model, cache, IDS[:, :HELD])
                with pytest.raises(PenstockError):
                    refused(model, cache)
                held = {layer.get_seq_length() for layer in cache.layers}
                assert held == {0 if first else HELD}, name
                if first:
                    run(model, cache, IDS[:, :HELD])
                found = run(model, cache, IDS[:, HELD:LENGTH])[:, -1]
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4, msg=name)
                cache.reset()


@torch.no_grad()
def test_a_prompt_padded_in_the_middle_is_refused_before_anything() -> None:
    """Only the device tier cannot hide it."""
    model = tiny_model("llama")
    right = model(IDS[:, :LENGTH]).logits[:, -1]
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, HELD + 2] = 0
    with TieredCache(
        model, KVSwap(window_tokens=8), store="host", max_tokens=MOST, batch_size=2, must_tier=True
    ) as cache:
        run(model, cache, IDS[:, :HELD])
        with pytest.raises(ConfigError, match="padded behind its first token"):
            run(model, cache, IDS[:, HELD:LENGTH], attention_mask=mask)
        found = run(model, cache, IDS[:, HELD:LENGTH])[:, -1]
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_closed_cache_refuses_and_the_model_goes_on(family: str) -> None:
    model = tiny_model(family)
    right = model(IDS[:, :LENGTH]).logits
    with TieredCache(model, "kvswap", store="memory", max_tokens=MOST) as other:
        cache = TieredCache(model, "kvswap", store="memory", max_tokens=MOST, batch_size=2)
        run(model, cache, IDS[:, :HELD])
        cache.close()
        for _ in range(2):
            with pytest.raises(CacheStateError, match="closed"):
                run(model, cache, IDS[:, HELD:LENGTH])
        torch.testing.assert_close(run(model, other, IDS[:, :LENGTH]), right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(IDS[:, :LENGTH]).logits, right, rtol=1e-5, atol=1e-5)
    with pytest.raises(CacheStateError, match="closed"):
        run(model, cache, IDS[:, HELD:LENGTH])


@torch.no_grad()
@pytest.mark.parametrize("name", ["kvswap", "full", "quest", "louiskv", "flexgen", "dynakv"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_other_rows_after_reset(name: str, family: str) -> None:
    model = tiny_model(family)
    with TieredCache(model, name, store="memory", max_tokens=MOST, batch_size=1) as cache:
        for count in (1, 2, 1):
            ids = IDS[:count, :LENGTH]
            found = run(model, cache, ids)
            assert cache.batch_size == count
            torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-4)
            run(model, cache, IDS[:count, LENGTH : LENGTH + 1])
            assert cache.report().used_bytes == cache.plan.total_bytes
            cache.reset()
            assert cache.batch_size == -1


@torch.no_grad()
def test_a_batch_too_large_after_reset_is_refused_and_a_right_one_works() -> None:
    model = tiny_model("llama")
    with TieredCache(model, "kvswap", 100_000, "memory", max_tokens=MOST) as cache:
        run(model, cache, IDS[:1, :LENGTH])
        cache.reset()
        with pytest.raises(ConfigError, match="smallest budget"):
            run(model, cache, IDS[:1, :LENGTH].repeat(90, 1))
        found = run(model, cache, IDS[:1, :LENGTH])
        torch.testing.assert_close(found, model(IDS[:1, :LENGTH]).logits, rtol=1e-4, atol=1e-4)
