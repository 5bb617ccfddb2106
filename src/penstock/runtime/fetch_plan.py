"""FetchPlan: what must move for a selection to be resident, and into which slots."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.core.selection import Selection
from penstock.kernels.native.compiled import Kernel, address, kernel
from penstock.tiers.replacement.base import ReplacementPolicy
from penstock.tiers.replacement.fifo import FIFO
from penstock.tiers.slot_table import SlotTable


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


def plan_fetch(selection: Selection, table: SlotTable, replacement: ReplacementPolicy) -> FetchPlan:
    """Look the selection up, choose slots for what is missing, and admit it to the table.

    The table already says where the missing units will be; until the fetch has landed nobody may
    attend to those slots. Slots that hold selected units are never chosen as victims.
    """
    plan = _plan(selection, table, replacement)
    reused = selection.reused
    if reused is None or not reused.any():
        return plan
    valid = selection.valid
    held = reused.sum() * selection.unit_ids.shape[1] if valid is None else valid[reused].sum()
    return replace(plan, num_reused=int(held) - int(reused[plan.rows].sum()))


def _plan(selection: Selection, table: SlotTable, replacement: ReplacementPolicy) -> FetchPlan:
    compiled = kernel("plan_fifo_fetch") if type(replacement) is FIFO else None
    if compiled is not None:
        return _plan_fifo(compiled, selection, table, replacement)  # type: ignore[arg-type]
    wanted, valid = selection.unit_ids, selection.valid
    found = table.look_up(wanted, valid)
    num_wanted = wanted.size if valid is None else int(valid.sum())
    missing = len(found.rows)
    if missing == 0:
        nothing = np.empty(0, dtype=np.int64)
        return FetchPlan(nothing, nothing, nothing, found.slots, num_wanted, num_wanted)
    units = wanted[found.rows, found.columns]
    victims = replacement.victims(found.pinned, found.counts)
    table.admit(found.rows, units, victims)
    found.slots[found.rows, found.columns] = victims
    return FetchPlan(found.rows, units, victims, found.slots, num_wanted, num_wanted - missing)


def _plan_fifo(compiled: Kernel, selection: Selection, table: SlotTable, fifo: FIFO) -> FetchPlan:
    """`plan_fetch` with a clock, in one compiled call."""
    wanted = np.ascontiguousarray(selection.unit_ids)
    valid = selection.valid
    if valid is not None:
        valid = np.ascontiguousarray(valid)
    batch, width = wanted.shape
    size = batch * width
    out = np.empty(4 * size + 1, dtype=np.int64)
    pinned = np.empty(table.num_slots, dtype=np.bool_)
    first, step = address(out), 8 * size
    compiled(
        address(wanted), None if valid is None else address(valid), batch, width,
        table.slot_of.shape[1], table.num_slots, address(table.slot_of), address(table.unit_in),
        address(fifo.heads), address(pinned), first, first + step, first + 2 * step,
        first + 3 * step, first + 4 * step,
    )  # fmt: skip
    missing = int(out[-1])
    assert missing >= 0, "fewer unpinned slots than units to admit"
    slots, rows, units, victims = out[:-1].reshape(4, size)
    num_wanted = size if valid is None else int(valid.sum())
    return FetchPlan(
        rows[:missing], units[:missing], victims[:missing], slots.reshape(batch, width),
        num_wanted, num_wanted - missing,
    )  # fmt: skip
