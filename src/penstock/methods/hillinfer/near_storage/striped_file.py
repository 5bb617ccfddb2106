"""StripedFile: one layer's file, its units dealt out over several devices' files."""

import contextlib

import numpy as np
from typing_extensions import override

from penstock.core.closing import close_all
from penstock.core.errors import StorageError
from penstock.methods.hillinfer.near_storage.stripes import Stripes
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket


class StripedTicket(Ticket):
    """The reads of one batch at every device."""

    def __init__(self, tickets: list[Ticket]) -> None:
        self._tickets = tickets
        self.read_bytes = sum(ticket.read_bytes for ticket in tickets)
        self.num_reads = sum(ticket.num_reads for ticket in tickets)
        self.submitted_ns = min((ticket.submitted_ns for ticket in tickets), default=0)
        self.finished_ns = 0

    @override
    def done(self) -> bool:
        """Whether all have ended."""
        return all(ticket.done() for ticket in self._tickets)

    @override
    def wait(self) -> None:
        """Block until all have ended; the first failure is raised then."""
        failure: Exception | None = None
        for ticket in self._tickets:
            try:
                ticket.wait()
            except Exception as error:
                failure = failure or error
        self.finished_ns = max((ticket.finished_ns for ticket in self._tickets), default=0)
        if failure is not None:
            raise failure


class StripedFile(KVFile):
    """Calls cut at the borders of stripes and handed to the device that has them."""

    def __init__(self, files: list[KVFile], stripes: Stripes, unit_stride: int) -> None:
        """Take over one file a device.

        Args:
            unit_stride: bytes from one unit to the next.
        """
        self._files, self._stripes, self._stride = files, stripes, unit_stride
        self.sector_bytes = max(file.sector_bytes for file in files)
        self.is_direct = all(file.is_direct for file in files)
        self.simulated = files[0].simulated

    @override
    def reserve(self, num_bytes: int) -> None:
        units = self._stripes.num_local(-(-num_bytes // self._stride))
        for file in self._files:
            file.reserve(units * self._stride)

    def _cut(
        self, offsets: Int64Array, lengths: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Pieces within stripes: which run each is of, its start in it, its length, its unit."""
        first, count = offsets // self._stride, lengths // self._stride
        size = self._stripes.size
        stripes = (first + count - 1) // size - first // size + 1
        run = np.repeat(np.arange(len(first)), stripes)
        within = np.arange(len(run)) - np.repeat(np.cumsum(stripes) - stripes, stripes)
        unit = np.maximum(first[run], (first[run] // size + within) * size)
        end = np.minimum(first[run] + count[run], (unit // size + 1) * size)
        return run, (unit - first[run]) * self._stride, (end - unit) * self._stride, unit

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        run, starts, sizes, units = self._cut(offsets, lengths)
        owner, local = self._stripes.owner(units), self._stripes.local(units) * self._stride
        targets = addresses[run] + starts
        tickets: list[Ticket] = []
        try:
            for i, file in enumerate(self._files):
                mine = owner == i
                if mine.any():
                    tickets.append(
                        file.submit_reads(local[mine], sizes[mine], targets[mine], keep_alive)
                    )
        except BaseException:
            # What the others have begun ends before anybody lets go of the memory it lands in.
            with contextlib.suppress(StorageError):
                StripedTicket(tickets).wait()
            raise
        return StripedTicket(tickets)

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        cut = self._cut(np.array([offset]), np.array([len(data)]))
        for start, size, unit in zip(*(part.tolist() for part in cut[1:]), strict=True):
            one = np.array([unit])
            file = self._files[int(self._stripes.owner(one)[0])]
            local = int(self._stripes.local(one)[0]) * self._stride
            file.write_at(local, data[start : start + size])

    @override
    def sync(self) -> None:
        for file in self._files:
            file.sync()

    @override
    def close(self) -> None:
        close_all(*(file.close for file in self._files))
