"""FusedFetch: a layer's selection, plan and reads in one compiled call."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.selection import Selection
from penstock.engine.fetch_plan import FetchPlan
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import SelectionPolicy
from penstock.engine.slot_transfer import PendingRead, SlotTransfer
from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.replacement import ReplacementPolicy
from penstock.engine.tiers.slot_table import SlotTable
from penstock.kernels.group_fetch import Fetched, GroupFetch, SlotArrays
from penstock.kernels.group_selection import GroupSelection
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import Ticket
from penstock.storage.native_aio import AioQueue, Requests, Submission, places

_NOTHING = np.empty((0, 8), dtype=np.int64)


class Fetch(NamedTuple):
    """A layer's fetch under way."""

    selection: Selection
    plan: FetchPlan
    pending: PendingRead | None
    """None where nothing was missing."""


class _PreparedFetch(NamedTuple):
    """A call, and what it was prepared for: any other object in one of these places asks for
    another call."""

    call: GroupFetch
    queue: AioQueue
    selection: GroupSelection
    table: SlotTable
    replacement: ReplacementPolicy
    stored: NDArray[np.int64]
    descriptor: int


class FusedFetch:
    """The one call where everything is of the kind that it knows; elsewhere `begin` is None and the
    layer takes its steps after each other.

    Known are: the best units of a compiled selection for all rows alike, slots in order of
    admission, reads out of a file on native AIO that land where they are attended to, or side by
    side in a section of the staging area.
    """

    def __init__(
        self, policy: SelectionPolicy, transfer: SlotTransfer, slots_per_row: int,
        resident_factor: float,
    ) -> None:  # fmt: skip
        """Look at what does not change.

        Args:
            resident_factor: what the policy says.
            slots_per_row: slots of the pool for one row, sinks and window included.
        """
        self._transfer, self._slots_per_row = transfer, slots_per_row
        region = transfer.region
        # Whole sectors, at whole sectors of memory: no read needs another look.
        sectors = region.padded_bytes % region.file.sector_bytes == 0
        self._is_possible = policy.selects_best and sectors
        for buffer in _targets(transfer):
            self._is_possible &= buffer.address % region.file.sector_bytes == 0
            self._is_possible &= buffer.slot_bytes == region.padded_bytes
        self._resident_factor = resident_factor
        self._prepared: _PreparedFetch | None = None

    def begin(
        self,
        index: KeyIndex,
        table: SlotTable,
        replacement: ReplacementPolicy,
        stored: NDArray[np.int64],
        query: Tensor,
        between: tuple[int, int],
        wanted: int,
        read: Callable[[FetchPlan], PendingRead],
    ) -> Fetch | None:
        """Select, plan and submit, or leave everything as it is.

        Args:
            stored: place of each unit in the file, see `UnitMap`. [batch, max_units]
            query: [batch, num_heads, head_dim]
            between: the first and the end of the units that may be chosen, in every row.
            read: submits a plan's reads where they are not in the file's order, or too many.

        Raises:
            FetchError: the store is closed.
        """
        selection = index.selection() if self._is_possible else None
        queue = self._transfer.region.file.request_queue
        if selection is None or queue is None or selection.dtype != query.dtype:
            return None
        prepared = self._prepared
        if (
            prepared is None or prepared.selection is not selection or prepared.table is not table
            or prepared.replacement is not replacement or prepared.stored is not stored
            or prepared.descriptor != queue[1]
        ):  # fmt: skip
            prepared = self._make(selection, table, replacement, stored, *queue)
            self._prepared = prepared
        if prepared is None:
            return None
        wanted = min(wanted, between[1] - between[0])
        return self._run(prepared, query.contiguous(), between, wanted, read)

    def _make(
        self,
        selection: GroupSelection,
        table: SlotTable,
        replacement: ReplacementPolicy,
        stored: NDArray[np.int64],
        queue: AioQueue,
        descriptor: int,
    ) -> _PreparedFetch | None:
        if type(replacement) is not FIFO or not stored.flags.c_contiguous:
            return None
        region, buffer = self._transfer.region, _targets(self._transfer)[0]
        per_row = self._slots_per_row if self._transfer.staging is None else 0
        to = SlotArrays(
            slot_of=table.slot_of, unit_in=table.unit_in, heads=replacement.heads, stored=stored,
            slots_per_row=per_row, buffer=buffer.address,
            slot_bytes=region.padded_bytes, buffer_slots=buffer.num_slots,
            run_units=region.run_units, descriptor=descriptor,
            resident_factor=self._resident_factor,
        )  # fmt: skip
        call = GroupFetch(selection, to)
        return _PreparedFetch(call, queue, selection, table, replacement, stored, descriptor)

    def _run(
        self, prepared: _PreparedFetch, query: Tensor, between: tuple[int, int], wanted: int,
        read: Callable[[FetchPlan], PendingRead],
    ) -> Fetch:  # fmt: skip
        transfer, staging = self._transfer, self._transfer.staging
        transfer.drain()
        if staging is None:
            assert transfer.buffer is not None
            found, ticket = self._submit(prepared, query, between, wanted, transfer.buffer)
            pending = None if ticket is None else transfer.pending(ticket)
        else:
            section, pending = staging.acquire(), None
            try:
                found, ticket = self._submit(prepared, query, between, wanted, section.buffer)
                if ticket is not None:
                    slots = found.rows * self._slots_per_row + found.victims
                    pending = transfer.staged(ticket, section, slots)
            finally:
                if pending is None:
                    staging.release(section)
        num_wanted = found.slots.size
        plan = FetchPlan(
            found.rows, found.units, found.victims, found.slots, num_wanted,
            num_wanted - len(found.rows),
        )  # fmt: skip
        if found.iocbs is None:
            pending = read(plan)
        return Fetch(Selection(found.chosen), plan, pending)

    def _submit(
        self, prepared: _PreparedFetch, query: Tensor, between: tuple[int, int], wanted: int,
        buffer: AlignedBuffer,
    ) -> tuple[Fetched, Ticket | None]:  # fmt: skip
        """What the call did, and the reads that it began: None where there were none."""
        found: Fetched | None = None

        def start(context: int, room: int, key: int) -> Submission:
            nonlocal found
            found = prepared.call.submit(query, between, wanted, context, room, key, buffer.address)
            iocbs = _NOTHING if found.iocbs is None else found.iocbs
            requests = Requests(iocbs, found.address, found.read_bytes, 0)
            return Submission(requests, found.taken, found.submitted_ns)

        ticket = prepared.queue.submit_by(start, len(query) * wanted, buffer.array)
        assert found is not None
        if found.iocbs is None or not len(found.rows):
            return found, None
        region = self._transfer.region
        if region.observer is not None:
            region.observer(prepared.stored[found.rows, found.units])
        return found, region.file.opened(ticket, *places(found.iocbs), buffer.array)


def _targets(transfer: SlotTransfer) -> Sequence[AlignedBuffer]:
    """What reads land in, each in its turn."""
    if transfer.staging is not None:
        return transfer.staging.buffers
    assert transfer.buffer is not None
    return [transfer.buffer]
