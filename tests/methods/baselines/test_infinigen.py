"""InfiniGen by hand: which column is kept, and one selection for all heads or one for each."""

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.engine.policy import top_units
from penstock.methods.baselines.principal_keys import SkewedKeysIndex

CPU = torch.device("cpu")


def shape_of(heads: int) -> KVShape:
    return KVShape(
        num_layers=1, num_query_heads=heads, num_kv_heads=heads, head_dim=2, dtype=torch.float32
    )  # fmt: skip


@pytest.mark.parametrize(("across", "expected"), [(1.0, [8.0, -8.0, 0.0]), (3.0, [0.0, 0.0, 0.0])])
def test_the_column_with_the_largest_magnitudes_is_kept(
    across: float, expected: list[float]
) -> None:
    """Queries lie along (1, 1), where their mean magnitude is 2 sqrt(2); the sample's keys lie
    across it, with 1 sqrt(2) or 3 sqrt(2). The larger column is kept, the other lost."""
    index = SkewedKeysIndex(
        shape_of(1), batch=1, max_tokens=3, group_tokens=1, dims=1, device=CPU
    )  # fmt: skip
    index.see_queries(torch.tensor([[2.0, 2.0], [-2.0, -2.0]]).view(1, 1, 2, 2))
    sample = torch.tensor([[across, -across], [-across, across]])
    index.fit(sample.view(1, 2, 1, 2), torch.arange(2))
    keys = torch.tensor([[2.0, 2.0], [-2.0, -2.0], [2.0, -2.0]])
    index.append(keys.view(1, 3, 1, 2), 0)
    scores = index.score(torch.tensor([[[2.0, 2.0]]]), 3)
    assert torch.allclose(scores, torch.tensor([expected]), atol=0.05)


HEAD_KEYS = torch.tensor([[[4.0, 0.0], [1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [4.0, 0.0], [9.0, 0]]])
"""Two heads, three tokens. With queries (1, 0) and (1, 0): logits 4 1 0 and 0 4 9."""


def scores_of(shape: KVShape, keys: Tensor, query: Tensor) -> Tensor:
    index = SkewedKeysIndex(
        shape, batch=len(keys), max_tokens=3, group_tokens=1, dims=2, device=CPU
    )  # fmt: skip
    index.fit(keys, torch.arange(3))
    index.append(keys, 0)
    return index.score(query, 3)


def test_per_head_or_for_all() -> None:
    query = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    per_head = scores_of(shape_of(1), HEAD_KEYS.unsqueeze(2), query.unsqueeze(1))
    chosen = top_units(per_head, np.zeros(2, dtype=np.int64), 1)
    assert chosen.unit_ids.tolist() == [[0], [2]]
    together = scores_of(shape_of(2), HEAD_KEYS.transpose(0, 1).unsqueeze(0), query.unsqueeze(0))
    # Sums 4, 5, 9, less the same mean for all.
    assert torch.allclose(together - together[:, :1], torch.tensor([[0.0, 1.0, 5.0]]), atol=0.05)


def test_without_queries_keys_give_the_rotation() -> None:
    index = SkewedKeysIndex(
        shape_of(1), batch=1, max_tokens=2, group_tokens=1, dims=1, device=CPU
    )  # fmt: skip
    keys = torch.tensor([[3.0, 4.0], [-3.0, -4.0]]).view(1, 2, 1, 2)
    index.fit(keys, torch.arange(2))
    index.append(keys, 0)
    scores = index.score(torch.tensor([[[0.6, 0.8]]]), 2)
    assert torch.allclose(scores, torch.tensor([[5.0, -5.0]]), atol=0.03)
