"""PromptWorkspace: large blocks for passes of many tokens, in memory that slots lend meanwhile."""

from collections.abc import Sequence

from penstock.core.ledger import MemoryLedger, Reservation
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.engine.policy import ceil_div
from penstock.engine.slot_transfer import PoolMemory
from penstock.engine.stream_blocks import STREAM_BLOCK_TOKENS, BlockBuffer
from penstock.engine.writer import Writer

ITEM, LENDER = "prompt workspace", "slots and window"
"""Names in the ledger."""
LEAST_UNITS = 16
"""Of a half, where slots are to keep what they hold: with fewer a pass takes too many reads."""


class PromptWorkspace:
    """Blocks that the past streams through, one pair for all layers.

    A prompt attends to all that there is, so that no layer's slots hold anything for it. Their
    pages go back to the system and as many bytes are the workspace's, until tokens are decoded
    again. A pass that checks drafts takes a part, so that most layers find their slots as they
    were. So it fits every budget, and what the cache holds stays what its plan says. Slots that are
    used meanwhile all the same are only memory that is not booked: nothing lies in both.

    Attributes:
        blocks: None while it is closed, and where the slots have too little to lend
    """

    def __init__(
        self, shape: KVShape, plan: SlotPlan, padded_bytes: int, ledger: MemoryLedger
    ) -> None:
        """Allocate nothing yet.

        Args:
            shape: of a row.
            padded_bytes: a unit's place in the store.
        """
        self._shape, self._plan, self._padded_bytes = shape, plan, padded_bytes
        self._ledger = ledger
        self._pools: list[PoolMemory] = []
        self._lent = 0
        self._pays = True
        self._taken: Reservation | None = None
        self.blocks: BlockBuffer | None = None

    def may_lend(self, pool: PoolMemory) -> None:
        """Slots that are idle while a prompt is read; a GPU's are not lent."""
        if pool.pages is not None:
            self._pools.append(pool)

    def open(self, writer: Writer, *, most_lent: int | None = None) -> Sequence[PoolMemory]:
        """Take the memory; what the slots of the returned pools hold is lost.

        Args:
            writer: of what may still be written from them.
            most_lent: bytes; None: as many as pay, which are none where the slots of a layer do as
                well.
        """
        if self.blocks is not None or not self._pools or (most_lent is None and not self._pays):
            return ()
        plan = self._plan  # of the slots, in units of the store, one half
        least = max(1, plan.num_slots * plan.slot_bytes // plan.unit_bytes // 2)
        most = max(1, STREAM_BLOCK_TOKENS // plan.group_tokens)
        most = min(most, plan.max_units)
        free, per_unit = self._ledger.free_bytes, self._num_bytes(1)
        if most_lent is not None:
            least, most = LEAST_UNITS - 1, min(most, (free + most_lent) // per_unit)
        if most <= least:
            return ()
        wanted = max(0, self._num_bytes(most) - free)
        writer.wait()
        self._lent, lenders = self._give_pages_back(wanted, whole=most_lent is not None)
        units = min(most, (self._lent + free) // per_unit)
        if units <= least:
            self._lent = 0
            self._pays = self._pays and most_lent is not None  # so it is the next time
            return lenders
        if self._lent:
            self._ledger.move(LENDER, ITEM, self._lent)
        try:
            more = max(0, self._num_bytes(units) - self._lent)
            self._taken = self._ledger.take(ITEM, more)
            self.blocks = BlockBuffer(
                self._shape, plan.batch, units, plan.group_tokens, self._padded_bytes
            )
        except BaseException:
            self.close()
            raise
        return lenders

    @property
    def slot_bytes(self) -> int:
        """Of all pools that may lend."""
        return sum(pool.pages.num_bytes for pool in self._pools if pool.pages is not None)

    def _num_bytes(self, units: int) -> int:
        plan = self._plan
        return BlockBuffer.num_bytes(plan.batch, units, plan.unit_bytes, self._padded_bytes)

    def _give_pages_back(self, wanted: int, *, whole: bool) -> tuple[int, list[PoolMemory]]:
        """Empty as many slots as hold so many bytes, those of the last pools first.

        Args:
            whole: all slots of a pool, so that fewer pools lend.

        Returns:
            The bytes, and whose they were.
        """
        plan, given = self._plan, 0
        lenders: list[PoolMemory] = []
        for pool in reversed(self._pools):
            assert pool.pages is not None
            if given < wanted:
                lenders.append(pool)
            per_row = plan.num_slots + plan.kept_slots
            ranges: Sequence[tuple[int, int]] = [
                (row * per_row, plan.num_slots) for row in range(plan.batch)
            ]
            if plan.keeps_apart:  # sinks and windows are not in them between steps
                ranges = [(0, pool.pages.num_slots)]
            for first, count in ranges:
                if given >= wanted:
                    return given, lenders
                fewest = min(count, ceil_div(wanted - given, plan.slot_bytes) + 2)
                given += pool.pages.give_back_range(first, count if whole else fewest)
        return given, lenders

    def close(self) -> None:
        """Give the memory back to the slots that lent it, which are empty."""
        blocks, self.blocks = self.blocks, None
        if blocks is not None:
            blocks.wait(0)
            blocks.wait(1)
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.release()
        lent, self._lent = self._lent, 0
        if lent:
            self._ledger.move(ITEM, LENDER, lent)
