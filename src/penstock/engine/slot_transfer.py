"""SlotTransfer: units between a layer's region on disk and the slots of a pool."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import RLock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import FetchError, StorageError
from penstock.core.shape import KVShape
from penstock.core.trace import Tracer
from penstock.engine.writer import Writer
from penstock.kernels.slot_codes import code_units
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import Ticket
from penstock.storage.unit_region import UnitRegion


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The bytes under a pool: a slot a line.

    `buffer` is the same memory as an I/O target when reads can land in it directly: the pool is in
    host memory and a unit fills whole sectors. Otherwise slots go through a `StagingSection`.
    """

    tensor: Tensor
    """uint8 [slots, unit_bytes] on the cache's device."""
    buffer: AlignedBuffer | None
    pages: AlignedBuffer | None = None
    """The same memory, where it is the host's: what is not needed can be given back."""
    coded: KVShape | None = None
    """Of the tokens, where slots hold them in 8 bits; None: as the store has them."""

    @classmethod
    def allocate(
        cls, num_slots: int, unit_bytes: int, slot_bytes: int, device: torch.device
    ) -> "PoolMemory":
        """Zeroed memory for `num_slots` slots; direct if the device and the sector size allow
        it."""
        if device.type == "cpu":
            pages = AlignedBuffer(num_slots, unit_bytes)
            return cls(pages.tensor, pages if slot_bytes == unit_bytes else None, pages)
        return cls(torch.zeros(num_slots, unit_bytes, dtype=torch.uint8, device=device), None)

    @classmethod
    def allocate_coded(cls, num_slots: int, coded_bytes: int, shape: KVShape) -> "PoolMemory":
        """Zeroed memory of the host for slots that hold units in 8 bits. shape: of a row."""
        pages = AlignedBuffer(num_slots, coded_bytes)
        return cls(pages.tensor, None, pages, shape)

    def put(self, units: Tensor, slots: NDArray[np.int64]) -> None:
        """Write units into slots.

        Args:
            units: as the store has them, in host memory. uint8 [count, unit_bytes]
            slots: [count]
        """
        if self.coded is not None:
            tokens = units.view(self.coded.dtype)
            code_units(tokens.view(len(units), -1, *self.coded.token_size), self.tensor, slots)
            return
        index = torch.from_numpy(slots).to(self.tensor.device)
        self.tensor.index_copy_(0, index, units.to(self.tensor.device, non_blocking=True))


class StagingSection:
    """Aligned (on CUDA: pinned) host memory that one transfer passes through."""

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool) -> None:
        self.buffer = AlignedBuffer(num_slots, slot_bytes, pinned=pinned)
        self.copied: torch.cuda.Event | None = None


class WriteSlots:
    """Slots of one section that writes of all layers go through, in turn, behind the step.

    The writer works in order, so that the oldest slots are free first. The section is taken with
    the first write and goes back when nothing is under way and `give_back` asks.
    """

    def __init__(self, staging: "Staging") -> None:
        self._staging = staging
        self.lock = staging.lock
        self._section: StagingSection | None = None
        self._under_way: deque[tuple[int, int, Future[int]]] = deque()

    def take(self, count: int) -> tuple[AlignedBuffer, int]:
        """Room for so many slots: a buffer, and the first of them; waits for older writes.

        What failed is not said here but where the writer waits for it. No other thread may
        have the staging's lock until `hold`.

        Args:
            count: not more than the staging has.
        """
        if self._section is None:
            self._section = self._staging.acquire()
        first = self._under_way[-1][1] if self._under_way else 0
        if first + count > self._staging.num_slots:
            first = 0
        while any(begin < first + count and first < end for begin, end, _ in self._under_way):
            self._under_way.popleft()[2].exception()
        return self._section.buffer, first

    def hold(self, first: int, count: int, future: "Future[int]") -> None:
        """Slots that were taken stay taken until `future` is done."""
        self._under_way.append((first, first + count, future))

    def give_back(self, *, wait: bool) -> None:
        """Give the section back where nothing is under way.

        Args:
            wait: for what is under way.
        """
        with self._staging.lock:
            while self._under_way and (wait or self._under_way[0][2].done()):
                self._under_way.popleft()[2].exception()
            if self._section is not None and not self._under_way:
                self._staging.release(self._section)
                self._section = None


