"""The keyword under which a model takes its cache: whatever its own release and class call it."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import OUTPUT_NAME, cache_argument, cache_name_in
from penstock.testing.tiny_models import tiny_model


class New:
    def forward(self, input_ids: Any, cache: Any = None, use_cache: bool = True) -> None: ...


class Old:
    def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> None: ...


class Wrapped:
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("model", "name"), [(New(), "cache"), (Old(), "past_key_values"), (Wrapped(), OUTPUT_NAME)]
)
def test_the_name_is_the_one_that_forward_has(model: Any, name: str) -> None:
    held = object()
    assert cache_argument(model, held) == {name: held}


def test_the_name_in_a_call() -> None:
    assert cache_name_in({"layer_past": 1, "use_cache": True}) == "layer_past"
    assert cache_name_in({"past_key_values": None}) == "past_key_values"
    assert cache_name_in({"cache": None, "use_cache": True}) == "cache"


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3", "opt"])
def test_models_take_it_without_a_warning_and_hand_it_back(family: str) -> None:
    model: Any = tiny_model(family)  # warnings are errors in these tests
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        out = model(torch.arange(3, 23)[None], **cache_argument(model, cache))
    assert out[OUTPUT_NAME] is cache
    assert cache.get_seq_length() == 20


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("store", ["memory", "host"])
def test_the_old_name_still_reaches_the_tiers(store: str) -> None:
    model: Any = tiny_model("llama")
    ids = torch.arange(3, 103)[None]
    mask = torch.ones_like(ids)
    tokens = []
    for old in (True, False):
        with TieredCache(model, "quest", store=store, max_tokens=200) as cache:
            given = {"past_key_values": cache} if old else cache_argument(model, cache)
            out = model.generate(
                ids, attention_mask=mask, **given, max_new_tokens=20, do_sample=False,
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
            assert cache.get_seq_length() == 119
            assert cache.stats.decode.tokens > 0
        tokens.append(out[0].tolist())
    assert tokens[0] == tokens[1]
