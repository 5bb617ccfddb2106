"""FaultyFile: a KVFile that fails chosen reads and writes, for tests of loud failure."""

import errno
import os
from collections.abc import Collection

from typing_extensions import override

from penstock.core.errors import FetchError
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket, write_error


class FaultyTicket(Ticket):
    """Waits for the real reads, then fails."""

    def __init__(self, inner: Ticket, error: int) -> None:
        self.read_bytes = inner.read_bytes
        self.num_reads = inner.num_reads
        self.submitted_ns = inner.submitted_ns
        self.finished_ns = 0
        self._inner = inner
        self._error = error

    @override
    def done(self) -> bool:
        """Whether the real reads have ended."""
        return self._inner.done()

    @override
    def wait(self) -> None:
        """Wait for the real reads, then raise FetchError, every time."""
        self._inner.wait()
        self.finished_ns = self._inner.finished_ns
        cause = OSError(self._error, os.strerror(self._error))
        raise FetchError(f"read failed on purpose: {cause.strerror}") from cause


class FaultyFile(KVFile):
    """Wraps a file; batches of reads and writes are counted from 0 and the chosen ones fail.

    Attributes:
        num_reads: batches submitted so far
        num_writes: writes asked for so far
        failing_reads: numbers of the batches whose `Ticket.wait` raises; may be changed at any time
        failing_writes: numbers of the writes that raise; nothing is written then
    """

    def __init__(
        self,
        inner: KVFile,
        *,
        failing_reads: Collection[int] = (),
        failing_writes: Collection[int] = (),
        read_errno: int = errno.EIO,
        write_errno: int = errno.ENOSPC,
    ) -> None:
        """Wrap `inner`; closing this closes it. A write error of ENOSPC is a StoreFullError."""
        self.sector_bytes = inner.sector_bytes
        self.is_direct = inner.is_direct
        self.simulated = inner.simulated
        self.inner = inner
        self.failing_reads = failing_reads
        self.failing_writes = failing_writes
        self.num_reads = 0
        self.num_writes = 0
        self._read_errno = read_errno
        self._write_errno = write_errno

    @override
    def reserve(self, num_bytes: int) -> None:
        """Reserve in the wrapped file."""
        self.inner.reserve(num_bytes)

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Read; the ticket of a chosen batch fails when it is waited for."""
        number = self.num_reads
        self.num_reads += 1
        ticket = self.inner.submit_reads(offsets, lengths, addresses, keep_alive)
        return FaultyTicket(ticket, self._read_errno) if number in self.failing_reads else ticket

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Write, or raise for a chosen one."""
        number = self.num_writes
        self.num_writes += 1
        if number in self.failing_writes:
            cause = OSError(self._write_errno, os.strerror(self._write_errno))
            raise write_error(cause, "write the KV cache") from cause
        self.inner.write_at(offset, data)

    @override
    def sync(self) -> None:
        """Flush the wrapped file."""
        self.inner.sync()

    @override
    def close(self) -> None:
        """Close the wrapped file."""
        self.inner.close()
