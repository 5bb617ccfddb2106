"""ShadowKV: exact when it selects all at full rank, by hand, its outliers, and its price."""

import functools
from dataclasses import dataclass
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
from penstock.engine.policy import IndexRequest
from penstock.methods.baselines.shadow_keys import ShadowKeyIndex
from penstock.methods.baselines.shadowkv import ShadowKV, variants
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

TOLERANCE = 1e-4
PROMPT_TOKENS, ANSWER_TOKENS = 90, 13
PADDING = (0, 37, 61)
CPU = torch.device("cpu")
ALL = {"selected_tokens": 10**6, "window_tokens": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing(SizingRequest):
    """A request that knows how many rows make a sequence."""

    rows_per_sequence: int = 1


def rotary(width: int) -> Any:
    """Llama's, with a base of 100 and both scaled, as some models do."""

    def of(positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = 100.0 ** (-torch.arange(0, width, 2) / width)
        angles = positions[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=1)
        return 1.25 * angles.cos(), 1.25 * angles.sin()

    return of


def row_shape(width: int, queries: int = 2, dtype: torch.dtype = torch.float32) -> KVShape:
    return KVShape(
        num_layers=1, num_query_heads=queries, num_kv_heads=1, head_dim=width, dtype=dtype
    )


def make_index(keys: Tensor, **changes: Any) -> ShadowKeyIndex:
    """An index for `keys`, [rows, tokens, 1, head_dim], in units of 2 tokens."""
    options: dict[str, Any] = {
        "batch": keys.shape[0], "max_units": keys.shape[1] // 2, "group_tokens": 2,
        "rows_per_sequence": 2, "rank": 64, "landmark_units": 1, "num_outliers": 0,
        "scaling": 1.0, "rotary": rotary(keys.shape[-1]), "device": CPU,
    }  # fmt: skip
    return ShadowKeyIndex(row_shape(keys.shape[-1]), **{**options, **changes})


def filled(keys: Tensor, **changes: Any) -> ShadowKeyIndex:
    """As the runtime fills it: a sample, a look at the prompt in blocks, then the same again."""
    index = make_index(keys, **changes)
    index.fit(keys[:, :2], torch.arange(2))
    blocks = [(start, keys[:, start : start + 6]) for start in range(0, keys.shape[1], 6)]
    for start, block in blocks:
        index.look(block, start)
    for start, block in blocks:
        index.append(block, start)
    return index


def all_rebuilt(index: ShadowKeyIndex, keys: Tensor) -> Tensor:
    """Every unit of every row, rebuilt in one call, in an order that rows share. Like `keys`."""
    rows, units = keys.shape[0], keys.shape[1] // 2
    row = np.tile(np.arange(rows), units)
    unit = np.repeat(np.arange(units), rows)
    rebuilt = index.rebuild_keys(row, unit).view(units, rows, 2, 1, -1)
    return rebuilt.transpose(0, 1).reshape(keys.shape)


# Whole model ----------------------------------------------------------------------------------


def prompts(batch: int) -> dict[str, Tensor]:
    ids = torch.randint(
        3, VOCABULARY, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    mask = torch.ones_like(ids)
    for row in range(batch):
        ids[row, : PADDING[row]] = 0
        mask[row, : PADDING[row]] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, cache: Any, **changes: Any) -> Any:
    return model.generate(
        **prompts(3), **cache_argument(model, cache), max_new_tokens=ANSWER_TOKENS, do_sample=False,
        pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        **changes,
    )  # fmt: skip


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family)


@functools.cache
def plain_answer(family: str) -> Any:
    """What the model answers without Penstock."""
    model = model_of(family)
    return generate(model, DynamicCache(config=model.config))


@pytest.mark.parametrize(
    ("family", "landmark_units", "reuse_tokens"),
    [("llama", 1, None), ("qwen2", 3, 0), ("gpt_neox", 3, None), ("opt", 1, 0)],
)
def test_equals_the_plain_model(family: str, landmark_units: int, reuse_tokens: int | None) -> None:
    """Keys of at most 48 components have their full rank; gpt_neox rotates a part of its heads,
    opt nothing."""
    model, expected = model_of(family), plain_answer(family)
    policy = ShadowKV(**ALL, landmark_units=landmark_units, reuse_tokens=reuse_tokens)
    with TieredCache(model, policy, store="memory", max_tokens=160, batch_size=3) as cache:
        actual = generate(model, cache)
        assert cache.stats.decode.read_bytes > 0
    assert torch.equal(expected.sequences, actual.sequences)
    difference = torch.stack(expected.logits) - torch.stack(actual.logits)
    assert difference.abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("changes", [{"rank": 3}, {"selected_tokens": 16}])
def test_low_rank_and_small_selections_show(changes: dict[str, int]) -> None:
    """The check has teeth: keys are rebuilt, and what is not selected is not attended to."""
    model, expected = model_of("llama"), plain_answer("llama")
    policy = ShadowKV(**{**ALL, **changes}, outlier_chunks=0)
    with TieredCache(model, policy, store="memory", max_tokens=160, batch_size=3) as cache:
        actual = generate(model, cache)
    difference = expected.logits[1] - actual.logits[1]
    assert difference.isfinite().all()
    assert difference.abs().max().item() > 100 * TOLERANCE


def test_beams() -> None:
    model = model_of("llama")
    expected = generate(model, DynamicCache(config=model.config), num_beams=2)
    with TieredCache(model, ShadowKV(**ALL), store="memory", max_tokens=160, batch_size=6) as cache:
        actual = generate(model, cache, num_beams=2)
    assert torch.equal(expected.sequences, actual.sequences)


# Scores ---------------------------------------------------------------------------------------


def test_scores_by_hand() -> None:
    """Three units of two tokens; the third one's keys are far apart, so that it is an outlier."""
    keys = torch.tensor([[1.0, 0], [1, 0], [0, 2], [0, 2], [3, 0], [0, 1]]).view(1, 6, 1, 2)
    index = filled(keys, rows_per_sequence=1, num_outliers=1, rotary=None)
    query = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    # Logits of the landmarks (1, 0) and (0, 2): 1 and 0 for one head, 0 and 2 for the other.
    # Softmax: 0.731 and 0.269; 0.119 and 0.881; the larger ones count.
    scores = index.score(query, 3)
    assert torch.allclose(scores, torch.tensor([[0.7311, 0.8808, 2.0]]), atol=1e-4)


def test_units_share_a_landmark_by_hand() -> None:
    """Landmarks of two units: (1, 1) and (0, -1), the second of one unit that has closed."""
    keys = torch.tensor([[2.0, 0], [2, 0], [0, 2], [0, 2], [0, -1], [0, -1]]).view(1, 6, 1, 2)
    query = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    index = make_index(keys, rows_per_sequence=1, landmark_units=2, rotary=None)
    index.fit(keys, torch.arange(6))
    index.append(keys[:, :2], 0)
    assert index.score(query, 1).tolist() == [[1.0]]
    index.append(keys[:, 2:], 2)
    # Logits by unit are 1, 1, 0 for one head and 1, 1, -1 for the other.
    # Softmax: 0.422, 0.422, 0.155; 0.468, 0.468, 0.063.
    expected = torch.tensor([[0.4683, 0.4683, 0.1554]])
    assert torch.allclose(index.score(query, 3), expected, atol=1e-4)
    assert torch.allclose(index.score(query, 2), torch.tensor([[0.5, 0.5]]))


@pytest.mark.parametrize("landmark_units", [1, 3])
def test_pieces_equal_the_whole(landmark_units: int) -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(4, 48, 1, 8), torch.randn(4, 2, 8)
    # Cosines with an unfinished landmark depend on what has closed with the unit.
    options = {"landmark_units": landmark_units, "num_outliers": 3 if landmark_units == 1 else 0}
    whole, pieces = make_index(keys, **options), make_index(keys, **options)
    for index in (whole, pieces):
        index.fit(keys, torch.arange(48))
    whole.append(keys, 0)
    for start, end in ((0, 2), (2, 20), (20, 22), (22, 24), (24, 48)):
        pieces.append(keys[:, start:end], start)
    assert torch.allclose(whole.score(query, 24), pieces.score(query, 24), atol=1e-6)
    assert torch.allclose(all_rebuilt(whole, keys), all_rebuilt(pieces, keys), atol=1e-5)


@pytest.mark.parametrize("row", range(4))
def test_finds_the_needle(row: int) -> None:
    torch.manual_seed(row)
    keys, query = torch.randn(4, 800, 1, 16), torch.randn(4, 2, 16)
    needle = 17 + 11 * row
    keys[row, needle * 8 : needle * 8 + 8] += query[row, 1]
    request = Sizing(
        shape=row_shape(16), batch=4, max_tokens=800, limit_bytes=None, sector_bytes=512,
        device_is_cpu=True, has_adapter=False, rows_per_sequence=2,
    )  # fmt: skip
    policy, plan = ShadowKV(selected_tokens=80).plan(request)
    index = policy.make_index(index_request(policy, request, selected_units=10))
    index.fit(keys, torch.arange(800))
    index.append(keys, 0)
    first = np.zeros(4, dtype=np.int64)
    selection = policy.select(index, query, first, 100, plan.selected_units)
    assert selection.unit_ids.shape == (4, 10)
    assert needle in selection.unit_ids[row]


# Outliers and factors -------------------------------------------------------------------------


def test_outliers_keep_their_keys() -> None:
    """Unit 2 of the first row and unit 4 of the second point both ways; the rank is too low."""
    torch.manual_seed(0)
    keys = torch.ones(2, 12, 1, 4) + 0.1 * torch.randn(2, 12, 1, 4)
    keys[0, 4], keys[1, 9] = -keys[0, 4] / 2, -keys[1, 9] / 2
    index = filled(keys, rank=1, num_outliers=1)
    scores = index.score(torch.randn(2, 2, 4), 6)
    assert scores.argmax(dim=1).tolist() == [2, 4]
    rebuilt = all_rebuilt(index, keys)
    same = (rebuilt == keys).flatten(2).all(dim=2).view(2, 6, 2).all(dim=2)
    assert same.nonzero().tolist() == [[0, 2], [1, 4]]


def test_outliers_that_were_cropped_are_forgotten() -> None:
    torch.manual_seed(0)
    keys = torch.ones(2, 12, 1, 4)
    keys[:, 9] = -0.5
    index = filled(keys, num_outliers=1)
    query = torch.randn(2, 2, 4)
    assert index.score(query, 6).argmax(dim=1).tolist() == [4, 4]
    assert (index.score(query, 4) < 2).all()
    keys[:, 9], keys[:, 7] = 1.0, -0.5
    index.append(keys[:, 6:], 6)
    assert index.score(query, 6).argmax(dim=1).tolist() == [3, 3]


@pytest.mark.parametrize("offset", [0, 37])
def test_one_component_before_rotation(offset: int) -> None:
    """Joint keys that are multiples of one vector before RoPE need one component, also under left
    padding (other positions than the cache's, by a constant); after RoPE they need more."""
    torch.manual_seed(0)
    size, direction = torch.rand(1, 40, 1) + 0.5, torch.randn(2, 1, 4)
    plain = size * direction
    cos, sin = rotary(4)(torch.arange(40) - offset)
    turned = plain * cos + torch.cat([-plain[..., 2:], plain[..., :2]], dim=-1) * sin
    keys = turned.unsqueeze(2)
    assert torch.allclose(all_rebuilt(filled(keys, rank=1), keys), keys, atol=1e-4)
    after = all_rebuilt(filled(keys, rank=1, rotary=None), keys)
    assert (after - keys).norm() > 0.3 * keys.norm()


def test_the_rank_is_that_of_the_joint_heads() -> None:
    """Two heads that say the same need the components of one."""
    torch.manual_seed(0)
    one = torch.randn(2, 40, 1, 4)
    keys = one.repeat_interleave(2, dim=0)
    assert torch.allclose(all_rebuilt(filled(keys, rank=4), keys), keys, atol=1e-4)
    assert not torch.allclose(all_rebuilt(filled(keys, rank=3), keys), keys, atol=1e-2)


def test_rows_can_be_taken() -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(4, 24, 1, 4), torch.randn(4, 2, 4)
    source, wider = filled(keys, rank=5, num_outliers=2), make_index(
        keys[[0, 1, 2, 3, 0, 1]], rank=5, num_outliers=2
    )  # fmt: skip
    rows = torch.tensor([2, 3, 0, 1, 2, 3])
    scores, rebuilt = source.score(query, 12), all_rebuilt(source, keys)
    before = wider.ready
    wider.take_rows_from(source, rows)
    assert (before, wider.ready) == (False, True)
    assert torch.allclose(wider.score(query[rows], 12), scores[rows])
    assert torch.allclose(all_rebuilt(wider, keys[rows]), rebuilt[rows], atol=1e-6)
    source.take_rows_from(source, rows[:4])
    assert torch.allclose(source.score(query[rows[:4]], 12), scores[rows[:4]])
    assert torch.allclose(all_rebuilt(source, keys[rows[:4]]), rebuilt[rows[:4]], atol=1e-6)


# Price ----------------------------------------------------------------------------------------


def index_request(policy: Any, request: Sizing, selected_units: int) -> IndexRequest:
    return IndexRequest(
        shape=request.shape, batch=request.batch,
        max_units=-(-request.max_tokens // policy.group_tokens), group_tokens=policy.group_tokens,
        scaling=0.25, adapter=None, device=CPU, score_tokens=0, selected_units=selected_units,
        rows_per_sequence=request.rows_per_sequence, rotary=rotary(request.shape.head_dim),
    )  # fmt: skip


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_priced_as_stored(heads: int, dtype: torch.dtype) -> None:
    request = Sizing(
        shape=row_shape(16, dtype=dtype), batch=2 * heads, max_tokens=1001, limit_bytes=10**9,
        sector_bytes=512, device_is_cpu=True, has_adapter=False, rows_per_sequence=heads,
    )  # fmt: skip
    sizes = ShadowKV(selected_tokens=400).index_sizes(request)
    assert len({size.index_bytes for _, size in sizes}) >= 7
    for policy, size in sizes:
        index = policy.make_index(index_request(policy, request, selected_units=50))
        keys = torch.randn(2 * heads, 1000, 1, 16, dtype=dtype)
        index.fit(keys, torch.arange(1000))
        index.append(keys, 0)
        tensors = [value for value in vars(index).values() if isinstance(value, Tensor)]
        assert sum(tensor.nbytes for tensor in tensors) == size.index_bytes


@pytest.mark.parametrize(("share", "least_rank"), [(4, 160), (13, 64), (34, 16)])
def test_gives_up_what_it_must(share: int, least_rank: int) -> None:
    """The budgets of KVSwap's setting A, and a relaxed one, for Llama-3.1-8B at 32K tokens."""
    shape = KVShape(
        num_layers=32, num_query_heads=4, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16
    )
    request = Sizing(
        shape=shape, batch=8, max_tokens=32_768,
        limit_bytes=shape.full_cache_bytes(8, 32_768) // share, sector_bytes=512,
        device_is_cpu=True, has_adapter=False, rows_per_sequence=8,
    )  # fmt: skip
    policy, plan = ShadowKV().plan(request)
    assert isinstance(policy, ShadowKV)
    assert policy.rank is not None
    assert policy.rank >= least_rank
    assert (policy.rank, policy.landmark_units) == (160, 1) or share > 4
    assert plan.total_bytes <= (request.limit_bytes or 0)
    assert (plan.selected_units, plan.shared_pools) == (50, share == 34)
    assert policy.outlier_chunks <= 50 * 48 // 304


def test_refuses_nonsense() -> None:
    for changes in ({"rank": 0}, {"landmark_units": 0}, {"outlier_chunks": -1}):
        with pytest.raises(ConfigError, match="must be at least"):
            ShadowKV(**changes)


def test_narrow_keys_give_up_rank_with_their_landmarks() -> None:
    """Of eight heads of 128 the original's; of two heads of 64 the same shares of a quarter."""
    assert variants(1024)[:4] == [(1, 160), (2, 160), (2, 96), (4, 96)]
    assert variants(128)[:5] == [(1, 128), (1, 32), (2, 32), (2, 19), (4, 19)]
    assert variants(16) == [
        (1, 16),
        (1, 4),
        (2, 4),
        (2, 2),
        (4, 2),
        (8, 2),
        (8, 1),
        (16, 1),
        (32, 1),
    ]
