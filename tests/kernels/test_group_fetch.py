"""GroupFetch: one call does what selection, plan and requests do one after the other."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.core.selection import Selection
from penstock.engine.fetch_plan import FetchPlan, plan_fetch_twin
from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.slot_table import SlotTable
from penstock.kernels.group_fetch import Fetched, GroupFetch, SlotArrays
from penstock.kernels.group_selection import GroupSelection
from penstock.kernels.key_rotation import KeyRotation
from penstock.kernels.native import compiled
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.coalesce import coalesce_twin

pytestmark = pytest.mark.skipif(
    compiled.kernel("fetch_groups") is None, reason="no VNNI here, or kernels were not compiled"
)

GROUPS, SLOTS_PER_ROW, UNIT, RUN = 200, 40, 512, 3
DESCRIPTOR, KEY = 17, 5 << 32


class Case:
    """One layer twice: fetched in one call, and step by step."""

    def __init__(
        self, batch: int, slots: int, stored: NDArray[np.int64], *, turned: bool = False,
        resident_factor: float = 1.0,
    ) -> None:  # fmt: skip
        heads, kv_heads, dim, rank = 4, 2, 32, 16
        codes = torch.randint(-127, 128, (batch, 4, 2, 64, rank), dtype=torch.int8)
        basis = torch.randn(kv_heads * dim, rank)
        turns = None
        if turned:
            rotation = KeyRotation(torch.logspace(0, -3, dim // 2, dtype=torch.float64))
            turns = rotation.turns(32, 4 * 64 // 16, basis.device)
        self.selection = GroupSelection(codes, basis, torch.ones(rank), 8, heads, kv_heads, turns)
        self.tables = [SlotTable(batch, slots, GROUPS) for _ in range(2)]
        self.clocks = [FIFO(batch, slots) for _ in range(2)]
        self.stored, self.buffer = stored, AlignedBuffer(batch * SLOTS_PER_ROW, UNIT)
        self.arrays = SlotArrays(
            slot_of=self.tables[0].slot_of, unit_in=self.tables[0].unit_in,
            heads=self.clocks[0].heads, stored=stored, slots_per_row=SLOTS_PER_ROW,
            buffer=self.buffer.address, slot_bytes=UNIT, buffer_slots=self.buffer.num_slots,
            run_units=RUN, descriptor=DESCRIPTOR, resident_factor=resident_factor,
        )  # fmt: skip
        self.call = GroupFetch(self.selection, self.arrays)
        self.shape = (batch, heads, dim)

    def step(self, first: int, end: int, wanted: int) -> tuple[Fetched, FetchPlan]:
        query = torch.randn(self.shape)
        fetched = self.call.submit(query, (first, end), wanted, context=0, room=0, key=KEY)
        resident = (self.tables[1].unit_in, self.arrays.resident_factor)
        chosen = self.selection.best(query, first, end, wanted, *resident)
        np.testing.assert_array_equal(fetched.chosen, chosen)
        plan = plan_fetch_twin(Selection(chosen), self.tables[1], self.clocks[1])
        np.testing.assert_array_equal(fetched.slots, plan.selected_slots)
        for found, expected in (
            (fetched.rows, plan.rows), (fetched.units, plan.units), (fetched.victims, plan.slots),
            (self.tables[0].slot_of, self.tables[1].slot_of),
            (self.tables[0].unit_in, self.tables[1].unit_in),
            (self.clocks[0].heads, self.clocks[1].heads),
        ):  # fmt: skip
            np.testing.assert_array_equal(found, expected)
        return fetched, plan


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_as_step_by_step(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    batch, slots = data.draw(st.integers(1, 3)), data.draw(st.integers(20, SLOTS_PER_ROW))
    stored = np.arange(batch * GROUPS).reshape(batch, GROUPS)
    if data.draw(st.booleans()):  # holes, so that less is merged
        stored = stored * 2
    factor = data.draw(st.sampled_from([1.0, 3.0]))
    case = Case(batch, slots, stored, turned=data.draw(st.booleans()), resident_factor=factor)
    for _ in range(4):
        first, end = data.draw(st.integers(0, 5)), data.draw(st.integers(60, GROUPS))
        fetched, plan = case.step(first, end, data.draw(st.integers(1, 20)))
        units, places = stored[plan.rows, plan.units], plan.rows * SLOTS_PER_ROW + plan.slots
        runs = coalesce_twin(units, places, RUN)
        assert fetched.taken == 0
        assert fetched.read_bytes == len(units) * UNIT
        assert fetched.iocbs is not None
        expected = np.zeros((len(runs.first_units), 8), dtype=np.int64)
        expected[:, 0] = KEY + np.arange(len(expected))
        expected[:, 2] = DESCRIPTOR << 32
        expected[:, 3] = case.buffer.address + runs.first_slots * UNIT
        expected[:, 4] = runs.num_units * UNIT
        expected[:, 5] = runs.first_units * UNIT
        np.testing.assert_array_equal(fetched.iocbs, expected)
        if len(expected):
            assert fetched.address == compiled.address(fetched.iocbs)


def test_units_out_of_order_are_left_to_others() -> None:
    torch.manual_seed(0)
    case = Case(2, 30, np.arange(2 * GROUPS)[::-1].reshape(2, GROUPS).copy())
    fetched, plan = case.step(0, GROUPS, 20)
    assert fetched.iocbs is None
    assert fetched.taken == 0
    assert len(plan.rows) == 40


def test_nothing_is_missing_the_second_time() -> None:
    torch.manual_seed(0)
    case = Case(1, 30, np.arange(GROUPS)[None].copy())
    case.step(0, 20, 20)
    fetched, plan = case.step(0, 20, 20)
    assert len(plan.rows) == 0
    assert fetched.iocbs is not None
    assert fetched.iocbs.shape == (0, 8)


def test_wrong_memory_is_refused() -> None:
    case = Case(1, 10, np.arange(GROUPS)[None].copy())
    with pytest.raises(AssertionError, match="fewer unpinned slots"):
        case.call.submit(torch.randn(case.shape), (0, GROUPS), 11, 0, 0, 0)
    with pytest.raises(AssertionError, match="one piece"):
        GroupFetch(case.selection, replace(case.arrays, stored=case.stored[:, ::2]))
    small = GroupFetch(case.selection, replace(case.arrays, buffer_slots=3))
    with pytest.raises(AssertionError, match="outside the buffer"):
        small.submit(torch.randn(case.shape), (0, GROUPS), 5, 0, 0, 0)
