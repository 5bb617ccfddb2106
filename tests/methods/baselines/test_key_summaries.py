"""ArkVale, PQCache and ClusterKV: exact at full budget, find a needle, priced as stored."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from penstock import TieredCache
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy, top_units
from penstock.engine.retrieval_policy import BaselinePolicy
from penstock.engine.scored_policy import ScoredIndex
from penstock.kernels.kmeans import kmeans, nearest
from penstock.methods.baselines.arkvale import ArkVale
from penstock.methods.baselines.clusterkv import ClusterKV
from penstock.methods.baselines.pqcache import PQCache
from penstock.methods.baselines.prompt_sample import PromptSample
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

POLICIES = (ArkVale, PQCache, ClusterKV)
each_policy = pytest.mark.parametrize("make", POLICIES)
TOKENS, HEADS, HEAD_DIM = 2000, 2, 32
SHAPE = KVShape(
    num_layers=3, num_query_heads=HEADS, num_kv_heads=1, head_dim=HEAD_DIM, dtype=torch.float32
)
PADDING = (0, 37, 61)
STEPS = 12


def sizing(rows: int, dtype: torch.dtype = torch.float32) -> SizingRequest:
    return SizingRequest(
        shape=replace(SHAPE, dtype=dtype), batch=rows, max_tokens=TOKENS, limit_bytes=None,
        sector_bytes=512, device_is_cpu=True, has_adapter=False,
    )  # fmt: skip


def make_index(policy: SelectionPolicy, rows: int, dtype: torch.dtype = torch.float32) -> KeyIndex:
    group_tokens = int(getattr(policy, "group_tokens", 1))
    return policy.make_index(
        IndexRequest(
            shape=replace(SHAPE, dtype=dtype),
            batch=rows,
            max_units=-(-TOKENS // group_tokens),
            group_tokens=group_tokens,
            scaling=1.0,
            adapter=None,
            device=torch.device("cpu"),
            score_tokens=0,
            selected_units=10,
        )
    )


def take_in(index: KeyIndex, keys: Tensor, block: int = 400) -> None:
    """As the runtime does on the first decode step."""
    starts = range(0, keys.shape[1], block)
    if not index.ready:
        index.fit(keys[:, ::100], torch.arange(0, keys.shape[1], 100))
        for start in starts if index.looks_first else ():
            index.look(keys[:, start : start + block], start)
    for start in starts:
        index.append(keys[:, start : start + block], start)


def stored_bytes(index: KeyIndex) -> int:
    if isinstance(index, ScoredIndex):
        return sum(part.nbytes for part in index.summary)
    return sum(value.nbytes for value in vars(index).values() if isinstance(value, Tensor))


# Generation -----------------------------------------------------------------------------------


def generate(model: Any, cache: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (3, 90), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate(PADDING):
        ids[row, :padding] = 0
        mask[row, :padding] = 0
    return model.generate(
        input_ids=ids, attention_mask=mask, **cache_argument(model, cache), max_new_tokens=STEPS,
        do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        (
            "llama",
            PQCache(window_tokens=8, selected_tokens=10**6, group_tokens=4, reuse_tokens=0),
        ),
        (
            "qwen2",
            ClusterKV(
                window_tokens=8, selected_tokens=10**6, tokens_per_cluster=5, recluster_tokens=10
            ),
        ),
    ],
    ids=["pqcache-groups", "clusterkv-often"],
)
def test_full_budget_equals_the_plain_model(family: str, policy: SelectionPolicy) -> None:
    model = tiny_model(family)
    expected = generate(model, DynamicCache(config=model.config))
    with TieredCache(model, policy, store="memory", max_tokens=160, batch_size=3) as cache:
        actual = generate(model, cache)
        report = cache.report()
        assert report.used_bytes <= report.limit_bytes
        assert cache.stats.decode.read_bytes > 0
        # The same cache again, for another sequence.
        cache.reset()
        again = generate(model, cache)
    for got in (actual, again):
        assert torch.equal(expected.sequences, got.sequences)
        difference = torch.stack(expected.logits) - torch.stack(got.logits)
        assert difference.abs().max().item() <= 1e-4


@each_policy
def test_small_selections_and_beams(make: type[BaselinePolicy]) -> None:
    model = tiny_model("llama")
    policy = make(window_tokens=4, selected_tokens=32)
    ids = torch.randint(3, VOCABULARY, (1, 90), generator=torch.Generator().manual_seed(0))
    with TieredCache(model, policy, store="memory", max_tokens=160) as cache:
        out: Any = model.generate(
            input_ids=ids, **cache_argument(model, cache), max_new_tokens=16, num_beams=3,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    assert out.shape == (1, 106)


# Indexes --------------------------------------------------------------------------------------


@each_policy
@pytest.mark.parametrize(
    ("place", "dtype"), [(0, torch.float32), (777, torch.bfloat16), (1900, torch.float32)]
)
def test_finds_a_needle(make: type[BaselinePolicy], place: int, dtype: torch.dtype) -> None:
    """One unit whose keys align with the query is among the best tenth."""
    policy, _ = make().index_sizes(sizing(3, dtype))[0]
    group_tokens = int(getattr(policy, "group_tokens", 1))
    torch.manual_seed(place)
    query = torch.randn(3, 1, HEAD_DIM).expand(-1, HEADS, -1)
    keys = torch.randn(3, TOKENS, 1, HEAD_DIM)
    unit = place // group_tokens
    keys[:, unit * group_tokens : (unit + 1) * group_tokens] = query[:, :1].unsqueeze(1)
    index = make_index(policy, 3, dtype)
    take_in(index, keys.to(dtype))
    units = TOKENS // group_tokens
    best = top_units(index.score(query.to(dtype), units), np.zeros(3, dtype=np.int64), units // 10)
    for row in best.unit_ids:
        assert unit in row


@each_policy
def test_priced_as_stored(make: type[BaselinePolicy]) -> None:
    sizes = make().index_sizes(sizing(2))
    for policy, size in sizes:
        index = make_index(policy, 2)
        assert stored_bytes(index) == size.index_bytes
        take_in(index, torch.randn(2, 1200, 1, HEAD_DIM))
        assert stored_bytes(index) == size.index_bytes
        assert not any(isinstance(value, PromptSample) for value in vars(index).values())
    held = [size.index_bytes for _, size in sizes]
    assert held[-1] == min(held)
    assert len(set(held)) == len(held)


@each_policy
def test_rows_can_be_taken(make: type[BaselinePolicy]) -> None:
    torch.manual_seed(0)
    policy, _ = make().index_sizes(sizing(2))[0]
    keys, query = torch.randn(2, TOKENS, 1, HEAD_DIM), torch.randn(2, HEADS, HEAD_DIM)
    source, wider = make_index(policy, 2), make_index(policy, 3)
    take_in(source, keys[:, :1600])
    source.append(keys[:, 1600:1760], 1600)
    wider.take_rows_from(source, torch.tensor([1, 0, 1]))
    assert wider.ready
    for first in range(1760, TOKENS, 80):
        source.append(keys[:, first : first + 80], first)
        wider.append(keys[[1, 0, 1], first : first + 80], first)
    units = TOKENS // int(getattr(policy, "group_tokens", 1))
    scores = source.score(query, units)
    assert torch.equal(wider.score(query[[1, 0, 1]], units), scores[[1, 0, 1]])
    source.take_rows_from(source, torch.tensor([1, 1]))
    assert torch.equal(source.score(query[[1, 1]], units), scores[[1, 1]])


# Parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cosine", [False, True])
def test_kmeans_finds_what_is_apart(cosine: bool) -> None:
    torch.manual_seed(0)
    centres = torch.eye(4)[None] * torch.tensor([5.0, 9.0])[:, None, None]
    points = centres.repeat(1, 50, 1) + 0.1 * torch.randn(2, 200, 4)

    def centroids_of(seed: int, elements: int = 1 << 18) -> Tensor:
        return kmeans(points, 4, iterations=10, cosine=cosine, seed=seed, elements=elements)

    def spread(centroids: Tensor) -> float:
        ids = nearest(points, centroids, cosine=cosine, elements=1000)
        own = centroids.gather(1, ids.unsqueeze(-1).expand_as(points))
        return (points - own).square().mean().item()

    assert min(spread(centroids_of(seed)) for seed in range(8)) < 0.011
    assert torch.equal(centroids_of(3), centroids_of(3))
    in_chunks = centroids_of(3, elements=2 * 4 * 30)
    assert torch.allclose(in_chunks, centroids_of(3), atol=1e-5)


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_prompt_sample_is_even(block: int) -> None:
    keys = torch.arange(1000.0).view(1, 1000, 1)
    sample = PromptSample(1, 512, 1, keys)
    for start in range(0, 1000, block):
        sample.take(keys[:, start : start + block], start)
    assert sample.keys.flatten().tolist() == list(range(0, 1000, 2))
