"""LowRankIndex: exact at full rank, close below it, the same however the keys arrive."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LayerAdapter, fit_layer
from penstock.kernels.key_rotation import KeyRotation
from penstock.methods.kvswap.index import HeadReduction, LowRankIndex

HEADS, KV_HEADS, HEAD_DIM, GROUP, GROUPS = 6, 2, 8, 4, 300
JOINT, TOKENS = KV_HEADS * HEAD_DIM, GROUP * GROUPS
SCALING = 0.4
SHAPE = KVShape(
    num_layers=1, num_query_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
    dtype=torch.float32,
)  # fmt: skip


@pytest.fixture
def keys() -> Tensor:
    """Keys with a spectrum that falls off and a mean, like real ones. [2, TOKENS, ...]"""
    torch.manual_seed(0)
    spread = torch.diag(0.7 ** torch.arange(JOINT)) @ torch.randn(JOINT, JOINT)
    flat = torch.randn(2, TOKENS, JOINT) @ spread + torch.randn(JOINT)
    return flat.view(2, TOKENS, KV_HEADS, HEAD_DIM)


@pytest.fixture
def query() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, HEADS, HEAD_DIM)


def adapter_of(keys: Tensor, rank: int) -> LayerAdapter:
    return fit_layer(keys.flatten(0, 1).flatten(1), rank)


def make_index(keys: Tensor, rank: int, bits: int, **changes: Any) -> LowRankIndex:
    options: dict[str, Any] = {
        "batch": keys.shape[0], "max_units": GROUPS, "group_tokens": GROUP,
        "head_reduction": "sum", "scaling": SCALING, "adapter": adapter_of(keys, rank),
        "device": torch.device("cpu"),
    }  # fmt: skip
    return LowRankIndex(SHAPE, rank=rank, bits=bits, **{**options, **changes})


def best_of_groups(token_scores: Tensor) -> Tensor:
    """Each group's best score (KVSwap 3.3, ReduceMax). [batch, GROUPS]"""
    return token_scores.view(*token_scores.shape[:-1], -1, GROUP).amax(dim=-1)


