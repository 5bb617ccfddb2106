"""PQCache: a small example worked by hand, codes that are exact, and static centroids."""

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.methods.baselines.pqcache import PQCache
from penstock.methods.baselines.product_quantized import ProductQuantizedIndex


def make_index(keys: Tensor, *, subvectors: int, bits: int, room: int = 0) -> ProductQuantizedIndex:
    rows, tokens, _, head_dim = keys.shape
    shape = KVShape(
        num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=keys.dtype
    )
    index = ProductQuantizedIndex(
        shape, batch=rows, max_units=tokens + room, group_tokens=1, subvectors=subvectors,
        bits=bits, device=keys.device,
    )  # fmt: skip
    index.fit(keys[:, :1], torch.arange(1))
    index.look(keys, 0)
    index.append(keys, 0)
    return index


def test_by_hand() -> None:
    """Two parts of one number, two centroids each; every key is a pair of centroids."""
    keys = torch.tensor([[1.0, 10.0], [1.0, 20.0], [5.0, 10.0], [5.0, 20.0]]).view(1, 4, 1, 2)
    index = make_index(keys, subvectors=2, bits=1, room=1)
    assert sorted(index._centroids[0, 0, :, 0].tolist()) == [1.0, 5.0]
    assert sorted(index._centroids[0, 1, :, 0].tolist()) == [10.0, 20.0]
    # Heads (1, 0) and (1, -1) together ask for (2, -1).
    query = torch.tensor([[[1.0, 0.0], [1.0, -1.0]]])
    assert index.score(query, 4).tolist() == [[-8.0, -18.0, 0.0, -10.0]]
    # A new token takes the centroids that are there: (4, 13) is seen as (5, 10).
    index.append(torch.tensor([4.0, 13.0]).view(1, 1, 1, 2), 4)
    assert index.score(query, 5).tolist() == [[-8.0, -18.0, 0.0, -10.0, 0.0]]


def test_as_many_centroids_as_keys_is_exact() -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(3, 16, 1, 8), torch.randn(3, 2, 8)
    scores = make_index(keys, subvectors=2, bits=4).score(query, 16)
    expected = torch.einsum("rhd,rtd->rt", query, keys[:, :, 0])
    assert torch.allclose(scores, expected, atol=1e-5)


def test_more_parts_are_closer() -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(2, 600, 1, 16), torch.randn(2, 2, 16)
    expected = torch.einsum("rhd,rtd->rt", query, keys[:, :, 0])
    errors = [
        (make_index(keys, subvectors=m, bits=6).score(query, 600) - expected).square().mean()
        for m in (1, 4, 8)
    ]
    assert errors[0] > 1.3 * errors[1] > 1.3 * 1.3 * errors[2]


def test_units_take_their_best_token() -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(1, 12, 1, 4), torch.randn(1, 2, 4)
    shape = KVShape(
        num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=4, dtype=torch.float32
    )  # fmt: skip
    index = ProductQuantizedIndex(
        shape, batch=1, max_units=3, group_tokens=4, subvectors=2, bits=4,
        device=torch.device("cpu"),
    )  # fmt: skip
    index.fit(keys, torch.arange(12))
    index.look(keys, 0)
    index.append(keys, 0)
    by_token = make_index(keys, subvectors=2, bits=4).score(query, 12)
    assert torch.equal(index.score(query, 3), by_token.view(1, 3, 4).amax(dim=2))


def test_a_new_sequence_gets_centroids_of_its_own() -> None:
    keys = torch.randn(1, 20, 1, 4)
    index = make_index(keys, subvectors=2, bits=2)
    index.append(keys, 0)
    assert not index.ready


def test_what_was_looked_at_is_forgotten_with_the_fit() -> None:
    """As where reading the prompt's keys fails halfway: rows may change before the next attempt."""
    keys = torch.randn(2, 20, 1, 4)
    index, other = (make_index(keys, subvectors=2, bits=2) for _ in range(2))
    index.fit(keys[:, :1], torch.arange(1))
    index.look(keys[:, :2], 0)
    index.forget_fit()
    other.take_rows_from(index, torch.tensor([1, 0]))
    assert not other.ready


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="bits=9"):
        PQCache(bits=9)
    with pytest.raises(ConfigError, match="subvectors=0"):
        PQCache(subvectors=0)
