"""Loki, InfiniGen and LeoAM: exact on whole models, priced right, needles found, rows moved."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock import TieredCache
from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest
from penstock.engine.retrieval_policy import BaselinePolicy
from penstock.methods.baselines.infinigen import InfiniGen, InfiniGenStar, InfiniGenStarReuse
from penstock.methods.baselines.leoam import LeoAM
from penstock.methods.baselines.loki import Loki
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

CLASSES: list[type[BaselinePolicy]] = [Loki, InfiniGen, InfiniGenStar, InfiniGenStarReuse, LeoAM]
PADDING = (0, 37, 61)
PROMPT_TOKENS, NEW_TOKENS = 90, 6


def prompts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (3, PROMPT_TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate(PADDING):
        ids[row, :padding] = 0
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, cache: Any, **kwargs: Any) -> Any:
    return model.generate(
        **prompts(), **cache_argument(model, cache), max_new_tokens=NEW_TOKENS, do_sample=False,
        pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        **kwargs,
    )  # fmt: skip


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family)


@functools.cache
def plain_answer(family: str, beams: int = 1) -> Any:
    """What the model answers without Penstock."""
    model = model_of(family)
    return generate(model, DynamicCache(config=model.config), **beams_of(beams))


def beams_of(count: int) -> dict[str, int]:
    return {} if count == 1 else {"num_beams": count}


def changes(policy_class: type[BaselinePolicy]) -> dict[str, int]:
    return {"group_tokens": 4} if policy_class is LeoAM else {}


def policy_of(policy_class: type[BaselinePolicy], **options: Any) -> BaselinePolicy:
    return policy_class(**{"window_tokens": 8, **changes(policy_class), **options})


@pytest.mark.parametrize(
    ("family", "policy_class", "beams"),
    [
        ("llama", Loki, 1), ("qwen2", InfiniGen, 2), ("llama", InfiniGenStar, 2),
        ("qwen2", InfiniGenStarReuse, 1), ("llama", LeoAM, 2),
    ],
)  # fmt: skip
def test_selecting_all_equals_the_plain_model(
    family: str, policy_class: type[BaselinePolicy], beams: int
) -> None:
    model, expected = model_of(family), plain_answer(family, beams)
    policy = policy_of(policy_class, selected_tokens=10**6)
    with TieredCache(model, policy, store="memory", max_tokens=160, batch_size=3 * beams) as cache:
        actual = generate(model, cache, **beams_of(beams))
        assert cache.stats.decode.units_wanted > 0
        report = cache.report()
        assert report.used_bytes <= report.limit_bytes
    assert torch.equal(expected.sequences, actual.sequences)
    difference = torch.stack(expected.logits) - torch.stack(actual.logits)
    assert difference.abs().max().item() <= 1e-4


@pytest.mark.parametrize("policy_class", CLASSES)
def test_selecting_few_changes_the_answer(policy_class: type[BaselinePolicy]) -> None:
    model, expected = model_of("llama"), plain_answer("llama")
    policy = policy_of(policy_class, selected_tokens=8, window_tokens=4)
    with TieredCache(model, policy, store="memory", max_tokens=160, batch_size=3) as cache:
        actual = generate(model, cache)
        hits = cache.stats.decode.units_hit
    difference = torch.stack(expected.logits) - torch.stack(actual.logits)
    assert difference.abs().max().item() > 1e-2
    assert (hits > 0) == (policy.reuse_tokens is None)


# Indexes ------------------------------------------------------------------------------------------

TOKENS, ROWS, HEAD_DIM = 640, 2, 16


def shape_of(policy: BaselinePolicy, dtype: torch.dtype = torch.float32) -> KVShape:
    heads = (2, 1) if policy.per_head else (4, 2)
    return KVShape(
        num_layers=1, num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=HEAD_DIM,
        dtype=dtype,
    )  # fmt: skip


def sizing(shape: KVShape, limit_bytes: int | None = None) -> SizingRequest:
    return SizingRequest(
        shape=shape, batch=ROWS, max_tokens=TOKENS, limit_bytes=limit_bytes, sector_bytes=512,
        device_is_cpu=True, has_adapter=False,
    )  # fmt: skip


def index_of(policy: BaselinePolicy, shape: KVShape, rows: int = ROWS) -> KeyIndex:
    return policy.make_index(
        IndexRequest(
            shape=shape, batch=rows, max_units=-(-TOKENS // policy.group_tokens),
            group_tokens=policy.group_tokens, scaling=0.25, adapter=None,
            device=torch.device("cpu"), score_tokens=0, selected_units=4,
        )
    )  # fmt: skip


def fill(index: KeyIndex, keys: Tensor, queries: Tensor | None = None) -> None:
    """What the runtime does on the first decode step."""
    if not index.ready:
        if queries is not None:
            index.see_queries(queries)
        index.fit(keys[:, ::3], torch.arange(0, keys.shape[1], 3))
    index.append(keys, 0)


def bytes_of(index: KeyIndex) -> int:
    return sum(x.nbytes for x in vars(index).values() if isinstance(x, Tensor))


def variants(policy: BaselinePolicy, shape: KVShape) -> list[tuple[BaselinePolicy, int]]:
    sizes = policy.index_sizes(sizing(shape))
    return [(p, size.index_bytes) for p, size in sizes if isinstance(p, BaselinePolicy)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy_class", CLASSES)
def test_priced_as_stored(policy_class: type[BaselinePolicy], dtype: torch.dtype) -> None:
    shape = shape_of(policy_class(), dtype)
    keys = torch.randn(ROWS, TOKENS, shape.num_kv_heads, HEAD_DIM, dtype=dtype)
    queries = torch.randn(ROWS, shape.num_query_heads, 64, HEAD_DIM, dtype=dtype)
    priced = variants(policy_class(), shape)
    assert [size for _, size in priced] == sorted({size for _, size in priced}, reverse=True)
    for policy, index_bytes in priced:
        index = index_of(policy, shape)
        fill(index, keys, queries)
        assert bytes_of(index) == index_bytes


@pytest.mark.parametrize("policy_class", CLASSES)
def test_a_smaller_budget_gives_a_smaller_index(policy_class: type[BaselinePolicy]) -> None:
    policy = policy_class(selected_tokens=32)
    shape = shape_of(policy)
    largest = policy.plan(sizing(shape))[1]
    tight = policy.plan(sizing(shape, largest.total_bytes - largest.index_bytes // 3))[1]
    assert tight.index_bytes < largest.index_bytes
    assert tight.selected_units == largest.selected_units


@pytest.mark.parametrize("policy_class", CLASSES)
def test_rows_can_be_taken(policy_class: type[BaselinePolicy]) -> None:
    torch.manual_seed(2)
    policy = variants(policy_class(), shape_of(policy_class()))[1][0]
    shape = shape_of(policy)
    keys = torch.randn(ROWS, TOKENS, shape.num_kv_heads, HEAD_DIM)
    query = torch.randn(1, shape.num_query_heads, HEAD_DIM)
    source, wider = index_of(policy, shape), index_of(policy, shape, 3)
    fill(source, keys)
    units = TOKENS // policy.group_tokens
    expected = source.score(query.expand(2, -1, -1), units)
    wider.take_rows_from(source, torch.tensor([1, 0, 1]))
    assert wider.ready
    assert torch.allclose(wider.score(query.expand(3, -1, -1), units), expected[[1, 0, 1]])
    # Later keys go on as they would have.
    more = torch.randn(3, 16, shape.num_kv_heads, HEAD_DIM)
    source.append(more[:2], 320)
    wider.append(more[[1, 0, 1]], 320)
    expected = source.score(query.expand(2, -1, -1), units)
    assert torch.allclose(wider.score(query.expand(3, -1, -1), units), expected[[1, 0, 1]])
    source.take_rows_from(source, torch.tensor([1, 1]))
    assert torch.allclose(source.score(query.expand(2, -1, -1), units), expected[[1, 1]])


@pytest.mark.parametrize("policy_class", CLASSES)
def test_pieces_equal_the_whole(policy_class: type[BaselinePolicy]) -> None:
    torch.manual_seed(3)
    policy = variants(policy_class(), shape_of(policy_class()))[1][0]
    shape = shape_of(policy)
    keys = torch.randn(ROWS, TOKENS, shape.num_kv_heads, HEAD_DIM)
    query = torch.randn(ROWS, shape.num_query_heads, HEAD_DIM)
    whole, pieces = index_of(policy, shape), index_of(policy, shape)
    fill(whole, keys)
    if not pieces.ready:
        pieces.fit(keys[:, ::3], torch.arange(0, TOKENS, 3))
    for start, end in ((0, 16), (16, 400), (400, 416), (416, 448), (448, TOKENS)):
        pieces.append(keys[:, start:end], start)
    units = TOKENS // policy.group_tokens
    assert torch.allclose(whole.score(query, units), pieces.score(query, units), atol=0.05)


@pytest.mark.parametrize("policy_class", CLASSES)
@pytest.mark.parametrize("unit", [3, 20, 37])
def test_a_needle_is_found(policy_class: type[BaselinePolicy], unit: int) -> None:
    """One of 40 pieces holds keys along the query; it is among the best tenth.

    Its logit is 200, beyond the bounds of chunks of random keys (about 130).
    """
    torch.manual_seed(unit)
    policy = variants(policy_class(), shape_of(policy_class()))[0][0]
    shape = shape_of(policy)
    query = torch.randn(ROWS, shape.num_query_heads, HEAD_DIM)
    keys = torch.randn(ROWS, TOKENS, shape.num_kv_heads, HEAD_DIM)
    per_head = query.view(ROWS, shape.num_kv_heads, -1, HEAD_DIM).sum(dim=2)
    start = unit * 16
    aligned = 200 * per_head / per_head.square().sum(dim=(1, 2), keepdim=True)
    keys[:, start : start + 16] = aligned.unsqueeze(1)
    index = index_of(policy, shape)
    queries = query.unsqueeze(2) + 0.3 * torch.randn(ROWS, shape.num_query_heads, 64, HEAD_DIM)
    fill(index, keys, queries)
    units = TOKENS // policy.group_tokens
    chosen = policy.select(index, query, np.zeros(ROWS, dtype=np.int64), units, units // 10)
    first, end = start // policy.group_tokens, (start + 16) // policy.group_tokens
    for row in chosen.unit_ids:
        assert set(range(first, end)) <= set(row.tolist())


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="key_ratio"):
        Loki(key_ratio=0.0)
    with pytest.raises(ConfigError, match="multiple of group_tokens"):
        LeoAM(fine_tokens=24)
    assert InfiniGen(key_ratio=0.5).predicts
    assert not LeoAM().predicts
