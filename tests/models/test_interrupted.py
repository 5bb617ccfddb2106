"""A step that stops halfway, at any point of any layer: the right logits afterwards, or a refusal
whose advice works."""

import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen2Config

from penstock import KVSwap, TieredCache
from penstock.core.errors import CacheStateError
from penstock.methods import POLICIES
from penstock.models.cache_argument import cache_argument
from penstock.models.query_projection import decoder_layers
from penstock.models.recurrent_layers import HAS_RECURRENT_LAYERS
from penstock.testing.pairs import covering
from penstock.testing.tiny_families import tiny_family
from penstock.testing.tiny_models import _SIZES, tiny_model

PROMPT = 60
LENGTH = 70
IDS = torch.randint(3, 160, (1, LENGTH), generator=torch.Generator().manual_seed(5))
HYBRIDS = [family for family in ("qwen3_next", "falcon_h1") if HAS_RECURRENT_LAYERS]
"""Recurrent layers beside full ones, and both in one layer."""


PLACES = {
    "", "self_attn", "self_attn.v_proj", "self_attn.o_proj", "linear_attn", "linear_attn.out_proj",
    "linear_attn.norm", "mamba", "mamba.out_proj",
}  # fmt: skip


class Stop(BaseException):
    """As Ctrl-C, which no code catches by accident."""


def make(family: str) -> Any:
    config: Any = None
    if family in HYBRIDS:
        return tiny_family(family)
    if family == "qwen2 with windows":
        config = Qwen2Config(
            **_SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=1
        )
    if family == "windows first and last":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Gemma3TextConfig(**_SIZES, head_dim=16, sliding_window=24, layer_types=kinds)
    if config is None:
        return tiny_model(family)
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config).eval()


