"""shared_ranks(): the least cost for the same sum, and equals for equals."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.rank_shares import UNIT, UNSEEN, shared_ranks

COSTS = st.integers(1, 4).flatmap(
    lambda units: st.tuples(
        st.just(units),
        st.lists(st.lists(st.floats(0, 1), min_size=units, max_size=units), min_size=1, max_size=4),
    )
)


@settings(deadline=None)
@given(COSTS, st.integers(0, UNIT - 1))
def test_every_mean_is_met(case: tuple[int, list[list[float]]], more: int) -> None:
    units, costs = case
    most = units * UNIT + more
    shares = shared_ranks(costs, most)
    assert len(shares) == most
    for mean, ranks in enumerate(shares, start=1):
        assert sum(ranks) == mean * len(costs)
        assert all(min(mean, UNIT) <= rank <= most for rank in ranks)


def total(costs: Sequence[Sequence[float]], units: Sequence[int]) -> float:
    """What a division is held to cost."""
    measured: float = sum(cost[each - 1] for cost, each in zip(costs, units, strict=True))
    unseen: float = sum(UNSEEN / 2**each for each in units)
    return measured + unseen


@settings(deadline=None)
@given(COSTS)
def test_no_other_division_is_better(case: tuple[int, list[list[float]]]) -> None:
    units, costs = case
    layers = len(costs)
    for mean in range(1, units + 1):
        ranks = shared_ranks(costs, units * UNIT)[mean * UNIT - 1]
        found = total(costs, [rank // UNIT for rank in ranks])
        best = min(
            total(costs, each)
            for each in itertools.product(range(1, units + 1), repeat=layers)
            if sum(each) == mean * layers
        )
        assert found == pytest.approx(best)


@pytest.mark.parametrize("cost", [0.0, 0.3])
def test_equals_get_the_same(cost: float) -> None:
    shares = shared_ranks([[cost] * 9] * 5, 72)
    assert shares[24 - 1] == (24,) * 5
    assert shares[4 - 1] == (4,) * 5
    assert shares[72 - 1] == (72,) * 5
    assert max(shares[30 - 1]) - min(shares[30 - 1]) <= 2 * UNIT


def test_a_layer_that_needs_much_gets_it() -> None:
    cliff = [0.9] * 7 + [0.0, 0.0]
    nothing = [0.0] * 9
    shares = shared_ranks([nothing, cliff, nothing, nothing], 72)
    assert shares[28 - 1] == (16, 64, 16, 16)
    assert shares[16 - 1] == (16, 16, 16, 16), "half a cliff is worth nothing"
    assert shares[48 - 1] == (40, 64, 48, 40)


def test_one_layer() -> None:
    assert shared_ranks([[0.3, 0.2]], 16) == [(mean,) for mean in range(1, 17)]