def exact_scores(keys: Tensor, query: Tensor, reduction: str = "sum") -> Tensor:
    """Group scores from the whole keys. [batch, GROUPS]"""
    per_head = keys.repeat_interleave(HEADS // KV_HEADS, dim=2)
    logits = torch.einsum("bhd,bthd->bht", query, per_head)
    if reduction != "sum":
        best = best_of_groups(logits.flatten(0, 1)).view(*logits.shape[:2], -1)
        shares = (best * SCALING).softmax(-1)
        return shares.sum(1) if reduction == "softmax" else shares.square().sum(1).sqrt()
    return best_of_groups(logits.sum(1))


def rank_correlation(a: Tensor, b: Tensor) -> float:
    order = torch.stack([a.argsort().argsort().float(), b.argsort().argsort().float()])
    return torch.corrcoef(order)[0, 1].item()


@pytest.mark.parametrize("reduction", ["sum", "softmax", "norm"])
@pytest.mark.parametrize("batch", [1, 2])
def test_full_rank_is_exact(
    batch: int, reduction: HeadReduction, keys: Tensor, query: Tensor
) -> None:
    keys, query = keys[:batch], query[:batch]
    index = make_index(keys, JOINT, 16, head_reduction=reduction)
    index.append(keys, 0)
    scores = index.score(query, GROUPS).float()
    expected = exact_scores(keys, query, reduction)
    assert scores.shape == (batch, GROUPS)
    # 16 bits are bfloat16 here: 8 bits of mantissa per component, and softmax takes exponentials.
    tolerance = 0.01 if reduction == "sum" else 0.1
    assert (scores - expected).abs().max() < tolerance * expected.abs().max()
    for row in range(batch):
        assert rank_correlation(scores[row], expected[row]) > 0.995


@pytest.mark.parametrize(("bits", "least"), [(8, 0.99), (4, 0.95)])
@pytest.mark.parametrize("rank", [JOINT, JOINT - 1])
@pytest.mark.parametrize("batch", [1, 2])
def test_few_bits_keep_the_order(
    batch: int, rank: int, bits: int, least: float, keys: Tensor, query: Tensor
) -> None:
    keys, query = keys[:batch], query[:batch]
    index = make_index(keys, rank, bits)
    index.append(keys, 0)
    scores, expected = index.score(query, GROUPS).float(), exact_scores(keys, query)
    for row in range(batch):
        assert rank_correlation(scores[row], expected[row]) > least


def test_half_the_rank_keeps_most_of_the_order(keys: Tensor, query: Tensor) -> None:
    index = make_index(keys, JOINT // 2, 16)
    index.append(keys, 0)
    correlation = rank_correlation(index.score(query, GROUPS)[0], exact_scores(keys, query)[0])
    assert correlation > 0.9


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_pieces_equal_the_whole(bits: int, keys: Tensor, query: Tensor) -> None:
    whole, pieces = make_index(keys, 7, bits), make_index(keys, 7, bits)
    whole.append(keys, 0)
    for start, end in ((0, 4), (4, 900), (900, 1032), (1032, TOKENS)):
        pieces.append(keys[:, start:end], start)
    assert torch.equal(whole.score(query, GROUPS), pieces.score(query, GROUPS))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_later_groups_do_not_show(bits: int, keys: Tensor, query: Tensor) -> None:
    """Scores of the first groups are the same whether more follow or not."""
    few, all_ = (make_index(keys, 7, bits, head_reduction="softmax") for _ in range(2))
    few.append(keys[:, : 9 * GROUP], 0)
    all_.append(keys, 0)
    assert torch.equal(few.score(query, 9), all_.score(query, 9))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_rows_are_independent(bits: int, keys: Tensor, query: Tensor) -> None:
    adapter = adapter_of(keys, 8)
    both = make_index(keys, 8, bits, adapter=adapter)
    both.append(keys, 0)
    together = both.score(query, GROUPS).float()
    for row in range(2):
        alone = make_index(keys[row : row + 1], 8, bits, adapter=adapter)
        alone.append(keys[row : row + 1], 0)
        apart = alone.score(query[row : row + 1], GROUPS).float()[0]
        assert torch.allclose(together[row], apart, rtol=0.02, atol=0.02 * float(apart.abs().max()))


def test_rows_can_be_taken(keys: Tensor, query: Tensor) -> None:
    source, wider = make_index(keys, 8, 8), make_index(keys[[0, 1, 1]], 8, 8, adapter=None)
    source.append(keys, 0)
    wider.take_rows_from(source, torch.tensor([1, 0, 1]))
    assert wider.ready, "the basis comes along"
    swapped = source.score(query, GROUPS)
    got = wider.score(query[[1, 0, 1]], GROUPS)
    assert torch.equal(got[0], swapped[1])
    assert torch.equal(got[1], swapped[0])
    source.take_rows_from(source, torch.tensor([1, 1]))
    assert torch.equal(source.score(query[[1, 1]], GROUPS)[0], swapped[1])


def test_fitted_from_the_prompt(keys: Tensor, query: Tensor) -> None:
    index = make_index(keys, JOINT, 16, adapter=None)
    before = index.ready
    index.fit(keys, torch.arange(keys.shape[1]))
    assert (before, index.ready) == (False, True)
    index.append(keys, 0)
    assert rank_correlation(index.score(query, GROUPS)[0], exact_scores(keys, query)[0]) > 0.995


@pytest.mark.parametrize(("bits", "rank"), [(16, 7), (8, 7), (4, 7), (4, 8)])
def test_priced_as_stored(bits: int, rank: int, keys: Tensor) -> None:
    index = make_index(keys, rank, bits)
    priced = LowRankIndex.num_bytes(
        SHAPE, batch=2, max_units=GROUPS, group_tokens=GROUP, rank=rank, bits=bits
    )
    assert priced == index._codes.nbytes + index._basis.nbytes + 3 * index._step.nbytes


# Keys that are turned back by blocks ------------------------------------------------------------

ROTATION = KeyRotation(1e4 ** -(torch.arange(HEAD_DIM // 2, dtype=torch.float64) / 4))


@pytest.fixture
def turning_keys(keys: Tensor) -> Tensor:
    """The same keys as a rotary embedding gives them to the index."""
    return ROTATION.turned(keys, torch.arange(TOKENS)[None, :, None])


def turned_index(rank: int, bits: int, **changes: Any) -> LowRankIndex:
    options: dict[str, Any] = {
        "batch": 2, "max_units": GROUPS, "group_tokens": GROUP, "head_reduction": "softmax",
        "scaling": SCALING, "adapter": None, "device": torch.device("cpu"), "rotation": ROTATION,
    }  # fmt: skip
    return LowRankIndex(SHAPE, rank=rank, bits=bits, **{**options, **changes})


def filled(index: LowRankIndex, keys: Tensor) -> LowRankIndex:
    if not index.ready:
        index.fit(keys, torch.arange(keys.shape[1]))
    index.append(keys, 0)
    return index


@pytest.mark.parametrize("chunk_tokens", [1 << 20, 1024])
@pytest.mark.parametrize("reduction", ["sum", "softmax", "norm"])
def test_full_rank_is_exact_by_blocks(
    reduction: HeadReduction, chunk_tokens: int, turning_keys: Tensor, query: Tensor
) -> None:
    index = turned_index(JOINT, 16, head_reduction=reduction, chunk_tokens=chunk_tokens)
    scores = filled(index, turning_keys).score(query, GROUPS).float()
    expected = exact_scores(turning_keys, query, reduction)
    tolerance = 0.01 if reduction == "sum" else 0.1
    assert (scores - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_turned_keys_need_fewer_components(bits: int, turning_keys: Tensor, query: Tensor) -> None:
    expected = exact_scores(turning_keys, query, "softmax")[0]

    def found(index: LowRankIndex) -> float:
        return rank_correlation(filled(index, turning_keys).score(query, GROUPS)[0], expected)

    by_block = turned_index(6, bits, block_tokens=16)
    assert found(by_block) > found(turned_index(6, bits, rotation=None)) + 0.1


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_pieces_equal_the_whole_by_blocks(bits: int, turning_keys: Tensor, query: Tensor) -> None:
    adapter = filled(turned_index(7, bits), turning_keys)
    whole, pieces = turned_index(7, bits), turned_index(7, bits)
    for index in (whole, pieces):
        index.take_rows_from(adapter, torch.arange(2))
        index._codes.zero_()
    whole.append(turning_keys, 0)
    for start, end in ((0, 4), (4, 900), (900, 1032), (1032, TOKENS - 4)):
        pieces.append(turning_keys[:, start:end], start)
    pieces.put(turning_keys[:, TOKENS - 4 :], torch.tensor([GROUPS - 1]))
    assert torch.equal(whole._codes, pieces._codes)
    assert torch.equal(whole.score(query, GROUPS), pieces.score(query, GROUPS))


def test_padding_does_not_turn_keys(keys: Tensor, query: Tensor) -> None:
    """Of rows that begin later, keys and queries are as those of a text that fills the padding."""
    first, places = np.array([0, 6]), torch.arange(TOKENS)
    positions = places - torch.from_numpy(first)[:, None] * GROUP
    index = turned_index(10, 8)
    whole = filled(index, ROTATION.turned(keys, places[None, :, None]))
    expected = whole.score(ROTATION.turned(query, torch.tensor(TOKENS)), GROUPS)
    late = turned_index(10, 8)
    late.take_rows_from(whole, torch.arange(2))
    late.see_start(first)
    late.append(ROTATION.turned(keys, positions[:, :, None]), 0)
    own = torch.tensor([[TOKENS], [TOKENS - 6 * GROUP]])
    scores = late.score(ROTATION.turned(query, own), GROUPS)
    assert torch.equal(scores[1, :6], torch.zeros(6))
    shares = expected[1, 6:]  # of a softmax that the padding has no part in
    assert rank_correlation(scores[1, 6:], shares) > 0.999
    torch.testing.assert_close(scores[0], expected[0], rtol=1e-3, atol=1e-4)
    codes = (late._codes.float() - whole._codes.float()).abs()
    assert codes.max() <= 1, "but for rounding"
    assert codes.mean() < 0.01


def test_an_adapter_says_which_keys_it_is_of(turning_keys: Tensor, query: Tensor) -> None:
    plain = adapter_of(turning_keys, 8)
    former = filled(turned_index(8, 8, rotation=None, adapter=plain), turning_keys)
    with_old = filled(turned_index(8, 8, adapter=plain), turning_keys)
    assert torch.equal(former.score(query, GROUPS), with_old.score(query, GROUPS))


def test_a_stored_index_says_which_keys_it_is_of(turning_keys: Tensor, query: Tensor) -> None:
    first = filled(turned_index(8, 8, batch=1), turning_keys[:1])
    state = first.state(GROUPS)
    assert state is not None
    again = turned_index(8, 8, batch=1)
    again.load_state(state, GROUPS)
    assert torch.equal(first.score(query[:1], GROUPS), again.score(query[:1], GROUPS))
    former = filled(turned_index(8, 8, batch=1, rotation=None), turning_keys[:1])
    old = former.state(GROUPS)
    assert old is not None
    again.load_state(old, GROUPS)
    assert torch.equal(former.score(query[:1], GROUPS), again.score(query[:1], GROUPS))
    for other in (turned_index(8, 8, batch=1, rotation=None),
                  turned_index(8, 8, batch=1, block_tokens=16)):  # fmt: skip
        with pytest.raises(ConfigError, match="its keys are"):
            other.load_state(state, GROUPS)
