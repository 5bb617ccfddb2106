"""FetchPlan: what must move for a selection to be resident, and into which slots."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.selection import Selection
from penstock.tiers.replacement.base import ReplacementPolicy
from penstock.tiers.slot_table import ABSENT, SlotTable


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


def plan_fetch(selection: Selection, table: SlotTable, replacement: ReplacementPolicy) -> FetchPlan:
    """Look the selection up, choose slots for what is missing, and admit it to the table.

    The table already says where the missing units will be; until the fetch has landed nobody may
    attend to those slots. Slots that hold selected units are never chosen as victims.
    """
    wanted = selection.unit_ids
    slots = table.lookup(wanted).astype(np.int64)
    missing = slots == ABSENT
    num_wanted = wanted.size
    if selection.valid is not None:
        missing &= selection.valid
        num_wanted = int(selection.valid.sum())
    rows, columns = missing.nonzero()
    units = wanted[rows, columns]
    if len(rows) == 0:
        nothing = np.empty(0, dtype=np.int64)
        return FetchPlan(nothing, nothing, nothing, slots, num_wanted, num_wanted)
    pinned = np.zeros((wanted.shape[0], table.num_slots), dtype=np.bool_)
    hit_rows, hit_columns = (slots != ABSENT).nonzero()
    pinned[hit_rows, slots[hit_rows, hit_columns]] = True
    victims = replacement.victims(pinned, missing.sum(axis=1))
    table.admit(rows, units, victims)
    slots[rows, columns] = victims
    return FetchPlan(rows, units, victims, slots, num_wanted, num_wanted - len(rows))
