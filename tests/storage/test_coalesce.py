"""Coalescing moves exactly what was asked, in as few transfers as the rules allow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.coalesce import coalesce

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60)


def split(wanted: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(wanted, dtype=np.int64).reshape(-1, 2)
    return array[:, 0].copy(), array[:, 1].copy()


@given(pairs, st.integers(1, 8))
def test_every_pair_is_moved_once_and_nothing_else(
    wanted: list[tuple[int, int]], max_units: int
) -> None:
    runs = coalesce(*split(wanted), max_units)
    moved = [
        (unit + i, row + i)
        for unit, row, count in zip(*(part.tolist() for part in runs), strict=True)
        for i in range(count)
    ]
    assert sorted(moved) == sorted(wanted)


@given(pairs, st.integers(1, 8))
def test_runs_are_sorted_and_capped(wanted: list[tuple[int, int]], max_units: int) -> None:
    runs = coalesce(*split(wanted), max_units)
    assert (np.diff(runs.first_units) >= 0).all()
    assert (runs.num_units >= 1).all()
    assert (runs.num_units <= max_units).all()
    assert all(part.dtype == np.int64 for part in runs)


@given(st.sets(st.integers(0, 60)), st.integers(-5, 5))
def test_neighbours_are_merged(units: set[int], lead: int) -> None:
    ids = np.array(sorted(units), dtype=np.int64)
    np.random.default_rng(len(units)).shuffle(ids)
    runs = coalesce(ids, ids + lead + 5, 1000)
    assert len(runs.num_units) == sum(unit - 1 not in units for unit in units)


def test_a_long_run_is_cut_into_full_pieces() -> None:
    ids = np.arange(10)
    assert coalesce(ids, ids + 3, 4).num_units.tolist() == [4, 4, 2]
    assert coalesce(ids, ids + 3, 4).first_slots.tolist() == [3, 7, 11]


def test_inputs_are_left_alone() -> None:
    ids, rows = np.array([5, 3, 4]), np.array([2, 0, 1])
    coalesce(ids, rows, 8)
    assert ids.tolist() == [5, 3, 4]
    assert rows.tolist() == [2, 0, 1]
