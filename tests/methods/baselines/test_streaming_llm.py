"""StreamingLLM by hand: the newest tokens before the window, whatever the query."""

import numpy as np
import torch

from penstock.methods.baselines.streaming_llm import RecencyIndex, StreamingLLM


def test_the_cache_rolls() -> None:
    policy, index = StreamingLLM(selected_tokens=3), RecencyIndex(selected_units=3)
    query, first = torch.randn(2, 4, 8), np.array([4, 8])  # four sinks; four tokens of padding
    selection = policy.select(index, query, first, 10, 3)
    assert selection.unit_ids[0].tolist() == [7, 8, 9]
    assert selection.valid is not None
    assert selection.unit_ids[1][selection.valid[1]].tolist() == [8, 9]
    selection = policy.select(index, query, first, 11, 3)
    assert selection.unit_ids.tolist() == [[8, 9, 10]] * 2
    assert selection.valid is None


def test_what_was_dropped_does_not_come_back_after_a_crop() -> None:
    policy, index = StreamingLLM(selected_tokens=3), RecencyIndex(selected_units=3)
    query, first = torch.randn(1, 4, 8), np.array([4])
    policy.select(index, query, first, 20, 3)
    selection = policy.select(index, query, first, 18, 3)
    assert selection.valid is not None
    assert selection.unit_ids[selection.valid].tolist() == [17]
