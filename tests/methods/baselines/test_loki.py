"""Loki by hand: two dimensions, one principal component."""

import pytest
import torch

from penstock.core.shape import KVShape
from penstock.methods.baselines import principal_keys
from penstock.methods.baselines.principal_keys import PrincipalKeysIndex

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


@pytest.mark.parametrize("at_once", [1, 3 * 2 * 8, 1 << 17])
def test_scores_are_sums_in_float32(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of any size; tokens whose sums are one number in 16 bits are told apart."""
    monkeypatch.setattr(principal_keys, "_AT_ONCE", {True: at_once, False: at_once})
    shape = KVShape(
        num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32
    )
    index = PrincipalKeysIndex(
        shape, batch=3, max_tokens=700, group_tokens=1, dims=4, device=torch.device("cpu")
    )
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(3, 700, 2, 8, generator=random)
    index.fit(keys, torch.arange(700))
    index.append(keys, 0)
    query = torch.randn(3, 4, 8, generator=random)
    together = query.view(3, 2, 2, 8).double().sum(dim=2, keepdim=True)
    assert index._basis is not None
    low = (together @ index._basis.double()).flatten(1).unsqueeze(2)
    expected = (index._codes.double() @ low).squeeze(2)
    scores = index.score(query, 613)
    torch.testing.assert_close(scores.double(), expected[:, :613], rtol=1e-5, atol=1e-5)
    assert all(len(row.unique()) == 613 for row in scores)
    assert all(len(row.bfloat16().unique()) < 500 for row in scores)