class Staging:
    """A few sections, taken by transfers and given back when their bytes have moved on.

    Three suffice: the fetch that is attended to, the one prefetched for the next layer, and one for
    writes (`writes`). These may be two threads' (`NearLayer`).

    Attributes:
        lock: held while sections change hands, and from `WriteSlots.take` to its `hold`
    """

    NUM_SECTIONS = 3

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self.num_slots = num_slots
        pinned = device.type == "cuda"
        self._all = [
            StagingSection(num_slots, slot_bytes, pinned=pinned) for _ in range(self.NUM_SECTIONS)
        ]
        self._free = list(self._all)
        self.lock = RLock()
        self.writes = WriteSlots(self)

    @classmethod
    def num_bytes(cls, num_slots: int, slot_bytes: int) -> int:
        """Bytes of a staging area of this size, for the ledger."""
        return cls.NUM_SECTIONS * num_slots * slot_bytes

    @property
    def buffers(self) -> list[AlignedBuffer]:
        """Memory of all sections."""
        return [section.buffer for section in self._all]

    def acquire(self) -> StagingSection:
        """Take a free section; waits for its last copy to the GPU."""
        with self.lock:
            if not self._free:
                self.writes.give_back(wait=True)
            assert self._free, "more transfers in flight than staging sections"
            section = self._free.pop()
        if section.copied is not None:
            section.copied.synchronize()
            section.copied = None
        return section

    def release(self, section: StagingSection) -> None:
        """Give a section back; a copy to the GPU may still be reading it."""
        with self.lock:
            self._free.append(section)


