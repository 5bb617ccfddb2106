"""RankMeter: what is said with one layer's selection, against a plain computation of both."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock.models import rank_meter
from penstock.models.cache_argument import cache_argument
from penstock.models.last_queries import LastQueries
from penstock.models.model_shape import inspect_model
from penstock.models.rank_meter import QUERIES, RankMeter, selections
from penstock.testing.tiny_models import tiny_model

KV_HEADS, HEADS, DIM, TOKENS = 2, 4, 16, 1021
JOINT = KV_HEADS * DIM
ROLLING = ("llama", "qwen3", "opt", "phi3", "granite", "gpt_neox")


def test_selections_as_computed_one_by_one() -> None:
    torch.manual_seed(0)
    query, keys = 4 * torch.randn(HEADS, QUERIES, DIM), torch.randn(KV_HEADS, TOKENS, DIM)
    basis = torch.linalg.qr(torch.randn(JOINT, JOINT)).Q[:, :24]
    made = list(selections(query, keys, basis, (8, 24)))
    groups = TOKENS // 4
    for rank, kept in zip((8, 24), made, strict=True):
        components = keys.transpose(0, 1).reshape(TOKENS, JOINT) @ basis[:, :rank]
        for i in range(QUERIES):
            now = TOKENS - QUERIES + i
            shares = torch.zeros(groups)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                rows = basis[kv_head * DIM : (kv_head + 1) * DIM, :rank]
                logits = components @ (query[head, i] @ rows) / math.sqrt(DIM)
                logits[now + 1 :] = float("-inf")
                shares += logits[: 4 * groups].view(-1, 4).amax(1).softmax(0)
            expected = torch.zeros(TOKENS, dtype=torch.bool)
            for group in shares.topk(groups // 16).indices.tolist():
                expected[4 * group : 4 * group + 4] = True
            expected[:4] = True
            expected[now - 63 :] = True
            expected[now + 1 :] = False
            assert torch.equal(kept[i], expected), (rank, i)
    assert not torch.equal(*made), "components make a difference"


def read(model: PreTrainedModel, tokens: int) -> tuple[Tensor, DynamicCache]:
    text = torch.randint(3, 150, (tokens,), generator=torch.Generator().manual_seed(5))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text[None], **cache_argument(model, cache), use_cache=True)
    return text, cache


def bases(model: PreTrainedModel, rank: int) -> list[Tensor]:
    shape = inspect_model(model).kv
    torch.manual_seed(1)
    square = [torch.randn(shape.joint_dim, shape.joint_dim) for _ in range(shape.num_layers)]
    return [torch.linalg.qr(each).Q[:, :rank] for each in square]


@pytest.mark.parametrize(("attention", "layer"), [("sdpa", 0), ("sdpa", 2), ("eager", 1)])
def test_the_divergence_of_one_layer(attention: str, layer: int) -> None:
    """As a whole model says it that reads everything anew each time."""
    model: Any = tiny_model("llama")
    model.set_attn_implementation(attention)
    text, cache = read(model, 700)
    basis = bases(model, 16)[layer]
    meter = RankMeter(model, [layer], 16)
    meter.add(text, copy.deepcopy(cache), [basis])

    held: Any = cache.layers[layer]
    queries, past = LastQueries(model), copy.deepcopy(cache)
    past.crop(-QUERIES)
    with queries.watching(), torch.no_grad():
        model(text[None, -QUERIES:], **cache_argument(model, past))
    query = queries.true(layer, QUERIES)[0]
    masks = list(selections(query, held.keys[0], basis, (8, 16)))

    def said(mask: Tensor | None) -> Tensor:
        def put(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            chosen = {} if mask is None else {"attention_mask": (~mask * -1e9)[None, None]}
            return args, kwargs | chosen

        past = copy.deepcopy(cache)
        past.crop(-QUERIES)
        handle = model.model.layers[layer].register_forward_pre_hook(put, with_kwargs=True)
        with torch.no_grad():
            out: Any = model(text[None, -QUERIES:], **cache_argument(model, past))
        handle.remove()
        logits: Tensor = out.logits[0].double()
        return logits

    true = said(None).log_softmax(-1)
    for mask, cost in zip(masks, meter.costs()[0], strict=True):
        found = said(mask).log_softmax(-1)
        expected = float((true.exp() * (true - found)).sum(-1).mean())
        assert cost == pytest.approx(expected, rel=1e-3)
        assert expected > 1e-4


@pytest.mark.parametrize("family", ROLLING)
def test_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_meter, "LEAST_TOKENS", 100)
    model = tiny_model(family)
    text, cache = read(model, 300)
    before = copy.deepcopy(cache)
    meter = RankMeter(model, inspect_model(model).tiered_layers, 24)
    told: list[int] = []
    meter.add(text, cache, bases(model, 24), told.append)
    assert sum(told) == meter.tokens_read(300) == 3 * 3 * QUERIES
    costs = meter.costs()
    assert (len(costs), len(costs[0])) == (3, 3)
    assert all(cost > 0 for row in costs for cost in row)
    for now, then in zip(cache.layers, before.layers, strict=True):
        assert torch.allclose(now.keys, then.keys, atol=1e-4), "the cache comes back"
    again = RankMeter(model, inspect_model(model).tiered_layers, 24)
    again.add(text, cache, bases(model, 24))
    assert torch.allclose(torch.tensor(again.costs()), torch.tensor(costs), rtol=1e-2, atol=1e-5)


def test_the_mean_over_texts() -> None:
    model = tiny_model("llama")
    layers, by_rank = inspect_model(model).tiered_layers, bases(model, 8)
    alone, both = [], RankMeter(model, layers, 8)
    for tokens in (600, 800):
        one = RankMeter(model, layers, 8)
        for meter in (one, both):
            meter.add(*read(model, tokens), by_rank)
        alone.append(torch.tensor(one.costs()))
    assert torch.allclose(torch.tensor(both.costs()), (alone[0] + alone[1]) / 2)
    assert not torch.allclose(alone[0], alone[1])


@pytest.mark.parametrize(
    ("family", "tokens", "rank"), [("llama", 500, 16), ("llama", 600, 7), ("gemma3", 600, 16)]
)
def test_nothing_to_measure(family: str, tokens: int, rank: int) -> None:
    """A short text, fewer components than a step, layers that forget what slid out."""
    model = tiny_model(family)
    text, cache = read(model, tokens)
    meter = RankMeter(model, inspect_model(model).tiered_layers, rank)
    told: list[int] = []
    meter.add(text, cache, bases(model, rank), told.append)
    assert meter.costs() == ()
    assert sum(told) == meter.tokens_read(tokens), "told as read all the same"
