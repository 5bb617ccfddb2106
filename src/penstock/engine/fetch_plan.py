"""FetchPlan: what must move for a selection to be resident, and into which slots."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.core.selection import Selection
from penstock.engine.tiers.slot_table import SlotTable
from penstock.kernels.native.compiled import address

if TYPE_CHECKING:
    from penstock.engine.tiers.replacement import ReplacementPolicy


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The missing units of one selection and their new slots; plain data."""

    rows: NDArray[np.int64]
    """Batch row of each missing unit. [missing]"""
    units: NDArray[np.int64]
    """Missing units, ascending within a row so that neighbours coalesce. [missing]"""
    slots: NDArray[np.int64]
    """Slot of the row that each one will take. [missing]"""
    selected_slots: NDArray[np.int64]
    """Where every selected unit is once the fetch has landed. [batch, wanted]"""
    num_wanted: int
    num_hit: int
    num_reused: int = 0
    """Of the hits, those that were selected by an earlier step and not ranked again."""


def plan_fetch(
    selection: Selection, table: SlotTable, replacement: "ReplacementPolicy"
) -> FetchPlan:
    """Look the selection up, choose slots for what is missing, and admit it to the table.

    The table already says where the missing units will be; until the fetch has landed those
    slots may not be attended to. Slots that hold selected units are never chosen as victims.
    """
    plan = replacement.plan_at_once(selection, table)
    plan = plan or plan_fetch_twin(selection, table, replacement)
    reused = selection.reused
    if reused is None or not reused.any():
        return plan
    valid = selection.valid
    count = reused.sum() * selection.unit_ids.shape[1] if valid is None else valid[reused].sum()
    return replace(plan, num_reused=int(count) - int(reused[plan.rows].sum()))


def plan_fetch_twin(
    selection: Selection, table: SlotTable, replacement: "ReplacementPolicy"
) -> FetchPlan:
    """The twin of the compiled plans."""
    wanted, valid = selection.unit_ids, selection.valid
    found = table.look_up(wanted, valid)
    num_wanted = wanted.size if valid is None else int(valid.sum())
    missing = len(found.rows)
    replacement.note_wanted(found.pinned)
    if missing == 0:
        nothing = np.empty(0, dtype=np.int64)
        return FetchPlan(nothing, nothing, nothing, found.slots, num_wanted, num_wanted)
    units = wanted[found.rows, found.columns]
    victims = replacement.victims(found.pinned, found.counts)
    table.admit(found.rows, units, victims)
    found.slots[found.rows, found.columns] = victims
    return FetchPlan(found.rows, units, victims, found.slots, num_wanted, num_wanted - missing)


class PlanLists:
    """What a compiled plan writes to, in one array: slots, rows, units, victims, their number."""

    def __init__(self, selection: Selection) -> None:
        self.wanted = np.ascontiguousarray(selection.unit_ids)
        self.valid = selection.valid
        if self.valid is not None:
            self.valid = np.ascontiguousarray(self.valid)
        self._out = np.empty(4 * self.wanted.size + 1, dtype=np.int64)

    def asked(self, table: SlotTable) -> tuple[int | None, ...]:
        """The first arguments of such a kernel: what is wanted, and the table."""
        return (
            address(self.wanted), None if self.valid is None else address(self.valid),
            *self.wanted.shape, table.slot_of.shape[1], table.num_slots, address(table.slot_of),
            address(table.unit_in),
        )  # fmt: skip

    def places(self) -> tuple[int, ...]:
        """The last ones: where the lists go."""
        first, step = address(self._out), 8 * self.wanted.size
        return tuple(first + i * step for i in range(5))

    def plan(self) -> FetchPlan:
        """What was written."""
        missing = int(self._out[-1])
        assert missing >= 0, "fewer unpinned slots than units to admit"
        slots, rows, units, victims = self._out[:-1].reshape(4, -1)
        num_wanted = self.wanted.size if self.valid is None else int(self.valid.sum())
        return FetchPlan(
            rows[:missing], units[:missing], victims[:missing], slots.reshape(self.wanted.shape),
            num_wanted, num_wanted - missing,
        )  # fmt: skip
