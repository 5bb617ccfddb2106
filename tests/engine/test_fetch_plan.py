"""plan_fetch: hits stay, misses get slots that nobody needs, rows keep to themselves."""

import numpy as np

from penstock.core.selection import Selection
from penstock.engine.fetch_plan import plan_fetch
from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.slot_table import ABSENT, SlotTable
from penstock.testing.integrity import check_slots


def test_hits_and_misses() -> None:
    table, fifo = SlotTable(2, 3, 10), FIFO(2, 3)
    first = plan_fetch(Selection(np.array([[0, 1, 2], [5, 6, 7]])), table, fifo)
    assert (first.num_wanted, first.num_hit) == (6, 0)
    second = plan_fetch(Selection(np.array([[1, 2, 4], [5, 6, 7]])), table, fifo)
    assert (second.num_wanted, second.num_hit) == (6, 5)
    assert second.rows.tolist() == [0]
    assert second.units.tolist() == [4]
    check_slots(table)
    for row in range(2):
        held = table.unit_in[row, second.selected_slots[row]]
        assert held.tolist() == [[1, 2, 4], [5, 6, 7]][row]


def test_nothing_missing_plans_nothing() -> None:
    table, fifo = SlotTable(1, 4, 10), FIFO(1, 4)
    plan_fetch(Selection(np.array([[3, 4]])), table, fifo)
    again = plan_fetch(Selection(np.array([[3, 4]])), table, fifo)
    assert len(again.rows) == len(again.units) == len(again.slots) == 0
    assert again.num_hit == again.num_wanted == 2


def test_rows_that_were_not_ranked_again_are_counted_apart() -> None:
    """Of the second row everything is still there; of the third, one unit has to be read."""
    table, fifo = SlotTable(3, 3, 10), FIFO(3, 3)
    plan_fetch(Selection(np.array([[0, 1, 2], [5, 6, 7], [1, 2, 4]])), table, fifo)
    wanted = np.array([[1, 2, 4], [5, 6, 7], [1, 2, 3]])
    reused = np.array([False, True, True])
    plan = plan_fetch(Selection(wanted, None, reused), table, fifo)
    assert (plan.num_wanted, plan.num_hit, plan.num_reused) == (9, 7, 5)
    valid = np.array([[True] * 3, [False, True, True], [True] * 3])
    plan = plan_fetch(Selection(wanted, valid, reused), table, fifo)
    assert (plan.num_wanted, plan.num_hit, plan.num_reused) == (8, 8, 5)


def test_invalid_choices_are_not_fetched() -> None:
    table, fifo = SlotTable(2, 2, 10), FIFO(2, 2)
    valid = np.array([[True, True], [False, True]])
    plan = plan_fetch(Selection(np.array([[0, 1], [0, 1]]), valid), table, fifo)
    assert (plan.num_wanted, plan.num_hit) == (3, 0)
    assert sorted(zip(plan.rows.tolist(), plan.units.tolist(), strict=True)) == [
        (0, 0), (0, 1), (1, 1),
    ]  # fmt: skip
    assert plan.selected_slots[1, 0] == ABSENT
    assert 0 not in table.unit_in[1]


def test_neighbours_stay_neighbours() -> None:
    """Missing units ascend within a row and fresh slots do too, so that reads coalesce."""
    table, fifo = SlotTable(1, 8, 100), FIFO(1, 8)
    plan = plan_fetch(Selection(np.array([[10, 11, 12, 40, 41]])), table, fifo)
    assert plan.units.tolist() == [10, 11, 12, 40, 41]
    assert plan.slots.tolist() == [0, 1, 2, 3, 4]
