"""SlotTable: which unit each slot of a layer holds, and where each unit is."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ABSENT = -1


class Lookup(NamedTuple):
    """What a table knows of some wanted units."""

    slots: NDArray[np.int64]
    """Slot of each, -1 where it is absent. [batch, wanted]"""
    pinned: NDArray[np.bool_]
    """Slots that hold wanted units. [batch, slots]"""
    counts: NDArray[np.int64]
    """Missing units of each row. [batch]"""
    rows: NDArray[np.int64]
    """Row of each missing unit. [missing]"""
    columns: NDArray[np.int64]
    """Its place among the row's wanted units. [missing]"""


class SlotTable:
    """Residency of one layer's units in its slots, for every batch row.

    Two dense arrays that are each other's inverse: `slot_of[b, unit]` and `unit_in[b, slot]`, with
    -1 for "nowhere" and "nothing". KVSwap's slot table (section 3.4.3) is `unit_in`; the other
    direction makes a lookup one gather.
    """

    def __init__(self, batch: int, num_slots: int, max_units: int) -> None:
        self.num_slots = num_slots
        self.slot_of = np.full((batch, max_units), ABSENT, dtype=np.int32)
        self.unit_in = np.full((batch, num_slots), ABSENT, dtype=np.int32)
        self._rows = np.arange(batch)[:, None]

    @staticmethod
    def num_bytes(batch: int, num_slots: int, max_units: int) -> int:
        """Bytes of a table of this size, for the ledger."""
        return 4 * batch * (num_slots + max_units)

    def look_up(self, wanted: NDArray[np.int64], valid: NDArray[np.bool_] | None = None) -> Lookup:
        """Where the wanted units are, and which are missing.

        Args:
            wanted: units. [batch, wanted]
            valid: False for units that are not missed. [batch, wanted]
        """
        slots = self.slot_of[self._rows, wanted].astype(np.int64)
        missing = slots == ABSENT
        pinned = np.zeros((len(wanted), self.num_slots), dtype=np.bool_)
        hit_rows, hit_columns = (~missing).nonzero()
        pinned[hit_rows, slots[hit_rows, hit_columns]] = True
        if valid is not None:
            missing &= valid
        rows, columns = missing.nonzero()
        return Lookup(slots, pinned, missing.sum(axis=1), rows, columns)

    def admit(
        self, rows: NDArray[np.int64], units: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> None:
        """Put `units[i]` of row `rows[i]` into `slots[i]`, evicting what was there."""
        old = self.unit_in[rows, slots]
        was_full = old != ABSENT
        self.slot_of[rows[was_full], old[was_full]] = ABSENT
        self.unit_in[rows, slots] = units
        self.slot_of[rows, units] = slots

    def evict(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Empty `slots[i]` of row `rows[i]`, each of which holds a unit."""
        self.slot_of[rows, self.unit_in[rows, slots]] = ABSENT
        self.unit_in[rows, slots] = ABSENT

    def clear(self) -> None:
        """Forget everything."""
        self.slot_of.fill(ABSENT)
        self.unit_in.fill(ABSENT)

    def copy_rows(self, rows: NDArray[np.int64]) -> "SlotTable":
        """The same residency for the batch rows `rows`."""
        copy = SlotTable(0, self.num_slots, self.slot_of.shape[1])
        copy.slot_of = self.slot_of[rows].copy()
        copy.unit_in = self.unit_in[rows].copy()
        copy._rows = np.arange(len(rows))[:, None]
        return copy
