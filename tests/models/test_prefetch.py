"""Predicted queries are those of the layer's own code, and hooks come and go with the cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock import KVSwap, TieredCache
from penstock.core.errors import AdapterError
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods import Quest
from penstock.methods.baselines.arkvale import ArkVale
from penstock.methods.louiskv.policy import LouisKV
from penstock.models.attention_adapter import Attachment
from penstock.models.cache_argument import cache_argument
from penstock.models.calibrate import calibrate
from penstock.models.query_projection import QueryProjection, decoder_layers
from penstock.testing.tiny_models import tiny_model

SMALL = KVSwap(window_tokens=4, selected_tokens=16, rank=8)
DIRECT = {"llama": True, "qwen3": True, "opt": False, "phi3": False, "gpt_neox": False}


def no_hooks(model: PreTrainedModel) -> bool:
    return not any(module._forward_pre_hooks for module in model.modules())


class Spy:
    """Sees the arguments of a decoder layer, and the query that its attention gets."""

    def __init__(self, model: PreTrainedModel, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden: list[Tensor] = []
        self.kwargs: list[dict[str, Any]] = []
        self.queries: list[Tensor] = []
        module = decoder_layers(model)[layer]
        self.handle = module.register_forward_pre_hook(self.enter, with_kwargs=True)
        real = TieredRuntime.attend

        def attend(runtime: TieredRuntime, tier: int, call: Any) -> Tensor:
            if tier == layer and call.query.shape[2] == 1:
                self.queries.append(call.query[:, :, 0].clone())
            return real(runtime, tier, call)

        monkeypatch.setattr(TieredRuntime, "attend", attend)

    def enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] == 1:
            self.hidden.append(hidden.clone())
            self.kwargs.append({k: v for k, v in kwargs.items() if k != "hidden_states"})


@pytest.mark.parametrize("family", DIRECT)
def test_projections_are_the_true_query(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the layer's own input, both ways make the query that its attention gets."""
    model = tiny_model(family)
    spy = Spy(model, 1, monkeypatch)
    projection = QueryProjection(decoder_layers(model))
    with TieredCache(model, SMALL, store="memory", max_tokens=100) as cache, torch.no_grad():
        model(torch.arange(3, 63)[None], **cache_argument(model, cache))
        for token in (5, 6, 7):
            model(torch.tensor([[token]]), **cache_argument(model, cache))
        assert len(spy.hidden) == len(spy.queries) == 3
        for hidden, kwargs, true in zip(spy.hidden, spy.kwargs, spy.queries, strict=True):
            # Masks of an earlier step do not fit the cache of a later one; a query needs none.
            query = projection.project(1, hidden, {**kwargs, "attention_mask": None})
            assert query is not None
            torch.testing.assert_close(query.reshape(true.shape), true, rtol=1e-5, atol=1e-6)
        assert (projection._ways[1] == "direct") == DIRECT[family]
    spy.handle.remove()


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_predicted_fetches_are_begun_before_their_layer(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    events: list[tuple[str, int]] = []
    begin, attend = TieredRuntime.begin_fetch, TieredRuntime.attend

    def begin_fetch(runtime: TieredRuntime, layer: int, query: Tensor) -> None:
        events.append(("begin", layer))
        begin(runtime, layer, query)
        assert runtime.layers[layer].fetch_begun  # type: ignore[attr-defined]

    def attend_seen(runtime: TieredRuntime, layer: int, call: Any) -> Tensor:
        events.append(("attend", layer))
        return attend(runtime, layer, call)

    monkeypatch.setattr(TieredRuntime, "begin_fetch", begin_fetch)
    monkeypatch.setattr(TieredRuntime, "attend", attend_seen)
    cache = TieredCache(model, SMALL, memory="2/3", store="memory", max_tokens=300)
    with cache, torch.no_grad():
        model(torch.arange(3, 103)[None], **cache_argument(model, cache))
        assert [kind for kind, _ in events] == ["attend"] * 3, "prefill predicts nothing"
        events.clear()
        model(torch.tensor([[5]]), **cache_argument(model, cache))
        # A layer's own reads are on their way before those of the layer behind it.
        assert events == [
            ("begin", 0), ("begin", 1), ("attend", 0), ("begin", 2), ("attend", 1), ("attend", 2),
        ]  # fmt: skip
        events.clear()
        # A plain cache beside ours, and a model call without one, are left alone.
        plain = DynamicCache(config=model.config)
        model(torch.arange(3, 13)[None], **cache_argument(model, plain))
        model(torch.tensor([[5]]), **cache_argument(model, plain))
        model(torch.tensor([[5]]), use_cache=False)
        assert events == []
    assert no_hooks(model)


@pytest.mark.parametrize(
    ("policy", "store"),
    [(LouisKV, "memory"), (LouisKV, "host"), (ArkVale, "host"), (Quest, "memory")],
)
def test_methods_that_can_choose_ahead(
    policy: Any, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off unless asked for; a layer is begun before the one before it attends, and at a full
    budget says what full attention says."""
    model = tiny_model("llama")
    ids = torch.arange(3, 103)[None]
    begun: list[int] = []
    begin = TieredRuntime.begin_fetch

    def begin_fetch(runtime: TieredRuntime, layer: int, query: Tensor) -> None:
        assert runtime.layers[layer].length == runtime.layers[layer - 1].length
        begun.append(layer)
        begin(runtime, layer, query)

    monkeypatch.setattr(TieredRuntime, "begin_fetch", begin_fetch)
    whole: dict[str, Any] = {"selected_tokens": 10**6, "window_tokens": 8, "sink_tokens": 4}
    steps = [torch.tensor([[token]]) for token in range(5, 19)]

    def logits(cache: Any) -> Tensor:
        model(ids, **cache_argument(model, cache))
        return torch.cat([model(step, **cache_argument(model, cache)).logits for step in steps])

    with torch.no_grad():
        right = logits(DynamicCache(config=model.config))
    for predict in (False, True):
        chosen = policy(predict=predict, **whole)
        begun.clear()
        with (
            TieredCache(model, chosen, store=store, max_tokens=200) as cache, torch.no_grad()
        ):  # fmt: skip
            assert torch.allclose(logits(cache), right, atol=1e-4)
        layers = [1, 2] if store == "host" else [0, 1, 2]
        assert begun == (len(steps) * layers if predict else [])


@pytest.mark.parametrize("how", ["off", "exact", "sliding before"])
def test_no_prediction_where_it_makes_no_sense(how: str) -> None:
    family = "gemma2" if how == "sliding before" else "llama"
    model = tiny_model(family)
    policy = KVSwap(window_tokens=4, predict=how != "off")
    cache = TieredCache(model, policy, store="memory", max_tokens=100, exact=how == "exact")
    assert no_hooks(model)
    cache.close()


def test_hooks_go_when_the_cache_goes() -> None:
    model = tiny_model("llama")
    first = TieredCache(model, SMALL, store="memory", max_tokens=100)
    second = TieredCache(model, SMALL, store="memory", max_tokens=100)
    assert not no_hooks(model)
    first.close()
    assert not no_hooks(model)
    del second
    assert no_hooks(model)
    assert model.config._attn_implementation != "penstock"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_attachments_nest_in_any_order(order: tuple[int, ...]) -> None:
    model = tiny_model("llama")
    before = model.config._attn_implementation
    attachments = [Attachment(model) for _ in range(3)]
    for i in order:
        assert model.config._attn_implementation == "penstock"
        attachments[i].detach()
        attachments[i].detach()
    assert model.config._attn_implementation == before
    assert not any("penstock" in name for name in model.__dict__)
    again = Attachment(model)
    assert model.config._attn_implementation == "penstock"
    again.detach()
    assert model.config._attn_implementation == before


def test_a_changed_fetch_does_not_change_the_answer() -> None:
    """With prediction or without, at full selection: the same tokens."""
    model, answers = tiny_model("qwen3"), []
    ids = torch.arange(3, 93)[None]
    for predict in (True, False):
        policy = KVSwap(window_tokens=4, predict=predict)
        with TieredCache(model, policy, store="memory", max_tokens=140) as cache:
            answers.append(
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), **cache_argument(model, cache),
                    max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None,
                )
            )  # fmt: skip
    assert torch.equal(*answers)


def test_layers_that_are_badly_predicted_choose_for_themselves() -> None:
    """What a model's adapter says counts, also for methods that have no other use for one."""
    model = tiny_model("llama")
    adapter = calibrate(model, [torch.arange(3, 150)])
    assert len(adapter.prediction_cosine) == 3
    known = replace(adapter, prediction_cosine=(0.0, 0.9, 0.5))
    for given, late, told in ((known, {0, 2}, 0), (None, set(), 1)):
        policy = LouisKV(predict=True, window_tokens=8, selected_tokens=16)
        cache = TieredCache(model, policy, store="host", max_tokens=200, adapter=given)
        assert cache._settings.true_query_layers == late
        assert len(cache.notices) == told
        cache.close()
    own = TieredCache(model, LouisKV(window_tokens=8), store="host", max_tokens=200)
    assert own.notices == []
    own.close()
    with pytest.raises(AdapterError):
        TieredCache(
            tiny_model("qwen3"), LouisKV(predict=True), store="host", max_tokens=200, adapter=known
        )
