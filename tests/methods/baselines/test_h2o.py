"""H2O by hand: four tokens of a prompt, two kept, sums that grow."""

import math

import numpy as np
import pytest
import torch

from penstock.core.shape import KVShape
from penstock.methods.baselines.attention_history import HeavyHitters
from penstock.methods.baselines.h2o import H2O

SHAPE = KVShape(num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
QUERY, FIRST, KEY = torch.ones(1, 1, 1), np.array([0]), torch.zeros(1, 1, 1, 1)


def test_sums_decide() -> None:
    index = HeavyHitters(SHAPE, batch=1, max_units=9, scaling=1.0, device=torch.device("cpu"))
    policy = H2O(selected_tokens=2)
    keys = torch.tensor([5.0, 1, 3, 1]).log().view(1, 4, 1, 1)
    index.see_queries(QUERY[None])
    index.fit(keys, torch.arange(4))
    index.look(keys, 0)
    index.append(keys, 0)
    assert index.score(QUERY, 4)[0].tolist() == pytest.approx([0.5, 0.1, 0.3, 0.1])

    selection = policy.select(index, QUERY, FIRST, 3, 2)  # token 3 is in the window
    assert selection.unit_ids.tolist() == [[0, 2]]
    index.observe(selection, torch.tensor([[0.2, 0.3]]))
    assert index.score(QUERY, 4)[0].tolist() == pytest.approx([0.7, -math.inf, 0.6, 0.1])

    index.append(KEY, 4)
    selection = policy.select(index, QUERY, FIRST, 4, 2)
    assert selection.unit_ids.tolist() == [[0, 2]]
    index.observe(selection, torch.tensor([[0.0, 0.0]]))

    index.append(KEY, 5)  # token 4 leaves the window and is tried against the weakest
    selection = policy.select(index, QUERY, FIRST, 5, 2)
    assert selection.unit_ids.tolist() == [[0, 4]]
    index.observe(selection, torch.tensor([[0.0, 0.05]]))

    index.append(KEY, 6)  # token 5 against token 4, which is the weakest now
    selection = policy.select(index, QUERY, FIRST, 6, 2)
    assert selection.unit_ids.tolist() == [[0, 5]]
    index.observe(selection, torch.tensor([[0.0, 0.2]]))
    assert index.alive[0, :6].tolist() == [True, False, False, False, False, True]
