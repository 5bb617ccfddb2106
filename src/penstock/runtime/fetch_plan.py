"""FetchPlan: what must move for a selection to be resident, and into which slots."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.core.selection import Selection
from penstock.kernels.native.compiled import address, kernel
from penstock.tiers.replacement.base import ReplacementPolicy
from penstock.tiers.replacement.cluster_aligned import ClusterAligned
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
    planned = None
    if type(replacement) is FIFO:
        planned = _plan_fifo(selection, table, replacement)
    elif type(replacement) is ClusterAligned:
        planned = _plan_clusters(selection, table, replacement)
    if planned is not None:
        return planned
    return plan_fetch_reference(selection, table, replacement)


def plan_fetch_reference(
    selection: Selection, table: SlotTable, replacement: ReplacementPolicy
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


class _Lists:
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


def _plan_fifo(selection: Selection, table: SlotTable, fifo: FIFO) -> FetchPlan | None:
    """`plan_fetch` with a clock, in one compiled call."""
    compiled = kernel("plan_fifo_fetch")
    if compiled is None:
        return None
    lists, pinned = _Lists(selection), np.empty(table.num_slots, dtype=np.bool_)
    compiled(*lists.asked(table), address(fifo.heads), address(pinned), *lists.places())
    return lists.plan()


def _plan_clusters(
    selection: Selection, table: SlotTable, policy: ClusterAligned
) -> FetchPlan | None:  # fmt: skip
    """`plan_fetch` cluster by cluster, in one compiled call."""
    compiled, told = kernel("plan_cluster_fetch"), policy.told
    assert told is not None, "tell() comes first"
    if compiled is None or not told.owners.flags.c_contiguous:
        return None
    lists, sizes = _Lists(selection), np.ascontiguousarray(told.sizes, dtype=np.int32)
    policy.clock += 1
    numbers = np.array([
        told.owners.itemsize, told.owners.shape[1], told.base, sizes.shape[1],
        told.updated.shape[1], told.now, policy.reserved, policy.prefers_small, policy.clock,
    ], dtype=np.int64)  # fmt: skip
    scratch = np.empty(4 * table.num_slots + 1, dtype=np.int64)
    compiled(
        *lists.asked(table), address(told.owners), address(sizes), address(told.updated),
        address(numbers), address(policy.wanted_at), address(scratch), *lists.places(),
    )  # fmt: skip
    return lists.plan()
