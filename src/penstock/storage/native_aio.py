"""AioQueue: batches of reads through Linux native AIO, called by number, without a compiler."""

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from penstock.core.errors import AlignmentError, FetchError, StorageError
from penstock.kernels.native.compiled import address, kernel
from penstock.storage.aio_calls import AioCalls, find_calls
from penstock.storage.file import Int64Array, Ticket, read_error

_KEY, _CONTROL, _ADDRESS, _LENGTH, _OFFSET = 0, 2, 3, 4, 5
"""Columns of an iocb read as eight little-endian int64; opcode 0 in CONTROL is a plain read."""
_IOCB_BYTES = 64
_INDEX_MASK = (1 << 32) - 1
_PATIENCE_S = 1
"""A blocked wait looks around this often; a lost wake-up costs a second, never a hang."""
_SUBMIT_RETRIES = 1000


DESTROYER = "penstock-aio-destroy"
"""Name of the threads that give idle contexts back."""


class Requests(NamedTuple):
    """A batch of reads as the kernel wants it."""

    iocbs: Int64Array
    """[num_reads, 8]; pointers to them lie behind."""
    address: int
    read_bytes: int
    bits: int
    """Every offset, length and address or-ed together: tells whether all are aligned."""


class Submission(NamedTuple):
    """Requests, and how many of them the kernel has taken already, from the first on."""

    requests: Requests
    taken: int
    submitted_ns: int
    """`time.perf_counter_ns` when they began to be."""


def _make_requests(
    descriptor: int, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array,
    first_key: int,
) -> Requests:  # fmt: skip
    """Requests whose keys count from `first_key`; in one call where it is compiled."""
    count = len(offsets)
    memory = np.empty(9 * count, dtype=np.int64)
    iocbs, first = memory[: 8 * count].reshape(count, 8), address(memory)
    compiled = kernel("fill_iocbs")
    parts = [np.ascontiguousarray(part, dtype=np.int64) for part in (offsets, lengths, addresses)]
    if compiled is not None:
        found = np.empty(2, dtype=np.int64)
        compiled(*map(address, parts), count, descriptor, first_key, first, address(found))
        return Requests(iocbs, first, *found.tolist())
    iocbs[:] = 0
    iocbs[:, _KEY] = np.arange(first_key, first_key + count)
    iocbs[:, _CONTROL] = descriptor << 32
    iocbs[:, _ADDRESS], iocbs[:, _LENGTH], iocbs[:, _OFFSET] = addresses, lengths, offsets
    memory[8 * count :] = np.arange(first, first + _IOCB_BYTES * count, _IOCB_BYTES)
    bits = int(np.bitwise_or.reduce(offsets | lengths | addresses)) if count else 0
    return Requests(iocbs, first, int(lengths.sum()), bits)


def _destroy(calls: AioCalls, contexts: list[int]) -> None:
    """Give a list's contexts back: each once, though an interrupted close may come here again."""
    with contextlib.suppress(IndexError):
        while True:
            calls.destroy(contexts.pop())


