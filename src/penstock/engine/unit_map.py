"""UnitMap: where each sequence's units are on disk, shared by all layers."""

import numpy as np
from numpy.typing import NDArray

UNMAPPED = -1


class UnitMap:
    """Maps (row, unit) to its place in the store's files; rows may share places after a fork.

    Closed units never change, so that beams share them: reordering, repeating and selecting rows
    only copies this table. A place that no row refers to any more is free again (found by a sweep
    when the store would have to grow). Places are numbered as the store numbers its units.
    """

    def __init__(self, batch: int, max_units: int) -> None:
        self.table: NDArray[np.int64] = np.full((batch, max_units), UNMAPPED, dtype=np.int64)
        self.num_units = self.shared_units = 0
        self._free = np.empty(0, dtype=np.int64)

    @staticmethod
    def num_bytes(batch: int, max_units: int) -> int:
        """Bytes of a map of this size, for the ledger."""
        return 8 * batch * max_units

    def ensure(self, first: int, end: int) -> int:
        """Give every row places for the units [first, end); returns how many places there are.

        Units that have places keep them (the other layers of the same forward pass ask again).
        Fresh places of one row are consecutive, so that a prefill chunk is one write per row.
        """
        if first < end and self.table[0, end - 1] == UNMAPPED:
            part = self.table[:, first:end]
            rows, columns = np.nonzero(part == UNMAPPED)
            part[rows, columns] = self._take(len(rows))
        return self.num_units

    def _take(self, count: int) -> NDArray[np.int64]:
        if len(self._free) < count:
            self._sweep()
        if len(self._free) >= count:
            taken, self._free = self._free[:count], self._free[count:]
            return taken
        first = self.num_units
        self.num_units += count
        return np.arange(first, first + count, dtype=np.int64)

    def _sweep(self) -> None:
        used = np.zeros(self.num_units, dtype=np.bool_)
        used[: self.shared_units] = True
        used[self.table[self.table != UNMAPPED]] = True
        self._free = np.nonzero(~used)[0]

    def share(self, first: int, places: NDArray[np.int64], num_places: int) -> None:
        """Give the units from `first` on, in every row, places that are never written to.

        Args:
            places: of the units. [units]
            num_places: places of another owner, used or not; they come first and are never
                handed out.
        """
        assert self.shared_units in (0, num_places), "a map shares with one only"
        self.table[:, first : first + len(places)] = places
        self.shared_units = num_places
        self.num_units = max(self.num_units, num_places)

    def forget_from(self, unit: int) -> None:
        """Forget the units at and after `unit` (crop); places at the end exist no more."""
        self.table[:, unit:] = UNMAPPED
        self.num_units = max(self.shared_units, int(self.table.max(initial=UNMAPPED)) + 1)
        self._free = self._free[self._free < self.num_units]

    def select_rows(self, rows: NDArray[np.int64]) -> None:
        """Make row i what row `rows[i]` was; the batch may grow or shrink."""
        self.table = self.table[rows].copy()
