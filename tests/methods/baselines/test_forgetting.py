"""Methods that drop tokens: exact if nothing is dropped, and the dead stay dead."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock import TieredCache
from penstock.core.errors import ConfigError
from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods.baselines.attention_history import (
    AttentionHistoryIndex,
    HeavyHitters,
    ObservationVotes,
    TimeStamps,
)
from penstock.methods.baselines.forgetting import ForgettingPolicy
from penstock.methods.baselines.h2o import H2O
from penstock.methods.baselines.raas import RaaS
from penstock.methods.baselines.snapkv import SnapKV
from penstock.methods.baselines.streaming_llm import RecencyIndex, StreamingLLM
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

POLICIES: list[type[ForgettingPolicy]] = [StreamingLLM, SnapKV, H2O, RaaS]
PROMPT_TOKENS, PADDING = 90, (0, 37, 61)
HEADS, HEAD_DIM, TOKENS = 2, 8, 300
SHAPE = KVShape(
    num_layers=1, num_query_heads=HEADS, num_kv_heads=1, head_dim=HEAD_DIM, dtype=torch.float32
)


def make_index(kind: str, rows: int = 2, tokens: int = TOKENS) -> AttentionHistoryIndex:
    options: dict[str, Any] = {
        "batch": rows, "max_units": tokens, "scaling": HEAD_DIM**-0.5,
        "device": torch.device("cpu"),
    }  # fmt: skip
    if kind == "votes":
        return ObservationVotes(SHAPE, **options)
    if kind == "hitters":
        return HeavyHitters(SHAPE, **options)
    return TimeStamps(SHAPE, selected_units=30, **options)


def fill(index: AttentionHistoryIndex, keys: Tensor, queries: Tensor | None) -> None:
    """What the runtime does on the first decode step."""
    if queries is not None:
        index.see_queries(queries)
    index.fit(keys[:, :1], torch.tensor([keys.shape[1] - 1]))
    for take in (index.look, index.append):
        for start in range(0, keys.shape[1], 170):
            take(keys[:, start : start + 170], start)


def prompts(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (batch, PROMPT_TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        ids[row, : PADDING[row]] = 0
        mask[row, : PADDING[row]] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, cache: Any, inputs: dict[str, Tensor], tokens: int = 9) -> Any:
    return model.generate(
        **inputs, **cache_argument(model, cache), max_new_tokens=tokens, do_sample=False,
        pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family)


@functools.cache
def plain_answer(family: str) -> Any:
    """What the model answers to three prompts without Penstock."""
    model = model_of(family)
    return generate(model, DynamicCache(config=model.config), prompts(3))


@pytest.mark.parametrize("policy", [SnapKV(window_queries=8), H2O(), RaaS()])
@pytest.mark.parametrize("tokens", [20, 90])
def test_a_padded_row_forgets_what_it_does_alone(policy: ForgettingPolicy, tokens: int) -> None:
    """Whatever stands in the padding; the shorter prompt has fewer tokens than are asked."""
    chosen = replace(policy, selected_tokens=12, window_tokens=4, sink_tokens=2)
    shape = replace(SHAPE, num_kv_heads=2, num_query_heads=4)
    random = torch.Generator().manual_seed(0)
    runtimes = [
        TieredRuntime(
            RuntimeSettings(
                shape=shape, policy=chosen, limit_bytes=None, store="memory", max_tokens=TOKENS,
                exact=False, adapter=None, device=torch.device("cpu"),
            ),
            batch,
        )
        for batch in (2, 1)
    ]  # fmt: skip
    for step in range(8):
        new, length = PROMPT_TOKENS + 30 if step == 0 else 1, PROMPT_TOKENS + 30 + step
        query = torch.randn(2, 4, new, HEAD_DIM, generator=random)
        keys, values = torch.randn(2, 2, 2, new, HEAD_DIM, generator=random)
        visible = torch.ones(2, length, dtype=torch.bool)
        visible[1, : PROMPT_TOKENS + 30 - tokens] = False
        own = min(new, tokens)
        both = AttentionCall(3 * query, keys, values, 0.3, visible=visible)
        alone = (3 * query[1:, :, -own:], keys[1:, :, -own:], values[1:, :, -own:])
        left = runtimes[0].attend(0, both)[1, -own:]
        right = runtimes[1].attend(0, AttentionCall(*alone, 0.3, visible=None))[0]
        assert (left - right).abs().max().item() < 1e-4, step
    for runtime in runtimes:
        runtime.close()


@pytest.mark.parametrize(
    ("family", "policy"), [*zip(("llama", "qwen2") * 2, POLICIES, strict=True)]
)
def test_exact_when_everything_is_kept(family: str, policy: type[ForgettingPolicy]) -> None:
    model, expected = model_of(family), plain_answer(family)
    chosen = policy(window_tokens=8, selected_tokens=10**6)
    with TieredCache(model, chosen, store="memory", max_tokens=160, batch_size=3) as cache:
        actual = generate(model, cache, prompts(3))
        assert not cache.plan.is_resident
        assert cache.report().used_bytes <= cache.report().limit_bytes
    assert torch.equal(expected.sequences, actual.sequences)
    difference = torch.stack(expected.logits) - torch.stack(actual.logits)
    assert difference.abs().max().item() < 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_dropped_is_never_read_again(policy: type[ForgettingPolicy]) -> None:
    """Slots hold the survivors: after the cut a step reads at most the token that it lets in."""
    model = tiny_model("llama")
    chosen = policy(window_tokens=8, selected_tokens=16)
    with TieredCache(model, chosen, store="memory", max_tokens=160, batch_size=1) as cache:
        generate(model, cache, prompts(1), tokens=2)
        after_cut = cache.stats.decode.units_wanted - cache.stats.decode.units_hit
        rows = model.config.num_hidden_layers * (2 if chosen.per_head else 1)
        assert after_cut == rows * 16
        layer: Any = cache.tiers.layers[0]
        dead = None
        if policy is not StreamingLLM:
            dead = ~layer.index.alive[:, : layer.index._scored]
            assert dead.any()
        held = layer.table.slot_of[:, : PROMPT_TOKENS - 9] >= 0
        ids = torch.randint(3, VOCABULARY, (1, 1))
        for _ in range(12):
            model(input_ids=ids, **cache_argument(model, cache))
        decode = cache.stats.decode
        assert decode.units_wanted - decode.units_hit <= rows * (16 + 12)
        assert not (~held & (layer.table.slot_of[:, : PROMPT_TOKENS - 9] >= 0)).any()
        if dead is not None:
            assert not layer.index.alive[:, : dead.shape[1]][dead].any()
        assert (layer.table.slot_of >= 0).sum(axis=1).tolist() == [16] * len(held)


@pytest.mark.parametrize("kind", ["votes", "hitters", "stamps"])
def test_weights_are_those_of_causal_attention(kind: str) -> None:
    """Two passes over pieces find the softmax of a plain one."""
    torch.manual_seed(0)
    keys, queries = torch.randn(2, TOKENS, 1, HEAD_DIM), torch.randn(2, HEADS, 32, HEAD_DIM)
    index = make_index(kind)
    fill(index, keys, queries)
    logits = torch.einsum("rhqd,rtd->rhqt", queries, keys[:, :, 0]) * HEAD_DIM**-0.5
    later = torch.arange(TOKENS) > torch.arange(TOKENS - 32, TOKENS)[:, None]
    weights = logits.masked_fill(later, float("-inf")).softmax(-1)
    values, summed = index.score(queries[:, :, -1], TOKENS), weights.sum((1, 2))
    if kind == "hitters":
        assert torch.allclose(values, summed, atol=1e-5)
    elif kind == "votes":
        pooled = torch.nn.functional.pad(summed[:, : TOKENS - 32], (3, 3)).unfold(1, 7, 1).mean(2)
        assert torch.allclose(values[:, : TOKENS - 32], pooled, atol=1e-5)
        assert (values[:, TOKENS - 32 :] > pooled.max()).all()
    else:
        renewed = (weights.mean(1) >= 1e-4).to(torch.float32)
        steps = torch.arange(TOKENS - 32, TOKENS)[:, None]
        stamps = torch.where(renewed > 0, steps, -1).amax(1)
        assert torch.equal(values.floor().long(), torch.maximum(stamps, torch.arange(TOKENS)))


@pytest.mark.parametrize("kind", ["votes", "hitters", "stamps"])
def test_a_planted_needle_is_kept(kind: str) -> None:
    torch.manual_seed(1)
    keys, queries = torch.randn(2, TOKENS, 1, HEAD_DIM), torch.randn(2, HEADS, 32, HEAD_DIM)
    keys[:, 77, 0] = 4 * queries[:, :, -1].sum(1)
    index = make_index(kind)
    fill(index, keys, queries)
    scores = index.score(queries[:, :, -1], 240)
    assert all(77 in row for row in scores.topk(24, dim=1).indices.tolist())


@pytest.mark.parametrize("kind", ["votes", "hitters", "stamps"])
def test_priced_as_stored(kind: str) -> None:
    index = make_index(kind)
    index.see_queries(torch.randn(2, HEADS, 32, HEAD_DIM))
    assert index._queries is not None
    priced = AttentionHistoryIndex.num_bytes(SHAPE, batch=2, max_units=TOKENS)
    assert priced == index._values.nbytes + index._queries.nbytes
    fill(index, torch.randn(2, TOKENS, 1, HEAD_DIM), index._queries)
    assert index._queries is index._sums is None


@pytest.mark.parametrize("kind", ["votes", "hitters", "stamps"])
def test_rows_can_be_taken(kind: str) -> None:
    torch.manual_seed(2)
    keys, queries = torch.randn(2, TOKENS, 1, HEAD_DIM), torch.randn(2, HEADS, 32, HEAD_DIM)
    index, copy = make_index(kind), make_index(kind, rows=3)
    fill(index, keys[:, :200], queries)
    index.score(queries[:, :, 0], 180)
    kept = Selection(np.stack([np.arange(30), np.arange(60, 90)]), None)
    index.observe(kept, torch.rand(2, 30))
    copy.take_rows_from(index, torch.tensor([1, 0, 1]))
    assert copy.ready
    for twin in (index, copy):
        twin.append(keys[[0] * len(twin._values), 200:201], 200)
    one, other = index.score(queries[:, :, 0], 181), copy.score(queries[[1, 0, 1], :, 0], 181)
    assert torch.equal(other, one[[1, 0, 1]])
    assert index.alive[0, 0]
    assert not index.alive[1, 0]
    index.take_rows_from(index, torch.tensor([1, 1]))
    assert torch.equal(index.score(queries[:, :, 0], 181), other[[0, 2]])


@pytest.mark.parametrize("kind", ["votes", "hitters", "stamps"])
def test_a_second_prompt_is_valued_and_the_dead_stay_dead(kind: str) -> None:
    torch.manual_seed(3)
    keys, queries = torch.randn(2, TOKENS, 1, HEAD_DIM), torch.randn(2, HEADS, 32, HEAD_DIM)
    index = make_index(kind)
    fill(index, keys[:, :100], queries)
    index.score(queries[:, :, 0], 90)
    index.observe(Selection(np.tile(np.arange(40, 70), (2, 1)), None), torch.rand(2, 30))
    index.append(keys[:, 100:150], 100)
    assert not index.ready
    fill(index, keys[:, :200], queries)
    dead = torch.ones(90, dtype=torch.bool)
    dead[40:70] = False
    assert not index.alive[:, :90][:, dead].any()
    assert index.alive[:, :90][:, ~dead].all()
    assert index.alive[:, 90:200].all()
    index.append(keys[:, :20], 0)
    fill(index, keys[:, :200], None)
    assert index.alive[:, :200].all(), "the sequence has begun anew"


def test_recency_takes_rows_and_revives_what_is_written_anew() -> None:
    index, copy = RecencyIndex(selected_units=3), RecencyIndex(selected_units=3)
    query, low = torch.zeros(1, HEADS, HEAD_DIM), float("-inf")
    assert index.score(query, 5).tolist() == [[low, low, 2, 3, 4]]
    copy.take_rows_from(index, torch.tensor([0]))
    assert copy.score(query, 4).tolist() == [[low, low, 2, 3]]
    copy.append(torch.zeros(1, 1, 1, HEAD_DIM), 1)
    assert copy.score(query, 3).tolist() == [[low, 1, 2]]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (H2O, {"group_tokens": 2}), (H2O, {"reuse_tokens": 800}), (H2O, {"selected_tokens": 1}),
        (SnapKV, {"window_queries": 33}), (SnapKV, {"kernel_tokens": 4}), (RaaS, {"threshold": 1}),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(
    policy: type[ForgettingPolicy], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        policy(**options)