def places(iocbs: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Offsets, lengths and addresses of requests [num_reads, 8]; each [num_reads]."""
    return iocbs[:, _OFFSET], iocbs[:, _LENGTH], iocbs[:, _ADDRESS]


class AioTicket(Ticket):
    """A batch of reads in an `AioQueue`; everything but `wait` and `done` is the queue's."""

    def __init__(
        self, queue: "AioQueue", number: int, submission: Submission, keep_alive: object
    ) -> None:
        requests = submission.requests
        self.num_reads = len(requests.iocbs)
        self.read_bytes = requests.read_bytes
        self.submitted_ns = submission.submitted_ns
        self.finished_ns = 0
        self.number = number
        self.iocbs = requests.iocbs
        self.num_submitted = self.num_outstanding = submission.taken
        self.is_complete = False
        self.error: FetchError | None = None
        self._queue = queue
        self._keep_alive = keep_alive
        self.iocbs_address = requests.address
        self._pointers_address = requests.address + _IOCB_BYTES * self.num_reads

    @property
    def next_pointer(self) -> int:
        """Address of the pointer to the first iocb that is not submitted yet."""
        return self._pointers_address + 8 * self.num_submitted

    def finish(self) -> None:
        """No read is under way any more: let the memory go."""
        self.finished_ns = time.perf_counter_ns()
        self._keep_alive = None
        self.is_complete = True

    @override
    def done(self) -> bool:
        """Whether every read has ended; looks at the kernel's queue, never blocks."""
        if not self.is_complete:
            self._queue.poll()
        return self.is_complete

    @override
    def wait(self) -> None:
        """Block until every read has ended, crediting other tickets on the way.

        Raises:
            FetchError: a read failed or came up short.
        """
        if not self.is_complete:
            self._queue.wait_for(self)
        if self.error is not None:
            raise self.error


class AioQueue:
    """One kernel AIO context shared by the files of a store; any thread may use it.

    At most `max_in_flight` reads are with the kernel; what is beyond waits its turn here and moves
    up whenever a thread submits, polls or waits. One waiting thread at a time collects events and
    credits them to whichever ticket they belong to.

    An exception in the middle (Ctrl-C) cannot leave the kernel writing into memory that is
    reused: the context is destroyed, which waits for its reads, and unfinished tickets fail.
    """

    def __init__(self, max_in_flight: int = 256) -> None:
        """Open a context.

        Raises:
            StorageError: the system has no native AIO, or none left.
        """
        self._calls = find_calls()
        self._max_in_flight = max_in_flight
        self._lock = threading.RLock()  # guards all below
        self._changed = threading.Condition(self._lock)
        self._is_closed = False
        self._is_collecting = False
        self._numbers = itertools.count(1)
        self._in_flight = 0
        self._generation = 0  # of the context: grows when one is abandoned
        self._live: dict[int, AioTicket] = {}
        self._backlog: deque[AioTicket] = deque()
        self._events = np.zeros((max_in_flight, 4), dtype=np.int64)  # data, iocb, result, result2
        self._events_address = address(self._events)
        self._found = np.empty(2, dtype=np.int64)
        self._check = kernel("check_events")
        self._timeouts = np.array([[0, 0], [_PATIENCE_S, 0]], dtype=np.int64)  # seconds, ns
        self._now_address = address(self._timeouts)
        self._patience_address = self._now_address + 16
        self._contexts: list[int] = []
        self._context = self._setup()

    def submit(
        self,
        descriptor: int,
        offsets: Int64Array,
        lengths: Int64Array,
        addresses: Int64Array,
        keep_alive: object,
        sector_bytes: int = 1,
    ) -> AioTicket:
        """Start a batch of reads, all int64 [num_reads], on an O_DIRECT file descriptor.

        Raises:
            AlignmentError: something is not a multiple of `sector_bytes`.
            FetchError: the queue is closed.
        """
        number = next(self._numbers)
        requests = _make_requests(descriptor, offsets, lengths, addresses, number << 32)
        if requests.bits & (sector_bytes - 1):
            raise AlignmentError(f"a read is not aligned to {sector_bytes} bytes")
        return self._start(
            number,
            len(requests.iocbs),
            lambda *_: Submission(requests, 0, time.perf_counter_ns()),
            keep_alive,
        )

    def submit_by(
        self, start: Callable[[int, int, int], Submission], most: int, keep_alive: object
    ) -> AioTicket:
        """Let the caller make a batch of aligned reads and hand them to the kernel.

        Args:
            start: given the context, how many reads it takes now, and the key of the first one
                (the others' follow), returns the reads and how many the kernel has taken.
            most: reads that there can be.

        Raises:
            FetchError: the queue is closed.
        """
        return self._start(next(self._numbers), most, start, keep_alive)

    def _start(
        self, number: int, most: int, start: Callable[[int, int, int], Submission],
        keep_alive: object,
    ) -> AioTicket:  # fmt: skip
        with self._lock:
            if self._is_closed:
                raise FetchError("the store is closed")
            if self._in_flight + most > self._max_in_flight:
                self.poll()
            try:
                room = 0 if self._backlog else self._max_in_flight - self._in_flight
                submission = start(self._context or self._setup(), room, number << 32)
                ticket, taken = AioTicket(self, number, submission, keep_alive), submission.taken
                if not ticket.num_reads:
                    ticket.finish()
                    return ticket
                self._live[number] = ticket
                self._in_flight += taken
                if taken < ticket.num_reads:
                    self._backlog.append(ticket)
                    self._submit_backlog()
            except BaseException:
                self._abandon("interrupted")
                raise
        return ticket

    def poll(self) -> None:
        """Credit the events that have come; never blocks."""
        with self._lock:
            if self._is_collecting or not self._in_flight:
                return
            try:
                self._credit(self._get_events(0, self._now_address))
                self._submit_backlog()
            except BaseException:
                self._abandon("interrupted")
                raise

    def wait_for(self, ticket: AioTicket) -> None:
        """Block until `ticket` is complete. Its error, if any, is left in it."""
        try:
            self.poll()  # most reads have ended when they are asked for
            while not ticket.is_complete:
                self._wait_once(ticket)
        except BaseException:
            with self._lock:
                self._abandon("interrupted")
            raise

    def close(self) -> None:
        """Wait for what is in flight and give the context back; unfinished tickets fail."""
        with self._lock:
            self._is_closed = True
            self._abandon("the store was closed")

    def _wait_once(self, ticket: AioTicket) -> None:
        """Collect events once, or wait for the thread that does."""
        collects, generation = False, -1
        try:
            with self._lock:
                if ticket.is_complete:
                    return
                if self._is_collecting:
                    self._changed.wait(_PATIENCE_S)
                    return
                generation = self._generation
                collects = self._is_collecting = True
                self._submit_backlog()
                if ticket.is_complete or not self._in_flight:
                    return
                wanted = ticket.num_outstanding
                if ticket.num_submitted < ticket.num_reads:  # wake early, to keep the queue full
                    wanted = max(1, min(self._in_flight, self._max_in_flight // 4))
            got = self._get_events(wanted, self._patience_address)
            with self._lock:
                if generation == self._generation:  # else they are of an abandoned context
                    self._credit(got)
                    collects = self._is_collecting = False
                    self._changed.notify_all()
        finally:
            if collects:
                with self._lock:
                    if generation == self._generation:
                        self._is_collecting = False
                    self._changed.notify_all()

    def _get_events(self, at_least: int, timeout_address: int) -> int:
        """io_getevents into the event array; returns how many, 0 when interrupted."""
        got = self._calls.get_events(
            self._context, at_least, self._max_in_flight, self._events_address, timeout_address
        )
        return max(got, 0)  # EINTR, or EINVAL when the context was closed meanwhile

    def _credit(self, num_events: int) -> None:
        if not num_events:
            return
        for ticket in list(self._live.values()):
            self._credit_ticket(ticket, num_events)

    def _credit_ticket(self, ticket: AioTicket, num_events: int) -> None:
        if self._check is None:
            found, wrong = self._check_twin(ticket, num_events)
        else:
            self._check(
                self._events_address, num_events, ticket.number, ticket.iocbs_address,
                address(self._found),
            )  # fmt: skip
            found, wrong = self._found.tolist()
        if not found:
            return
        if ticket.error is None and wrong >= 0:
            key, _, result, _ = self._events[wrong].tolist()
            iocb = ticket.iocbs[key & _INDEX_MASK]
            ticket.error = read_error(int(iocb[_OFFSET]), int(iocb[_LENGTH]), result)
        self._in_flight -= found
        ticket.num_outstanding -= found
        self._finish_if_drained(ticket)

    def _check_twin(self, ticket: AioTicket, num_events: int) -> tuple[int, int]:
        """Events of this ticket, and the first that failed or came up short, or -1."""
        events = self._events[:num_events]
        places = (events[:, 0] >> 32 == ticket.number).nonzero()[0]
        own = events[places]
        wrong = own[:, 2] != ticket.iocbs[own[:, 0] & _INDEX_MASK, _LENGTH]
        return len(places), int(places[wrong.argmax()]) if wrong.any() else -1

    def _finish_if_drained(self, ticket: AioTicket) -> None:
        if not ticket.num_outstanding and ticket.num_submitted == ticket.num_reads:
            del self._live[ticket.number]
            ticket.finish()

    def _submit_backlog(self) -> None:
        """Hand waiting reads to the kernel, oldest first, as long as there is room."""
        retries = 0
        while self._backlog:
            ticket = self._backlog[0]
            room = self._max_in_flight - self._in_flight
            count = min(room, ticket.num_reads - ticket.num_submitted)
            if count <= 0:
                return
            context = self._context or self._setup()
            taken = self._calls.submit(context, count, ticket.next_pointer)
            if taken > 0:
                self._in_flight += taken
                ticket.num_submitted += taken
                ticket.num_outstanding += taken
                if ticket.num_submitted == ticket.num_reads:
                    self._backlog.popleft()
                continue
            number = ctypes.get_errno()
            if number == errno.EAGAIN and self._in_flight:
                return  # the kernel is full: the rest goes when something has come back
            if number in (errno.EAGAIN, errno.EINTR) and (retries := retries + 1) < _SUBMIT_RETRIES:
                time.sleep(0.001)
                continue
            refused = ticket.iocbs[ticket.num_submitted]
            ticket.error = read_error(int(refused[_OFFSET]), int(refused[_LENGTH]), -number)
            ticket.num_reads = ticket.num_submitted  # what is under way still has to come back
            self._backlog.popleft()
            self._finish_if_drained(ticket)

    def _setup(self) -> int:
        context = ctypes.c_ulong(0)
        address = ctypes.addressof(context)
        if self._calls.setup(self._max_in_flight, address) != 0:
            number = ctypes.get_errno()
            raise StorageError(f"no asynchronous I/O context: {os.strerror(number)}")
        self._context, self._contexts = context.value, [context.value]
        return self._context

    def _abandon(self, reason: str) -> None:
        """Destroy the context, which waits for its reads, and fail what was unfinished."""
        give_back = functools.partial(_destroy, self._calls, self._contexts)
        if self._in_flight:
            give_back()
        elif self._context:
            # The kernel takes 20 to 30 ms for an idle context, too: a close does not wait for that.
            try:
                threading.Thread(target=give_back, name=DESTROYER, daemon=True).start()
            except RuntimeError:  # the interpreter is about to end
                give_back()
        self._context = 0
        self._generation += 1
        self._is_collecting = False  # the collecting thread has left the kernel
        for ticket in self._live.values():
            ticket.error = ticket.error or FetchError(f"reads were given up: {reason}")
            ticket.finish()
        self._live.clear()
        self._backlog.clear()
        self._in_flight = 0
        self._changed.notify_all()
