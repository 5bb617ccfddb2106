"""What a model's attention gets is seen before a cache is planned: its dtype, and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock import KVSwap, TieredCache
from penstock.core.errors import CacheStateError, UnsupportedModelError
from penstock.models.cache_argument import cache_argument
from penstock.models.first_look import first_look
from penstock.models.model_shape import inspect_model
from penstock.testing.tiny_families import tiny_family
from penstock.testing.tiny_models import tiny_model

ALL = KVSwap(window_tokens=8, selected_tokens=10**6)
REFUSED = {
    "diffllama": "never received the keys and values",
    "jetmoe": "never received the keys and values",
    "doge": "own code does not work with Penstock's attention and mask .*'dtype'",
    "git": "never received the keys and values",
    "dory": "adds layers of its own to a cache",
}


def generate(model: PreTrainedModel, cache: Any) -> Tensor:
    ids = torch.arange(3, 73)[None]
    out: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), **cache_argument(model, cache), max_new_tokens=6,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("family", REFUSED)
def test_refused_before_the_first_token(family: str) -> None:
    try:
        model = tiny_family(family)
    except KeyError:
        pytest.skip("this transformers does not know it")
    if not model._can_set_attn_implementation():
        pytest.skip("without the attention interface in this transformers")
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=REFUSED[family]):
        TieredCache(model, "full", store="memory", max_tokens=100)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "gpt_neox"])
def test_what_is_seen_is_what_the_configuration_says(family: str) -> None:
    model = tiny_model(family)
    shape = inspect_model(model)
    assert first_look(model, shape) == (shape.kv, torch.device("cpu"))


def test_a_configuration_that_promises_otherwise_is_refused() -> None:
    model = tiny_model("llama")
    model.config.num_key_value_heads = 4
    with pytest.raises(UnsupportedModelError, match=r"2 KV heads, .* promises 4, 4, 12 and 12"):
        TieredCache(model, "full", store="memory", max_tokens=100)


@pytest.mark.parametrize(
    ("family", "policy", "exact"),
    [("qwen3", ALL, False), ("phi3", "kvswap", False), ("granite", "kvswap", True)],
)
def test_autocast(family: str, policy: Any, exact: bool) -> None:
    model = tiny_model(family)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = generate(model, DynamicCache(config=model.config))
        shape, _ = first_look(model, inspect_model(model))
        assert shape.dtype == torch.bfloat16
        with TieredCache(model, policy, store="memory", max_tokens=100, exact=exact) as cache:
            out = generate(model, cache)
            assert out.shape == expected.shape
            assert cache._settings.shape.dtype == torch.bfloat16


def test_a_cache_from_outside_autocast_is_refused_and_stays_whole() -> None:
    model = tiny_model("llama")
    expected = generate(model, DynamicCache(config=model.config))
    with TieredCache(model, ALL, store="memory", max_tokens=100) as cache:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(CacheStateError, match=r"in torch\.bfloat16 now, .* for torch\.float32"),
        ):
            generate(model, cache)
        assert torch.equal(generate(model, cache), expected)


def test_layers_in_another_dtype_than_the_model_says() -> None:
    """The embeddings are in float32, which is what `model.dtype` says; keys are in bfloat16."""
    model: Any = tiny_model("qwen2", dtype=torch.bfloat16)
    model.model.embed_tokens.float()
    model.model.embed_tokens.register_forward_hook(lambda *args: args[2].bfloat16())
    assert model.dtype == torch.float32
    step = torch.tensor([[7]])
    with (
        TieredCache(model, ALL, store="memory", max_tokens=100, must_tier=True) as cache,
        torch.no_grad(),
    ):
        plain = DynamicCache(config=model.config)
        for ids in (torch.arange(3, 73)[None], step, step):
            mine = model(ids, **cache_argument(model, cache)).logits
            theirs = model(ids, **cache_argument(model, plain)).logits
            assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()
        assert cache._settings.shape.dtype == torch.bfloat16
