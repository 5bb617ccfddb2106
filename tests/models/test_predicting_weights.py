"""Copies of the predicting weights: booked when there is room, and good enough to predict with."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock import KVSwap, TieredCache
from penstock.kernels.int8_linear import Int8Linear
from penstock.models.cache_argument import cache_argument
from penstock.models.query_projection import QueryProjection

POLICY = KVSwap(window_tokens=8, selected_tokens=16, reuse_tokens=16, rank=16, index_bits=8)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90, hidden_size=128, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=400,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def decode(model: LlamaForCausalLM, cache: TieredCache) -> QueryProjection:
    with torch.no_grad():
        model(torch.arange(3, 83)[None], **cache_argument(model, cache))
        for token in (5, 6, 7):
            model(torch.tensor([[token]]), **cache_argument(model, cache))
    assert cache._hooks is not None
    return cache._hooks._projection


@pytest.mark.parametrize("room", [True, False])
def test_copies_are_made_where_the_budget_has_room(model: LlamaForCausalLM, room: bool) -> None:
    if not Int8Linear.is_fast(model.model.layers[1].self_attn.q_proj.weight):
        pytest.skip("no compiled kernel here")
    with TieredCache(model, POLICY, store="memory", max_tokens=200) as cache:
        least = cache.plan.total_bytes - cache.plan.predictor_bytes
        copies_bytes = cache.plan.predictor_bytes
    assert copies_bytes == 2 * (128 * 128 + 4 * 128), "layers 1 and 2"
    limit = least + (copies_bytes if room else copies_bytes - 1)
    with TieredCache(model, POLICY, memory=limit, store="memory", max_tokens=200) as cache:
        projection = decode(model, cache)
        assert sorted(projection._copies) == ([1, 2] if room else [])
        assert cache.report().items.get("predicting weights", 0) == (copies_bytes if room else 0)
        assert cache.report().used_bytes <= limit
        hidden = torch.randn(1, 1, 128)
        position = torch.tensor([[90]])
        kwargs = {"position_embeddings": model.model.rotary_emb(hidden, position)}
        direct = projection.project(1, hidden, kwargs)
        projection._copies.clear()
        exact = projection.project(1, hidden, kwargs)
        assert direct is not None
        assert exact is not None
        assert torch.cosine_similarity(direct, exact, dim=-1).min() > 0.999