def points(
    model: Any, *, within: bool = True, numbers: tuple[int, ...] = (0, 1, 2)
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module of decoder layers, before and behind it.

    Not `within`: the layer, its attention, and what stands before and behind the cache's update.
    """
    for number, layer in enumerate(decoder_layers(model)):
        if number not in numbers:
            continue
        for place, (name, module) in enumerate(layer.named_modules()):
            if not within and name not in PLACES:
                continue
            # Behind a module within is before the next: one of the two in every second layer.
            sides = (True, False) if not within or not name else ((number + place) % 2 == 0,)
            for before in sides:
                yield f"{number}.{name or 'layer'}{' before' * before}", module, before


def stop_at(
    model: Any, module: nn.Module, cache: TieredCache, ids: Tensor, *, before: bool
) -> None:
    def stop(*_: Any) -> None:
        raise Stop

    put = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = put(stop)
    try:
        model(ids, **cache_argument(model, cache))
    except Stop:
        pass
    finally:
        handle.remove()


def go_on(model: Any, cache: TieredCache) -> Tensor:
    """Logits behind the last token of `IDS`, of what the cache lacks; as `generate` finds it."""
    held = cache.get_seq_length()
    out: Tensor = model(IDS[:, held:], **cache_argument(model, cache)).logits[0, -1]
    return out


def follow_advice(cache: TieredCache, words: str, *, crop: int | None = None) -> None:
    advised = re.search(r"crop\((\d+)\)", words)
    assert crop is None or (advised is not None and int(advised[1]) == crop), words
    if advised is None:
        assert "reset()" in words, words
        cache.reset()
    else:
        cache.crop(int(advised[1]))
    lengths = {layer.get_seq_length() for layer in cache.layers}
    assert lengths == {int(advised[1]) if advised else 0}, words


STEPS = [("llama", 1), ("llama", 7), ("gemma2", 1), ("gemma3", 7), ("gpt_oss", 1)]
STEPS += [("qwen2 with windows", 7), ("windows first and last", 1), ("windows first and last", 7)]
STEPS += [(family, count) for family in HYBRIDS for count in (1, 7)]
"""Models, and the tokens of the step that stops."""


@torch.no_grad()
@pytest.mark.parametrize(("family", "count"), STEPS)
def test_a_step_that_stops_anywhere(family: str, count: int) -> None:
    model = make(family)
    right = model(IDS).logits[0, -1]
    refusals = 0
    with TieredCache(
        model, KVSwap(window_tokens=8), exact=True, store="memory", max_tokens=LENGTH
    ) as cache:
        within = family == ("llama" if count == 1 else "gemma3")
        numbers = (0, 1) if within else (0, 2) if count == 1 else (1,)
        if family in HYBRIDS:
            numbers = (1,) if family == "falcon_h1" else (1, 3) if count == 1 else (0, 1)
        for name, module, before in points(model, within=within, numbers=numbers):
            cache.reset()
            model(IDS[:, :PROMPT], **cache_argument(model, cache))
            ids = IDS[:, PROMPT : PROMPT + count]
            stop_at(model, module, cache, ids, before=before)
            try:
                found = go_on(model, cache)
            except CacheStateError as refused:
                refusals += 1
                follow_advice(cache, str(refused), crop=PROMPT)  # one step is always taken back
                found = go_on(model, cache)
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4, msg=name)
    assert refusals > 3


@torch.no_grad()
@pytest.mark.parametrize("name", ["full", "kvswap", "quest", "arkvale"])
def test_a_step_given_up_does_not_choose_for_the_next_one(name: str) -> None:
    """What was fetched for one token is not what another one attends to."""
    model, ids = make("llama"), IDS[:, PROMPT : PROMPT + 1]
    chosen: dict[str, Any] = {"full": {}, "kvswap": {"window_tokens": 8, "selected_tokens": 8}}
    policy = POLICIES[name](**chosen.get(name, {"selected_tokens": 16}))
    with TieredCache(
        model, policy, store="memory", max_tokens=LENGTH, must_tier=name != "full"
    ) as cache:

        def fresh() -> None:
            cache.reset()
            model(IDS[:, :PROMPT], **cache_argument(model, cache))

        fresh()
        right = model(ids, **cache_argument(model, cache)).logits
        within = name == "kvswap"
        numbers = (0, 1) if within else (0, 2)
        for where, module, before in points(model, within=within, numbers=numbers):
            fresh()
            stop_at(model, module, cache, (ids + 1) % 160, before=before)
            lengths = {layer.get_seq_length() for layer in cache.layers}
            if len(lengths) > 1:
                with pytest.raises(CacheStateError) as refused:
                    model(ids, **cache_argument(model, cache))
                follow_advice(cache, str(refused.value))
            elif lengths == {PROMPT + 1}:
                cache.crop(-1)
            found = model(ids, **cache_argument(model, cache)).logits
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5, msg=where)


@torch.no_grad()
def test_a_prompt_that_stops_is_read_anew() -> None:
    model = make("gemma3")
    right = model(IDS).logits[0, -1]
    with TieredCache(model, "kvswap", store="memory", max_tokens=LENGTH) as cache:
        stop_at(model, decoder_layers(model)[1], cache, IDS[:, :40], before=False)
        with pytest.raises(CacheStateError, match=r"reset\(\) the cache") as refused:
            go_on(model, cache)
        follow_advice(cache, str(refused.value))
        torch.testing.assert_close(go_on(model, cache), right, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_no_crop_is_advised_where_a_window_cannot_go_back() -> None:
    model = make("gemma3")
    right = model(IDS).logits[0, -1]
    with TieredCache(model, "kvswap", store="memory", max_tokens=LENGTH) as cache:
        model(IDS[:, :PROMPT], **cache_argument(model, cache))
        stop_at(model, decoder_layers(model)[0], cache, IDS[:, PROMPT:61], before=False)
        cache.reorder_cache(torch.tensor([0]))  # copies what the windows are, and no more
        with pytest.raises(CacheStateError, match="cannot go back") as refused:
            go_on(model, cache)
        before = [layer.get_seq_length() for layer in cache.layers]
        with pytest.raises(CacheStateError, match="moved too far on"):
            cache.crop(PROMPT)
        assert [layer.get_seq_length() for layer in cache.layers] == before
        assert "crop" not in str(refused.value)
        follow_advice(cache, str(refused.value))
        torch.testing.assert_close(go_on(model, cache), right, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_window_takes_back_what_its_last_update_brought() -> None:
    model = make("gemma2")
    right = model(IDS).logits[0, -1]
    with TieredCache(model, "kvswap", store="memory", max_tokens=LENGTH) as cache:
        model(IDS[:, :PROMPT], **cache_argument(model, cache))
        model((IDS[:, :8] + 1) % 160, **cache_argument(model, cache))
        cache.crop(-5)
        cache.crop(-3)
        torch.testing.assert_close(go_on(model, cache), right, rtol=1e-4, atol=1e-4)
        with pytest.raises(CacheStateError, match=r"reset\(\)"):
            cache.crop(30)
        assert cache.get_seq_length() == LENGTH


WITHIN = ["window.write_many", "window.write_one", "window.refresh", "transfer.write", "on_closed"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "after", "count"), covering(["kvswap", "arkvale", "exact"], [False, True], [1, 9])
)
def test_a_layer_that_stops_within(name: str, after: bool, count: int) -> None:
    """Tokens that a step wrote over in a window are read back by what its refusal advises."""
    model = make("llama")
    exact, name = name == "exact", "kvswap" if name == "exact" else name
    few = {"window_tokens": 8} if name == "kvswap" else {}
    chosen: dict[str, Any] = {"selected_tokens": 64, **few}
    policy = POLICIES[name](**chosen)
    right, stops = model(IDS).logits[0, -1], 0
    with TieredCache(
        model, policy, store="memory", max_tokens=LENGTH, must_tier=True, exact=exact
    ) as cache:
        for turn, place in enumerate(WITHIN):
            number = (turn + after) % 3
            cache.reset()
            for part in (IDS[:, :50], IDS[:, 50:55], IDS[:, 55:PROMPT]):
                model(part, **cache_argument(model, cache))
            try:
                with stopping(cache.tiers.layers[number], place, after=after):
                    for i in range(PROMPT, LENGTH, count):
                        ids = IDS[:, i : i + count]
                        model(ids, **cache_argument(model, cache))
            except Stop:
                stops += 1
                with pytest.raises(CacheStateError) as refused:
                    model(ids, **cache_argument(model, cache))
                advised = re.search(r"crop\((\d+)\)", str(refused.value))
                assert advised is not None, (place, number)
                follow_advice(cache, str(refused.value))
            if cache.get_seq_length() < LENGTH:
                found = go_on(model, cache)
                where = f"{place} {number}"
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4, msg=where)
    assert stops >= 2


@contextmanager
def stopping(layer: Any, place: str, *, after: bool) -> Iterator[None]:
    """One call within a layer stops, once."""
    *path, name = place.split(".")
    owner = reduce(getattr, path, layer)
    own = getattr(owner, name)

    def stop(*args: Any, **kwargs: Any) -> None:
        owner.__dict__.pop(name, None)
        if after:
            own(*args, **kwargs)
        raise Stop

    owner.__dict__[name] = stop
    try:
        yield
    finally:
        owner.__dict__.pop(name, None)


@pytest.mark.parametrize("policy", ["hillinfer", "dynakv"])
def test_work_behind_a_step_that_was_cancelled_is_no_error_of_close(policy: str) -> None:
    """An interrupt may close the worker before a layer has asked for its answer."""
    model = tiny_model("llama")
    cancelled: Future[Any] = Future()
    cancelled.cancel()
    cancelled.set_running_or_notify_cancel()
    with TieredCache(model, policy, store="memory", max_tokens=128, must_tier=True) as cache:
        with torch.no_grad():
            model(torch.arange(3, 73)[None], **cache_argument(model, cache))
        name = {"hillinfer": "_begun", "dynakv": "_following"}[policy]
        for layer in cache.tiers.layers:
            assert hasattr(layer, name)
            setattr(layer, name, cancelled)
    assert not cache._open
