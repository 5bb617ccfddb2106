"""SlotTable with FIFO against a naive model: two dictionaries and a clock per batch row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.slot_table import ABSENT, SlotTable
from penstock.testing.integrity import check_slots

UNITS = 12


class NaiveRow:
    """One row: a list of slots and a clock hand."""

    def __init__(self, num_slots: int) -> None:
        self.slots: list[int | None] = [None] * num_slots
        self.hand = 0

    def fetch(self, wanted: list[int]) -> list[int]:
        """Units that had to be fetched; they are in slots now."""
        pinned = {i for i, unit in enumerate(self.slots) if unit in wanted}
        missing = [unit for unit in wanted if unit not in self.slots]
        for unit in missing:
            while self.hand in pinned:
                self.hand = (self.hand + 1) % len(self.slots)
            self.slots[self.hand] = unit
            pinned.add(self.hand)
            self.hand = (self.hand + 1) % len(self.slots)
        return missing


def fetch(table: SlotTable, fifo: FIFO, wanted: list[list[int]]) -> list[list[int]]:
    """One step of all rows at once, as `plan_fetch` does it; returns what each row fetched."""
    units = np.array(wanted, dtype=np.int64).reshape(len(wanted), -1)
    slots = table.look_up(units).slots
    pinned = np.zeros(table.unit_in.shape, dtype=np.bool_)
    for row, slot in zip(*np.nonzero(slots != ABSENT), strict=True):
        pinned[row, slots[row, slot]] = True
    missing = slots == ABSENT
    rows, columns = np.nonzero(missing)
    victims = fifo.victims(pinned, missing.sum(axis=1))
    assert not pinned[rows, victims].any(), "a pinned slot was taken"
    assert len(set(zip(rows.tolist(), victims.tolist(), strict=True))) == len(rows)
    table.admit(rows, units[rows, columns], victims)
    return [units[row][missing[row]].tolist() for row in range(len(units))]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, object]]]:
    """(rows, slots, steps): fetches of equally many units per row, clearings and reorders."""
    rows, num_slots = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    steps: list[tuple[str, object]] = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["fetch", "fetch", "fetch", "forget", "reorder"]))
        if kind == "fetch":
            count = draw(st.integers(1, num_slots))
            one = st.lists(st.integers(0, UNITS - 1), min_size=count, max_size=count, unique=True)
            steps.append((kind, [sorted(draw(one)) for _ in range(rows)]))
        elif kind == "forget":
            steps.append((kind, None))
        else:
            order = st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows)
            steps.append((kind, draw(order)))
    return rows, num_slots, steps


@given(histories())
def test_against_the_naive_model(history: tuple[int, int, list[tuple[str, object]]]) -> None:
    rows, num_slots, steps = history
    table, fifo = SlotTable(rows, num_slots, UNITS), FIFO(rows, num_slots)
    naive = [NaiveRow(num_slots) for _ in range(rows)]
    for kind, argument in steps:
        if kind == "fetch":
            assert isinstance(argument, list)
            fetched = fetch(table, fifo, argument)
            assert fetched == [row.fetch(units) for row, units in zip(naive, argument, strict=True)]
            assert (table.look_up(np.array(argument)).slots != ABSENT).all(), (
                "what is wanted is there"
            )
        elif kind == "forget":
            table.clear()
            for row in naive:
                row.slots = [None] * num_slots
        else:
            assert isinstance(argument, list)
            order = np.array(argument)
            table, fifo = table.copy_rows(order), fifo.copy_rows(order)
            copies = []
            for source in argument:
                copy = NaiveRow(num_slots)
                copy.slots, copy.hand = list(naive[source].slots), naive[source].hand
                copies.append(copy)
            naive = copies
        check_slots(table)
        held = [[ABSENT if u is None else u for u in row.slots] for row in naive]
        assert table.unit_in.tolist() == held


def test_first_in_first_out() -> None:
    table, fifo = SlotTable(1, 3, UNITS), FIFO(1, 3)
    for unit in (5, 3, 8, 1):
        fetch(table, fifo, [[unit]])
    assert sorted(table.unit_in[0].tolist()) == [1, 3, 8], "5 came first and left first"


def test_rows_do_not_disturb_each_other() -> None:
    table, fifo = SlotTable(2, 2, UNITS), FIFO(2, 2)
    fetch(table, fifo, [[0, 1], [0, 1]])
    table.admit(np.array([1]), np.array([7]), np.array([0]))
    check_slots(table)
    assert table.unit_in.tolist() == [[0, 1], [7, 1]]


def test_too_many_pins_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="fewer unpinned slots"):
        FIFO(1, 2).victims(np.array([[True, False]]), np.array([2]))


@pytest.mark.parametrize("damage", ["slot", "unit"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    table = SlotTable(1, 2, UNITS)
    table.admit(np.array([0]), np.array([4]), np.array([1]))
    check_slots(table)
    if damage == "slot":
        table.unit_in[0, 0] = 5
    else:
        table.slot_of[0, 6] = 1
    with pytest.raises(AssertionError, match="slot table"):
        check_slots(table)


def test_clear_and_size() -> None:
    table = SlotTable(2, 3, UNITS)
    table.admit(np.array([0, 1]), np.array([4, 5]), np.array([1, 2]))
    table.clear()
    assert (table.unit_in == ABSENT).all()
    assert (table.slot_of == ABSENT).all()
    held = table.unit_in.nbytes + table.slot_of.nbytes
    assert SlotTable.num_bytes(2, 3, UNITS) == held
