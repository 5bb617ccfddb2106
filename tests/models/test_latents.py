"""Multi-head latent attention: the tiers keep latents, and answers are the plain model's."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from penstock import KVSwap, TieredCache
from penstock.core.errors import UnsupportedModelError
from penstock.evaluate.audit.reference import forward, make_reference
from penstock.generation.prompts import make_batch
from penstock.methods import FlexGen, SelectionPolicy
from penstock.models.beam_decoder import make_decoder
from penstock.models.cache_argument import cache_argument
from penstock.models.calibrate import calibrate
from penstock.models.latents import caches_latents
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.testing.tiny_families import VOCABULARY, tiny_family

EVERYTHING = KVSwap(window_tokens=8, selected_tokens=10**6, rank=8)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_family("deepseek_v3")


def draw(count: int, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, VOCABULARY, (rows, count), generator=generator)


def answer(model: PreTrainedModel, cache: Any, ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(
        input_ids=ids, **cache_argument(model, cache), max_new_tokens=6, do_sample=False,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        **{"eos_token_id": None, **options},
    )  # fmt: skip


def test_tokens_are_as_small_as_the_plain_cache(model: PreTrainedModel) -> None:
    kv, config = inspect_model(model).kv, model.config
    if caches_latents(model):
        assert (kv.num_kv_heads, kv.value_width) == (1, config.kv_lora_rank)
        numbers = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        assert (kv.head_dim, kv.value_width) == (config.qk_head_dim, config.v_head_dim)
        numbers = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    assert kv.token_bytes == 4 * numbers


@pytest.fixture(scope="module")
def plain_turns(model: PreTrainedModel) -> list[Any]:
    """What the plain model answers first, to a second turn, and behind a crop."""
    cache = DynamicCache(config=model.config)
    first = answer(model, cache, draw(70))
    second = answer(model, cache, torch.cat([first.sequences, draw(9)], dim=1))
    cache.crop(-20)
    return [first, second, answer(model, cache, second.sequences[:, :-19])]


@pytest.mark.parametrize(
    ("policy", "options"),
    [(EVERYTHING, {}), (KVSwap(), {"exact": True, "memory": "1/2"}), (FlexGen(), {})],
    ids=["everything", "exact", "flexgen"],
)
def test_turns_crops_and_lookup(
    model: PreTrainedModel, plain_turns: list[Any], policy: SelectionPolicy,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """A long first answer, a second turn, tokens taken back, and prompt lookup behind them."""
    ids, (first, expected, again) = draw(70), plain_turns
    with TieredCache(model, policy, store="memory", max_tokens=120, **options) as cache:
        assert torch.equal(first.sequences, answer(model, cache, ids).sequences)
        actual = answer(model, cache, torch.cat([first.sequences, draw(9)], dim=1))
        assert torch.equal(expected.sequences, actual.sequences)
        apart = torch.stack(expected.logits) - torch.stack(actual.logits)
        assert float(apart.abs().max()) < 1e-4
        cache.crop(-20)
        actual = answer(model, cache, expected.sequences[:, :-19])
        assert torch.equal(again.sequences, actual.sequences)
        cache.reset()
        # transformers 5.2 looks for an end token; no token of these models has that number.
        looked = answer(model, cache, ids, prompt_lookup_num_tokens=2, eos_token_id=VOCABULARY)
        assert torch.equal(looked.sequences, first.sequences)


def test_predictions_are_of_the_latents(model: PreTrainedModel) -> None:
    """A layer's own input gives the query that its attention is called with."""
    seen: list[tuple[int, torch.Tensor]] = []
    with TieredCache(model, EVERYTHING, store="memory", max_tokens=120, must_tier=True) as cache:
        begin = cache.tiers.begin_fetch

        def see(layer: int, query: torch.Tensor) -> None:
            seen.append((layer, query))
            begin(layer, query)

        cache._runtime.begin_fetch = see  # type: ignore[method-assign]
        answer(model, cache, draw(70))
        width = cache.tiers.settings.shape.head_dim
    assert {layer for layer, _ in seen} == {0, 1, 2, 3}
    assert all(query.shape == (1, 4, width) for _, query in seen)


def test_what_cannot_be_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedModelError, match="know one width"):
        TieredCache(model, "kvswap", store="host", max_tokens=64)
    with pytest.raises(UnsupportedModelError, match="beams of a search"):
        make_decoder(model, beams=2, width=1, max_tokens=64)


def test_other_expansions_are_refused() -> None:
    model: Any = tiny_family("deepseek_v3")
    if not caches_latents(model):
        pytest.skip("this transformers caches expanded keys and values")
    attention = model.model.layers[0].self_attn
    expand, linear = attention.expand_kv, attention.kv_b_proj

    def doubled(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = expand(*given)
        return keys, 2 * values

    attention.expand_kv = doubled
    with pytest.raises(UnsupportedModelError, match="does more with its latents"):
        TieredCache(model, "full", store="memory", max_tokens=64)
    attention.expand_kv, attention.kv_b_proj = expand, nn.Sequential(linear)
    with pytest.raises(UnsupportedModelError, match="load the model unquantised"):
        TieredCache(model, "full", store="memory", max_tokens=64)


def test_calibration_and_audits_see_latents(model: PreTrainedModel) -> None:
    """A basis is of the tiers' keys; a prompt that an audit computed once fills a cache."""
    shape, text = inspect_model(model), draw(150)
    basis = calibrate(model, [text[0]], rank=16)
    assert {layer.basis.shape[0] for layer in basis.layers} == {shape.kv.joint_dim}
    loaded: Any = LoadedModel(model=model, tokenizer=None, name="tiny")
    batch = make_batch(loaded, [text[0].tolist()], new_tokens=2, pad_token_id=0)
    reference = make_reference(loaded, batch, new_tokens=2, chunk=64, ends=frozenset())
    few = KVSwap(window_tokens=8, selected_tokens=32, rank=16)
    for policy, exact in ((few, False), (few, True), (EVERYTHING, False)):
        with TieredCache(
            model, policy, store="memory", max_tokens=160, adapter=basis, exact=exact,
            must_tier=True,
        ) as cache:  # fmt: skip
            reference.fill(loaded.model, cache)
            said = forward(loaded.model, reference.tokens[:, :1], reference.mask[:, :151], cache)
        apart = float((said - reference.log_probs[0]).abs().max())
        assert (apart < 1e-3) == (policy is EVERYTHING or exact), apart
