"""RaaS by hand: four tokens of a prompt, two kept, stamps that are renewed or grow old."""

import math

import numpy as np
import pytest
import torch

from penstock.core.shape import KVShape
from penstock.methods.baselines.attention_history import PINNED, TimeStamps
from penstock.methods.baselines.raas import RaaS

SHAPE = KVShape(num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
QUERY, FIRST, KEY = torch.ones(1, 1, 1), np.array([0]), torch.zeros(1, 1, 1, 1)


def make_index(selected: int) -> TimeStamps:
    index = TimeStamps(
        SHAPE, batch=1, max_units=9, scaling=1.0, device=torch.device("cpu"),
        selected_units=selected, threshold=0.2,
    )  # fmt: skip
    keys = torch.tensor([5.0, 1, 3, 1]).log().view(1, 4, 1, 1)
    index.see_queries(QUERY[None])
    index.fit(keys, torch.arange(4))
    index.look(keys, 0)
    index.append(keys, 0)
    return index


def test_the_oldest_stamp_goes() -> None:
    index, policy = make_index(2), RaaS(selected_tokens=2)
    # Weights .5 .1 .3 .1: tokens 0 and 2 are stamped by the query at 3, the others by their birth.
    large, small = 1 - math.log(0.5) / math.log(0.2), 1 - math.log(0.3) / math.log(0.2)
    assert index.score(QUERY, 4)[0].tolist() == pytest.approx([3 + large, 1, 3 + small, 3])

    selection = policy.select(index, QUERY, FIRST, 3, 2)  # token 3 is in the window
    assert selection.unit_ids.tolist() == [[0, 2]]
    index.append(KEY, 4)
    index.observe(selection, torch.tensor([[0.1, 0.3]]))
    values = index.score(QUERY, 4)[0].tolist()
    assert values == pytest.approx([3 + large, -math.inf, 4 + small, 3])

    selection = policy.select(index, QUERY, FIRST, 5, 2)  # token 4 leaves the window
    assert selection.unit_ids.tolist() == [[2, 4]]
    index.append(KEY, 5)
    index.observe(selection, torch.tensor([[0.1, 0.1]]))
    values = index.score(QUERY, 5)[0].tolist()
    assert values == pytest.approx([-math.inf, -math.inf, 4 + small, -math.inf, 5])

    selection = policy.select(index, QUERY, FIRST, 6, 2)
    assert selection.unit_ids.tolist() == [[4, 5]], "token 2 was not attended to in time"


def test_a_prompt_that_fits_is_never_forgotten() -> None:
    index, policy = make_index(4), RaaS(selected_tokens=4)
    assert index.score(QUERY, 4).tolist() == [[PINNED] * 4]
    index.append(KEY, 4)
    index.append(KEY, 5)
    assert policy.select(index, QUERY, FIRST, 6, 4).unit_ids.tolist() == [[0, 1, 2, 3]]
