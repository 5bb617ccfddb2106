"""ReplacementPolicy: choose the slots that incoming units take over."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from penstock.core.selection import Selection
from penstock.engine.fetch_plan import FetchPlan
from penstock.engine.tiers.slot_table import SlotTable


class ReplacementPolicy(ABC):
    """Orders the slots of one layer for eviction, for a whole batch at once."""

    def note_wanted(self, pinned: NDArray[np.bool_]) -> None:  # noqa: B027 - optional
        """Learn which slots a step wants, before `victims`; most policies do not.

        Args:
            pinned: [batch, slots]
        """

    def plan_at_once(self, selection: Selection, table: SlotTable) -> FetchPlan | None:
        """`plan_fetch` in one compiled call, for policies that have one; None: in steps."""
        return None

    @abstractmethod
    def victims(self, pinned: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Take slots to overwrite and remember that they were taken.

        Args:
            pinned: slots that this step needs, which must stay. [batch, slots]
            counts: slots wanted by each row; at most the row's unpinned slots. [batch]

        Returns:
            Chosen slots, flattened row after row, `counts[b]` of them for row b. [sum(counts)]
        """

    @abstractmethod
    def copy_rows(self, rows: NDArray[np.int64]) -> "ReplacementPolicy":
        """The same state for the batch rows `rows` (beam reordering)."""
