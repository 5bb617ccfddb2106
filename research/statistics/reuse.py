"""ReuseBuffer: the hit rate of KVSwap's reuse buffer for a stream of selections, without a disk."""

import numpy as np
from numpy.typing import NDArray

from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.slot_table import ABSENT, SlotTable


class ReuseBuffer:
    """Slots for units, first in, first out; what a step needs is not evicted by it.

    Source: KVSwap, section 3.4.3; its reuse ratio (section 6, table 5) is the hit rate. The slots
    and their replacement are those of our engine. A buffer of exactly one selection has the overlap
    of adjacent steps (figure 8) as its hit rate.
    """

    def __init__(self, batch: int, num_slots: int, max_units: int) -> None:
        """An empty buffer.

        Args:
            num_slots: units that fit; at least the largest selection.
            max_units: units that there can be.
        """
        self._table = SlotTable(batch, num_slots, max_units)
        self._replacement = FIFO(batch, num_slots)

    def take(self, selected: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Look up one step's selection and bring in what is missing.

        Args:
            selected: [batch, units]

        Returns:
            Share of the selection that was there, 0 to 1; NaN where nothing was selected. [batch]
        """
        units = selected.shape[1]
        held = self._table.slot_of[:, :units] != ABSENT
        missing = selected & ~held
        inside = self._table.unit_in
        # Units beyond those of this step cannot be held: there are never fewer than before.
        pinned = np.take_along_axis(selected, np.maximum(inside, 0).astype(np.int64), axis=1)
        pinned &= inside != ABSENT
        victims = self._replacement.victims(pinned, missing.sum(axis=1))
        rows, wanted = missing.nonzero()
        self._table.admit(rows, wanted, victims)
        sizes = selected.sum(axis=1)
        hits = (selected & held).sum(axis=1)
        rates: NDArray[np.float64] = np.full(len(sizes), np.nan)
        np.divide(hits, sizes, out=rates, where=sizes > 0)
        return rates
