"""RemoteFile: a layer's file that a near-storage device owns, as any other KVFile."""

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from typing_extensions import override

from penstock.core.errors import AlignmentError, FetchError, StorageError
from penstock.kernels.copy_runs import copy_runs
from penstock.methods.hillinfer.near_storage import protocol
from penstock.methods.hillinfer.near_storage.channel import Exchange, LateError, ScorerError
from penstock.methods.hillinfer.near_storage.device_client import NearDevice
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket

_PAGE_BYTES = 4096
SLOWEST_BANDWIDTH = 20e6
"""Bytes per second below which a device counts as hanging."""


class _Part:
    """The pieces [first, end) of a ticket, which fill one section at most."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.section = -1
        self.exchange: Exchange | None = None


class RemoteTicket(Ticket):
    """Reads through the shared memory, a section at a time; `wait` copies to where they go.

    One section is taken at submission if more than one is left; what is beyond it is read in
    `wait`, for which the last section is kept: tickets not yet waited for cannot hold all.
    """

    def __init__(
        self, file: "RemoteFile", offsets: Int64Array, lengths: Int64Array, addresses: Int64Array,
        keep_alive: object,
    ) -> None:  # fmt: skip
        self.read_bytes, self.num_reads = int(lengths.sum()), len(offsets)
        self.submitted_ns, self.finished_ns = time.perf_counter_ns(), 0
        self._file, self._keep_alive = file, keep_alive
        self._pieces = (offsets, lengths, addresses)
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._parts = [_Part(*part) for part in _cut(lengths, file.room)]
        if self._parts:
            self._begin(self._parts[0], wait=False)

    @override
    def done(self) -> bool:
        """Whether `wait` has come to its end; answers are looked at there."""
        return self.finished_ns > 0

    @override
    def wait(self) -> None:
        """Block until everything is where it goes.

        Raises:
            FetchError: a read failed; `ScorerError` when the device did.
        """
        with self._lock:
            if not self.finished_ns:
                try:
                    for i, part in enumerate(self._parts):
                        self._begin(part, wait=True)
                        if i + 1 < len(self._parts):
                            self._begin(self._parts[i + 1], wait=False)
                        self._take(part)
                except Exception as error:
                    self._error = error
                except BaseException:  # Ctrl-C: not all is where it goes
                    self._error = FetchError("the wait for a read was interrupted")
                    raise
                finally:
                    for part in self._parts:
                        self._end(part)
                    self.finished_ns, self._keep_alive = time.perf_counter_ns(), None
        if self._error is not None:
            raise self._error

    def _begin(self, part: _Part, *, wait: bool) -> None:
        if part.exchange is not None:
            return
        device = self._file.device
        if wait:
            part.section = device.sections.get()
        elif (spare := device.spare_section()) is None:
            return
        else:
            part.section = spare
        offsets, lengths, _ = self._pieces
        count = part.end - part.first
        lists = device.memory[part.section : part.section + 16 * count].view(np.int64)
        lists[:count] = offsets[part.first : part.end]
        lists[count:] = lengths[part.first : part.end]
        message = protocol.Read(
            self._file.layer, count, part.section, part.section + self._file.lists_bytes
        )
        try:
            device.ensure_alive()
            part.exchange = device.reads.begin(message)
        except BaseException:
            self._drop(part)
            raise

    def _take(self, part: _Part) -> None:
        assert part.exchange is not None
        device, (_, lengths, addresses) = self._file.device, self._pieces
        size = int(lengths[part.first : part.end].sum())
        try:
            worked = part.exchange.done(device.deadline(size / SLOWEST_BANDWIDTH))
        except StorageError:
            part.exchange = None  # no other answer comes
            raise
        device.link.note(size // self._file.unit_stride, worked)
        start = part.section + self._file.lists_bytes
        source = device.memory[start : start + size]
        copy_runs(source, lengths[part.first : part.end], addresses[part.first : part.end])
        self._drop(part)

    def _end(self, part: _Part) -> None:
        """Give a section back when the device, too, is done with it."""
        if part.section >= 0 and part.exchange is not None:
            size = self._file.device.settings.section_bytes
            with contextlib.suppress(StorageError):
                part.exchange.done(self._file.device.deadline(size / SLOWEST_BANDWIDTH))
        self._drop(part)

    def _drop(self, part: _Part) -> None:
        if part.section >= 0:
            self._file.device.sections.put(part.section)
            part.section = -1


def _cut(lengths: Int64Array, room: tuple[int, int]) -> list[tuple[int, int]]:
    """Pieces into parts of at most `room`: so many of them, so many bytes."""
    most_pieces, most_bytes = room
    ends = np.cumsum(lengths)
    out, first, before = [], 0, 0
    while first < len(lengths):
        end = int(np.searchsorted(ends, before + most_bytes, side="right"))
        end = min(max(end, first + 1), first + most_pieces)
        out.append((first, end))
        first, before = end, int(ends[end - 1])
    return out


class RemoteFile(KVFile):
    """Reads and writes go through a `NearDevice`, which makes codes of what is written.

    A write that the device's death cut short is sent again to the one started in its place; reads
    and scores are not, since the caller must know that something was lost on the way.
    """

    def __init__(self, device: NearDevice, layer: int, *, has_copies: bool = False) -> None:
        """Share the device with other layers.

        Args:
            has_copies: others have what it has: who does not answer is not waited for twice.
        """
        self.device, self.layer, self._has_copies = device, layer, has_copies
        self.sector_bytes, self.is_direct = device.sector_bytes, device.is_direct
        self.simulated = device.settings.simulate or None

    @property
    def lists_bytes(self) -> int:
        """Of a section, for offsets and lengths; the rest is for what is read. Another batch has
        other sections."""
        return -(-self.device.settings.section_bytes // 16 // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def room(self) -> tuple[int, int]:
        """Most pieces, and most bytes, of one request."""
        lists = self.lists_bytes
        return lists // 16, self.device.settings.section_bytes - lists

    @override
    def reserve(self, num_bytes: int) -> None:
        message = protocol.Reserve(self.layer, num_bytes)
        self._insist(partial(self._call, message, num_bytes / SLOWEST_BANDWIDTH))

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Pieces longer than a section are cut."""
        if np.bitwise_or.reduce(offsets | lengths) & (self.sector_bytes - 1):
            raise AlignmentError(f"a read is not aligned to {self.sector_bytes} bytes")
        most = self.room[1] // self.sector_bytes * self.sector_bytes
        if len(lengths) and int(lengths.max()) > most:
            offsets, lengths, addresses = _split(offsets, lengths, addresses, most)
        return RemoteTicket(self, offsets, lengths, addresses, keep_alive)

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        device, section = self.device, self.device.settings.section_bytes
        section -= section % self.unit_stride
        with device.write_lock:
            for first in range(0, len(data), section):
                piece = data[first : first + section]
                at = device.write_section
                message = protocol.Write(self.layer, offset + first, at, len(piece))
                device.memory[at : at + len(piece)] = piece
                self._insist(partial(self._call, message, len(piece) / SLOWEST_BANDWIDTH))

    def _call(self, message: protocol.Message, patience_s: float) -> None:
        self.device.call(self.device.writes, message, patience_s)

    def _insist(self, call: Callable[[], object]) -> None:
        """Do what may be done twice, and once more if the device dies on the way."""
        self.device.ensure_alive()
        try:
            call()
        except ScorerError as error:
            if self._has_copies and isinstance(error, LateError):
                raise
            self.device.ensure_alive()
            call()

    @property
    def unit_stride(self) -> int:
        """Bytes from one unit to the next on the disk."""
        unit = self.device.settings.unit_bytes
        return -(-unit // self.sector_bytes) * self.sector_bytes

    @override
    def sync(self) -> None:
        message = protocol.Sync(self.layer)
        self._insist(partial(self._call, message, SLOWEST_PATIENCE_S))

    @override
    def close(self) -> None:
        """The device closes its files; nothing to do."""


SLOWEST_PATIENCE_S = 30.0
"""More patience for what flushes."""


def _split(
    offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, most: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Pieces of at most `most` bytes."""
    counts = -(-lengths // most)
    owner = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = within * most
    return (
        offsets[owner] + starts, np.minimum(most, lengths[owner] - starts),
        addresses[owner] + starts,
    )  # fmt: skip
