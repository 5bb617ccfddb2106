"""shared_ranks(): the least error for the same sum, and equals for equals."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.indexes.rank_shares import UNIT, shared_ranks

ERRORS = st.integers(1, 4).flatmap(
    lambda units: st.tuples(
        st.just(units),
        st.lists(
            st.lists(st.floats(0, 1), min_size=units, max_size=units), min_size=1, max_size=4
        ),
    )
)


@settings(deadline=None)
@given(ERRORS, st.integers(0, UNIT - 1))
def test_every_mean_is_met(case: tuple[int, list[list[float]]], more: int) -> None:
    units, errors = case
    most = units * UNIT + more
    shares = shared_ranks(errors, most)
    assert len(shares) == most
    for mean, ranks in enumerate(shares, start=1):
        assert sum(ranks) == mean * len(errors)
        assert all(min(mean, UNIT) <= rank <= most for rank in ranks)


@settings(deadline=None)
@given(ERRORS)
def test_no_other_division_is_better(case: tuple[int, list[list[float]]]) -> None:
    units, errors = case
    layers = len(errors)
    for mean in range(1, units + 1):
        ranks = shared_ranks(errors, units * UNIT)[mean * UNIT - 1]
        found = sum(error[rank // UNIT - 1] for error, rank in zip(errors, ranks, strict=True))
        best = min(
            sum(error[taken - 1] for error, taken in zip(errors, each, strict=True))
            for each in itertools.product(range(1, units + 1), repeat=layers)
            if sum(each) == mean * layers
        )
        assert found <= best + 1e-3 * layers


@pytest.mark.parametrize("error", [0.0, 0.3])
def test_equals_get_the_same(error: float) -> None:
    shares = shared_ranks([[error] * 9] * 5, 72)
    assert shares[24 - 1] == (24,) * 5
    assert shares[4 - 1] == (4,) * 5
    assert shares[72 - 1] == (72,) * 5
    assert max(shares[30 - 1]) - min(shares[30 - 1]) <= 2 * UNIT


def test_a_layer_that_needs_much_gets_it() -> None:
    cliff = [0.9] * 7 + [0.0, 0.0]
    slope = [0.4, 0.1, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01]
    shares = shared_ranks([slope, cliff, slope, slope], 72)
    assert shares[28 - 1] == (16, 64, 16, 16)
    assert shares[16 - 1] == (24, 8, 16, 16), "half a cliff is worth nothing"


def test_one_layer() -> None:
    assert shared_ranks([[0.3, 0.2]], 16) == [(mean,) for mean in range(1, 17)]
