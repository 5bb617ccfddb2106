"""Indexes weigh tokens with the factor that the model's own attention uses."""

from typing import Any

import pytest
import torch

from penstock import TieredCache
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods.hillinfer.policy import HillInfer
from penstock.methods.louiskv.policy import LouisKV
from penstock.models.attention_scaling import attention_scaling
from penstock.models.cache_argument import cache_argument
from penstock.models.model_shape import inspect_model
from penstock.testing.tiny_models import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_the_attention_function_is_given(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: set[float] = set()
    attend: Any = TieredRuntime.attend

    def spy(self: TieredRuntime, layer: int, call: Any) -> Any:
        given.add(call.scaling)
        return attend(self, layer, call)

    monkeypatch.setattr(TieredRuntime, "attend", spy)
    model = tiny_model(family)
    said = attention_scaling(model, inspect_model(model).kv.head_dim)
    ids: Any = torch.arange(3, 43)[None]
    with TieredCache(model, "quest", None, "memory", max_tokens=64) as cache, torch.no_grad():
        model(ids, **cache_argument(model, cache))
        model(ids[:, :1], **cache_argument(model, cache))
        assert cache._settings.logit_scaling == said
    assert sorted(given) == pytest.approx([said])


def test_policies_get_it() -> None:
    model: Any = tiny_model("granite")
    assert model.config.attention_multiplier == 1.0
    ids: Any = torch.arange(3, 90)[None]
    for policy in (LouisKV(selected_tokens=16, window_tokens=8), HillInfer(near=False)):
        with (
            TieredCache(model, policy, None, "memory", max_tokens=128, must_tier=True) as cache,
            torch.no_grad(),
        ):
            model(ids, **cache_argument(model, cache))
            model(ids[:, :1], **cache_argument(model, cache))
            index: Any = cache.tiers.layers[0]
            core = index.index.unwrapped
            settings = getattr(core, "settings", None) or getattr(core, "_settings", None)
            assert (core._scaling if settings is None else settings.scaling) == 1.0
