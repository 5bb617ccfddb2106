"""UnitMap: every group has one place, rows share only what they had in common."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.unit_map import UNMAPPED, UnitMap

MAX_GROUPS = 30


def test_a_chunk_is_one_run_per_row() -> None:
    units = UnitMap(2, MAX_GROUPS)
    assert units.ensure(0, 5) == 10
    assert (np.diff(units.table[:, :5], axis=1) == 1).all()
    assert units.ensure(0, 5) == 10, "the other layers get the same"
    assert units.ensure(5, 5) == 10
    assert len(np.unique(units.table[:, :5])) == 10
    assert (units.table[:, 5:] == UNMAPPED).all()
    assert UnitMap.num_bytes(2, MAX_GROUPS) == units.table.nbytes


def test_forks_share_and_then_part() -> None:
    units = UnitMap(1, MAX_GROUPS)
    units.ensure(0, 4)
    units.select_rows(np.array([0, 0, 0]))
    assert (units.table[0] == units.table[1]).all()
    units.ensure(4, 6)
    assert len(np.unique(units.table[:, 4:6])) == 6
    assert units.num_units == 10


def test_what_nobody_uses_is_used_again() -> None:
    units = UnitMap(1, MAX_GROUPS)
    units.ensure(0, 10)
    units.forget_from(4)
    kept = units.table[0, :4].copy()
    assert units.num_units == 4, "a store that was full need not be that large again"
    assert units.ensure(4, 10) == 10
    assert (units.table[0, :4] == kept).all()
    assert sorted(units.table[0, :10].tolist()) == list(range(10))


def test_what_a_lost_beam_left_is_used_again() -> None:
    units = UnitMap(2, MAX_GROUPS)
    units.ensure(0, 5)
    units.select_rows(np.array([1, 1]))
    assert units.ensure(5, 7) == 10, "row 0 left five units, four are wanted"
    assert units.ensure(7, 8) == 12
    assert len(np.unique(units.table[:, 5:8])) == 6


@given(
    st.integers(1, 3),
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 6)),
            st.tuples(st.just("crop"), st.integers(0, MAX_GROUPS)),
            st.tuples(st.just("rows"), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
        ),
        max_size=14,
    ),
)
def test_random_lives(batch: int, steps: list[tuple[str, object]]) -> None:
    """A store that remembers who wrote what last: nobody ever finds another's bytes."""
    units, length, written = UnitMap(batch, MAX_GROUPS), 0, 0
    store: dict[int, int] = {}
    expected: list[list[int]] = [[] for _ in range(batch)]
    for kind, argument in steps:
        if kind == "append":
            assert isinstance(argument, int)
            end = min(MAX_GROUPS, length + argument)
            assert units.ensure(length, end) == units.num_units
            for row in range(len(expected)):
                for group in range(length, end):
                    written += 1
                    store[int(units.table[row, group])] = written
                    expected[row].append(written)
            length = end
        elif kind == "crop":
            assert isinstance(argument, int)
            length = min(length, argument)
            units.forget_from(length)
            expected = [row[:length] for row in expected]
        else:
            assert isinstance(argument, list)
            rows = [i % len(expected) for i in argument]
            units.select_rows(np.array(rows))
            expected = [list(expected[i]) for i in rows]
        found = [[store[int(u)] for u in row[:length]] for row in units.table]
        assert found == expected
        assert (units.table[:, length:] == UNMAPPED).all()
    assert units.num_units <= max(1, written)


def test_shared_units_are_never_handed_out() -> None:
    units = UnitMap(1, MAX_GROUPS)
    units.share(0, np.array([3, 1, 2]), num_places=5)
    assert units.ensure(0, 3) == 5
    assert units.ensure(3, 5) == 7
    assert units.table[0, :5].tolist() == [3, 1, 2, 5, 6]
    units.forget_from(1)
    assert units.num_units == 5, "units of others stay, whether a group holds them or not"
    units.ensure(1, 4)
    assert sorted(units.table[0, :4].tolist()) == [3, 5, 6, 7]