class PendingRead:
    """Units on their way into slots; `land` once before anybody attends to them."""

    def __init__(
        self,
        tickets: list[Ticket],
        tracer: Tracer | None,
        unstage: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Take over reads that were submitted.

        Args:
            unstage: moves the bytes on to the slots, when they do not land there themselves.
            release: gives up what the reads land in; called once, however they end.
        """
        self._tickets = tickets
        self._unstage = unstage
        self._release = release
        self._tracer = tracer
        self.read_bytes = sum(ticket.read_bytes for ticket in tickets)
        self.num_reads = sum(ticket.num_reads for ticket in tickets)
        self.stall_s = 0.0

    def land(self) -> None:
        """Wait until the units are in their slots, and remember how long that took.

        Raises:
            FetchError: a read failed; nothing may be attended to.
        """
        start = time.perf_counter_ns()
        try:
            for ticket in self._tickets:
                ticket.wait()
        except BaseException:
            self.drop()
            raise
        end = time.perf_counter_ns()
        self.stall_s = (end - start) / 1e9
        if self._tracer is not None:
            for ticket in self._tickets:
                self._tracer.add(
                    "read", "disk read", ticket.submitted_ns, ticket.finished_ns,
                    reads=ticket.num_reads, bytes=ticket.read_bytes,
                )  # fmt: skip
            self._tracer.add("wait for disk", "stall", start, end)
        if self._unstage is not None:
            self._unstage()
        self._end()

    def drop(self) -> None:
        """Let the reads end, well or not, without using them (reorder, reset, close)."""
        for ticket in self._tickets:
            with contextlib.suppress(FetchError):
                ticket.wait()
        self._end()

    def _end(self) -> None:
        self._tickets, self._unstage = [], None
        release, self._release = self._release, None
        if release is not None:
            release()


class SlotTransfer:
    """Reads and writes units of one layer, to and from slots of one pool."""

    def __init__(
        self,
        region: UnitRegion,
        memory: PoolMemory,
        staging: Staging | None,
        writer: Writer,
        tracer: Tracer | None,
    ) -> None:
        assert memory.buffer is not None or staging is not None
        self.region = region
        self._memory = memory
        self._staging = staging
        self._writer = writer
        self._tracer = tracer
        self._writes: list[Future[int]] = []

    @property
    def buffer(self) -> AlignedBuffer | None:
        """The pool's memory, where reads land in it directly."""
        return self._memory.buffer

    @property
    def staging(self) -> "Staging | None":
        """What reads pass through, where they do not land in the pool's memory; else None."""
        return self._staging if self._memory.buffer is None else None

    @property
    def max_units(self) -> int | None:
        """Most units in one transfer; None for no limit."""
        return None if self._staging is None else self._staging.num_slots

    def read(self, unit_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> PendingRead:
        """Submit reads of `unit_ids[i]` into pool slot `slots[i]`."""
        if self._memory.buffer is not None:
            return self.pending(self.region.submit_read(unit_ids, self._memory.buffer, slots))
        staging = self._staging
        assert staging is not None
        section = staging.acquire()
        try:
            ticket = self.region.submit_read(unit_ids, section.buffer, np.arange(len(unit_ids)))
        except BaseException:
            staging.release(section)
            raise
        return self.staged(ticket, section, slots)

    def staged(
        self, ticket: Ticket, section: StagingSection, slots: NDArray[np.int64]
    ) -> PendingRead:
        """Reads that are under way into the first places of a section, one for each slot; the
        section goes back when they have ended."""
        staging = self._staging
        assert staging is not None
        return PendingRead(
            [ticket], self._tracer,
            unstage=lambda: self._unstage(section, slots), release=lambda: staging.release(section),
        )  # fmt: skip

    def pending(self, ticket: Ticket) -> PendingRead:
        """Reads that are under way and land where they are wanted."""
        return PendingRead([ticket], self._tracer)

    def read_into(
        self, buffer: AlignedBuffer, unit_ids: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> PendingRead:
        """Submit reads of `unit_ids[i]` into slot `slots[i]` of a buffer that is not the pool's."""
        return self.pending(self.region.submit_read(unit_ids, buffer, slots))

    def write_from(
        self, buffer: AlignedBuffer, unit_ids: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> "Future[int]":
        """Queue slots of such a buffer for writing; they must not change until that is done.

        What fails comes up in `drain`.
        """
        return self._queue(unit_ids, buffer, slots)

    def _unstage(self, section: StagingSection, slots: NDArray[np.int64]) -> None:
        self._memory.put(section.buffer.tensor[: len(slots), : self.region.unit_bytes], slots)
        memory = self._memory.tensor
        if memory.device.type == "cuda":
            section.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            section.copied.record(torch.cuda.current_stream(memory.device))

    def write(
        self, unit_ids: NDArray[np.int64], slots: NDArray[np.int64], *, later: bool = False
    ) -> None:
        """Queue pool slots `slots[i]` for writing as `unit_ids[i]`.

        In host memory, where a unit fills its sectors, the slots are written from where they are
        and must not change before `drain`; otherwise they are copied first, and written from the
        copy behind the caller, as many as fit a section. Errors come up in `drain` either way.

        Args:
            later: slots that are not copied may wait for `Writer.start_deferred` or a `drain`.
        """
        if self._memory.buffer is not None:
            write = self._writer.defer if later else self._writer.submit
            self._writes.append(write(self.region, unit_ids, self._memory.buffer, slots))
            return
        assert self._staging is not None
        most = max(1, self._staging.num_slots // 2)  # one half is copied while the other is written
        for start in range(0, len(slots), most):
            part = slice(start, start + most)
            self._write_copy(unit_ids[part], slots[part], self._staging.writes)

    def _write_copy(
        self, unit_ids: NDArray[np.int64], slots: NDArray[np.int64], writes: WriteSlots
    ) -> None:
        index = torch.from_numpy(slots).to(self._memory.tensor.device)
        source = self._memory.tensor.index_select(0, index).cpu()
        with writes.lock:
            buffer, first = writes.take(len(slots))
            places = np.arange(first, first + len(slots))
            buffer.tensor[first : first + len(slots), : self.region.unit_bytes] = source
            writes.hold(first, len(slots), self._queue(unit_ids, buffer, places))

    def _queue(
        self, unit_ids: NDArray[np.int64], buffer: AlignedBuffer, slots: NDArray[np.int64]
    ) -> "Future[int]":
        future = self._writer.submit(self.region, unit_ids, buffer, slots)
        self._writes.append(future)
        return future

    def fail_next_drain(self, failure: StorageError) -> None:
        """Let `drain` raise the failure of a write once more, where it was not taken in."""
        failed: Future[int] = Future()
        failed.set_exception(failure)
        self._writes.insert(0, failed)

    def drain(self, keep: int = 0) -> None:
        """Wait until everything queued but the newest `keep` writes is written.

        Raises:
            StoreFullError: the disk is full.
            StorageError: a write failed; the first one, and nothing is queued any more.
        """
        failure: StorageError | None = None
        if self._writes:
            self._writer.start_deferred()
        while len(self._writes) > (keep if failure is None else 0):
            try:
                self._writes[0].result()
            except StorageError as error:
                failure = failure or error
            self._writes.pop(0)
        if self._staging is not None:
            self._staging.writes.give_back(wait=False)
        if failure is not None:
            raise failure
