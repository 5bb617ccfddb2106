"""SnapKV by hand: eight tokens, one query, pooling over three."""

import math

import numpy as np
import pytest
import torch

from penstock.core.shape import KVShape
from penstock.methods.baselines.attention_history import LATER, PINNED, ObservationVotes
from penstock.methods.baselines.snapkv import SnapKV

SHAPE = KVShape(num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
QUERY = torch.ones(1, 1, 1)


def test_eight_tokens() -> None:
    index = ObservationVotes(
        SHAPE, batch=1, max_units=12, scaling=1.0, device=torch.device("cpu"), window_queries=1,
        kernel_tokens=3,
    )  # fmt: skip
    # Weights of the last query: 1, 1, 20, 1, 1, 4, 1, 1 of 30.
    keys = torch.tensor([1.0, 1, 20, 1, 1, 4, 1, 1]).log().view(1, 8, 1, 1)
    index.see_queries(torch.cat([9 * QUERY, QUERY], dim=1).view(1, 1, 2, 1))
    index.fit(keys, torch.arange(8))
    index.look(keys, 0)
    index.append(keys, 0)
    scores = index.score(QUERY, 8)[0]
    assert (90 * scores[:7]).tolist() == pytest.approx([2, 22, 22, 22, 6, 6, 5], abs=1e-4)
    assert scores[7] == PINNED, "the observation window is kept"

    policy = SnapKV(selected_tokens=4)
    index.append(torch.zeros(1, 1, 1, 1), 8)
    index.append(torch.zeros(1, 1, 1, 1), 9)
    selection = policy.select(index, QUERY, np.array([0]), 10, 4)
    assert selection.unit_ids.tolist() == [[1, 2, 3, 7]]
    assert policy.select(index, QUERY, np.array([0]), 10, 9).unit_ids.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 9]
    ], "where there is room the newest decoded tokens follow"
    assert index.score(QUERY, 10)[0, 8] == 8 - LATER


def test_the_cut_is_final() -> None:
    index = ObservationVotes(
        SHAPE, batch=1, max_units=12, scaling=1.0, device=torch.device("cpu")
    )  # fmt: skip
    index.fit(torch.zeros(1, 4, 1, 1), torch.arange(4))
    index.append(torch.zeros(1, 4, 1, 1), 0)
    policy = SnapKV(selected_tokens=2)
    selection = policy.select(index, QUERY, np.array([0]), 4, 2)
    assert selection.unit_ids.tolist() == [[2, 3]], "without queries the newest are kept"
    index.observe(selection, torch.tensor([[0.5, 0.5]]))
    assert index.score(QUERY, 4)[0, :2].tolist() == [-math.inf, -math.inf]
