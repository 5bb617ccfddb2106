"""First in, first out: KVSwap's reuse buffer (section 3.4.3)."""

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from penstock.core.selection import Selection
from penstock.engine.fetch_plan import FetchPlan, PlanLists
from penstock.engine.tiers.replacement import ReplacementPolicy
from penstock.engine.tiers.slot_table import SlotTable
from penstock.kernels.native.compiled import address, kernel


class FIFO(ReplacementPolicy):
    """Evicts in order of admission; a slot that is pinned this step is passed over once.

    Source: KVSwap, section 3.4.3 ("a simple FIFO policy"). The paper does not say what happens to
    the oldest slot when the step that evicts it also needs it; here it keeps its place.
    """

    def __init__(self, batch: int, num_slots: int) -> None:
        self._num_slots = num_slots
        self.heads = np.zeros(batch, dtype=np.int64)
        """Where each row's clock hand stands. [batch]"""
        self._offsets = np.arange(num_slots)
        self._rows = np.arange(batch)[:, None]

    @override
    def plan_at_once(self, selection: Selection, table: SlotTable) -> FetchPlan | None:
        compiled = kernel("plan_fifo_fetch")
        if compiled is None or type(self) is not FIFO:
            return None
        lists, pinned = PlanLists(selection), np.empty(table.num_slots, dtype=np.bool_)
        compiled(*lists.asked(table), address(self.heads), address(pinned), *lists.places())
        return lists.plan()

    @override
    def victims(self, pinned: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The clock hand moves past the last slot taken."""
        order = (self.heads[:, None] + self._offsets) % self._num_slots
        free = ~pinned[self._rows, order]
        chosen = free & (free.cumsum(axis=1) <= counts[:, None])
        rows, places = chosen.nonzero()
        assert len(rows) == counts.sum(), "fewer unpinned slots than units to admit"
        # The hand stops behind the last slot taken in each row (`places` ascends within a row).
        last = counts.cumsum() - 1
        taken = counts > 0
        self.heads[taken] += places[last[taken]] + 1
        self.heads %= self._num_slots
        victims: NDArray[np.int64] = order[rows, places]
        return victims

    @override
    def copy_rows(self, rows: NDArray[np.int64]) -> "FIFO":
        copy = FIFO(len(rows), self._num_slots)
        copy.heads = self.heads[rows].copy()
        return copy
