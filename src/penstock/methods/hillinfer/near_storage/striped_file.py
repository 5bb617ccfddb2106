"""StripedFile: one layer's file, its units dealt out over several devices' files."""

import contextlib
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from typing_extensions import override

from penstock.core.closing import close_all
from penstock.core.errors import StorageError
from penstock.methods.hillinfer.near_storage.holders import Holders
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket

LayerWritten = Callable[[int, int, list[int]], None]


class _Share:
    """What a batch reads of the units that belong to one device."""

    def __init__(self, begin: Callable[[int], Ticket], holders: list[int]) -> None:
        """Args:
        begin: submits the reads to one of the holders.
        holders: who can be asked, in this order.
        """
        self._begin, self._holders, self._left = begin, list(holders), list(holders)
        self.ticket = self.submit()

    def again(self) -> Ticket:
        """Ask all that could be asked once more, where units had nobody else."""
        self._left = list(self._holders)
        return self.submit()

    def submit(self) -> Ticket:
        """Ask the next device. Raises what it raises where there is no other."""
        while True:
            self.asked = self._left.pop(0)
            try:
                self.ticket = self._begin(self.asked)
            except StorageError:
                if not self._left:
                    raise
            else:
                return self.ticket

    def wait(self, lose: Callable[[int], None]) -> None:
        """Wait for the reads, elsewhere if they fail. Raises the last failure."""
        while True:
            try:
                self.ticket.wait()
                return
            except StorageError:
                lose(self.asked)
                if not self._left:
                    raise
                self.submit()


class StripedTicket(Ticket):
    """The reads of one batch at every device."""

    def __init__(self, shares: list[_Share], holders: Holders) -> None:
        self._shares, self._holders = shares, holders
        tickets = [share.ticket for share in shares]
        self.read_bytes = sum(ticket.read_bytes for ticket in tickets)
        self.num_reads = sum(ticket.num_reads for ticket in tickets)
        self.submitted_ns = min((ticket.submitted_ns for ticket in tickets), default=0)
        self.finished_ns = 0

    @override
    def done(self) -> bool:
        """Whether all have ended."""
        return self.finished_ns > 0 or all(share.ticket.done() for share in self._shares)

    @override
    def wait(self) -> None:
        """Block until all have ended; the first failure is raised then.

        Units whose holders all failed are asked for once more, where one could be brought back.
        """
        failure: Exception | None = None
        for share in self._shares:
            try:
                try:
                    share.wait(self._holders.lose)
                except StorageError:
                    if not self._holders.has_copies:
                        raise
                    before = self._holders.returned
                    self._holders.look()  # units that are lost for good are said first
                    if self._holders.returned == before:
                        raise
                    share.again()
                    share.wait(self._holders.lose)
            except Exception as error:
                failure = failure or error
        ends = (share.ticket.finished_ns for share in self._shares)
        self.finished_ns = max(ends, default=time.perf_counter_ns())
        if failure is not None:
            if self._holders.has_copies:
                self._holders.look()  # units that are lost for good are said first
            raise failure


class StripedFile(KVFile):
    """Calls cut at the borders of stripes and handed to the devices that have them.

    With copies, what is written goes to both devices, and what one fails to read is read from the
    other.
    """

    def __init__(
        self, files: list[KVFile], holders: Holders, unit_stride: int, written: LayerWritten
    ) -> None:
        """Take over one file a device.

        Args:
            unit_stride: bytes from one unit to the next.
            written: where units have copies, what is told of a write when it is over: the first
                unit, how many, and the copies that did not get it.
        """
        self._files, self._holders, self._stride = files, holders, unit_stride
        self._written = written
        self._stripes = holders.stripes
        self.sector_bytes = max(file.sector_bytes for file in files)
        self.is_direct = all(file.is_direct for file in files)
        self.simulated = files[0].simulated

    @override
    def reserve(self, num_bytes: int) -> None:
        units = self._stripes.num_local(-(-num_bytes // self._stride))
        self._change_all([partial(file.reserve, units * self._stride) for file in self._files])

    def _change_all(self, acts: list[Callable[[], None]]) -> None:
        for i, act in enumerate(acts):
            self._holders.change(i, act)
        self._holders.answering()

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
        belongs_to, targets = self._stripes.owner(units), addresses[run] + starts
        shares: list[_Share] = []

        def begin(owner: int, i: int) -> Ticket:
            mine = belongs_to == owner
            local = self._stripes.local(units[mine], int(i != owner)) * self._stride
            return self._files[i].submit_reads(local, sizes[mine], targets[mine], keep_alive)

        try:
            for owner in np.unique(belongs_to).tolist():
                there = self._holders.there(self._stripes.holders(owner))
                if not there:
                    self._holders.ensure_alive()  # or raises
                    there = self._holders.there(self._stripes.holders(owner))
                shares.append(_Share(partial(begin, owner), there))
        except BaseException as error:
            # What the others have begun ends before anybody lets go of the memory it lands in.
            with contextlib.suppress(StorageError):
                StripedTicket(shares, self._holders).wait()
            if self._holders.has_copies and isinstance(error, StorageError):
                self._holders.look()
            raise
        return StripedTicket(shares, self._holders)

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        cut = self._cut(np.array([offset]), np.array([len(data)]))
        with self._holders.gate if self._holders.has_copies else contextlib.nullcontext():
            for start, size, unit in zip(*(part.tolist() for part in cut[1:]), strict=True):
                one, piece = np.array([unit]), data[start : start + size]
                missed = []
                for copy, i in enumerate(self._stripes.holders(int(self._stripes.owner(one)[0]))):
                    local = int(self._stripes.local(one, copy)[0]) * self._stride
                    write = partial(self._files[i].write_at, local, piece)
                    if not self._holders.change(i, write):
                        missed.append(copy)
                self._written(unit, size // self._stride, missed)
            self._holders.answering()

    @override
    def sync(self) -> None:
        self._change_all([file.sync for file in self._files])

    @override
    def close(self) -> None:
        close_all(*(file.close for file in self._files))
