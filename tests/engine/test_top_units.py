"""top_units: the best units of each row, never one before the row's first."""

from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.policy import top_units


def naive(scores: list[float], first: int, wanted: int) -> list[int]:
    ranked = sorted(range(first, len(scores)), key=lambda unit: -scores[unit])
    return sorted(ranked[:wanted])


@given(
    st.integers(1, 3).flatmap(
        lambda batch: st.tuples(
            st.lists(st.integers(0, 7), min_size=batch, max_size=batch),
            st.integers(8, 20),
            st.integers(1, 25),
            st.randoms(use_true_random=False),
        )
    )
)
def test_against_sorting(case: tuple[list[int], int, int, Random]) -> None:
    first, units, wanted, random = case
    scores = [list(map(float, range(units))) for _ in first]
    for row in scores:
        random.shuffle(row)
    selection = top_units(torch.tensor(scores), np.array(first), wanted)
    assert (np.diff(selection.unit_ids, axis=1) > 0).all(), "ascending, without repeats"
    assert selection.unit_ids.shape[1] <= wanted
    for i, start in enumerate(first):
        ids = selection.unit_ids[i]
        if selection.valid is not None:
            ids = ids[selection.valid[i]]
        assert ids.tolist() == naive(scores[i], start, wanted)


def test_scores_are_not_changed() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    selection = top_units(scores, np.array([0, 2]), 2)
    assert scores.isfinite().all()
    assert selection.unit_ids[0].tolist() == [0, 1]
    assert selection.valid is not None
    assert selection.valid.tolist() == [[True, True], [False, True]]


def test_all_valid_says_none() -> None:
    assert top_units(torch.zeros(2, 10), np.array([1, 1]), 9).valid is None
    assert top_units(torch.zeros(2, 10), np.array([1, 4]), 6).valid is None
