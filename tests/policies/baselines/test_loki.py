"""Loki by hand: two dimensions, one principal component."""

import pytest
import torch

from penstock.core.shape import KVShape
from penstock.indexes.principal_keys import PrincipalKeysIndex

SHAPE = KVShape(
    num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=2, dtype=torch.float32
)  # fmt: skip


@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_one_component_by_hand(mean: float) -> None:
    """Keys spread along (1, 1); scores are products of what lies along it, whatever their mean."""
    index = PrincipalKeysIndex(
        SHAPE, batch=1, max_tokens=3, group_tokens=1, dims=1, device=torch.device("cpu")
    )
    sample = torch.tensor([[2.0, 2.0], [-2.0, -2.0], [0.5, -0.5], [-0.5, 0.5]]) + mean
    index.fit(sample.view(1, 4, 1, 2), torch.arange(4))
    keys = torch.tensor([[3.0, 1.0], [0.0, -4.0], [5.0, -5.0]]) + mean
    index.append(keys.view(1, 3, 1, 2), 0)
    scores = index.score(torch.tensor([[[2.0, 0.0]]]), 3)
    # (2, 0) has sqrt(2) along (1, 1) / sqrt(2); the keys have 2 sqrt(2), -2 sqrt(2) and 0. True
    # products are 6, 0 and 10: what lies across is not seen.
    assert torch.allclose(scores, torch.tensor([[4.0, -4.0, 0.0]]), atol=0.04)


def test_each_row_has_its_own_basis() -> None:
    index = PrincipalKeysIndex(
        SHAPE, batch=2, max_tokens=2, group_tokens=1, dims=1, device=torch.device("cpu")
    )
    along_x = torch.tensor([[3.0, 0.0], [-3.0, 0.0]])
    keys = torch.stack([along_x, along_x.flip(1)]).view(2, 2, 1, 2)
    index.fit(keys, torch.arange(2))
    index.append(keys, 0)
    scores = index.score(torch.tensor([[[1.0, 7.0]], [[7.0, 1.0]]]), 2)
    assert torch.allclose(scores, torch.tensor([[3.0, -3.0], [3.0, -3.0]]), atol=0.04)


def test_a_group_is_as_good_as_its_best_token() -> None:
    index = PrincipalKeysIndex(
        SHAPE, batch=1, max_tokens=4, group_tokens=2, dims=2, device=torch.device("cpu")
    )
    keys = torch.tensor([[1.0, 0.0], [-9.0, 0.0], [0.0, 2.0], [8.0, -2.0]]).view(1, 4, 1, 2)
    index.fit(keys, torch.arange(4))
    index.append(keys, 0)
    # The sample's mean is (0, 0).
    scores = index.score(torch.tensor([[[1.0, 1.0]]]), 2)
    assert torch.allclose(scores, torch.tensor([[1.0, 6.0]]), atol=0.04)
