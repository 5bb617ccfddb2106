"""Wraps any KVFile and makes it take the time of a simulated device."""

import time

from typing_extensions import override

from penstock.devices.throttle import Throttle
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket


class ThrottledTicket(Ticket):
    """A batch of reads that ends when both the real storage and the simulated one have."""

    def __init__(self, inner: Ticket, throttle: Throttle, answer_at: float) -> None:
        self.read_bytes = inner.read_bytes
        self.num_reads = inner.num_reads
        self.submitted_ns = inner.submitted_ns
        self.finished_ns = 0
        self._inner = inner
        self._throttle = throttle
        self._answer_at = answer_at

    @override
    def done(self) -> bool:
        """Whether both have ended."""
        return self._inner.done() and self._throttle.is_due(self._answer_at)

    @override
    def wait(self) -> None:
        """Block until both have ended.

        Raises:
            FetchError: a read failed or came up short.
        """
        try:
            self._inner.wait()
        finally:
            if not self.finished_ns:
                self._throttle.hold_until(self._answer_at)
                self.finished_ns = time.perf_counter_ns()


class ThrottledFile(KVFile):
    """Another file behind a simulated device, whose `Throttle` the files of a store share."""

    def __init__(self, inner: KVFile, throttle: Throttle) -> None:
        """Wrap `inner`; closing this closes it."""
        self.sector_bytes = max(inner.sector_bytes, throttle.profile.sector_bytes)
        self.is_direct = inner.is_direct
        self.simulated = throttle.profile.name
        self.inner = inner
        self.throttle = throttle

    @override
    def reserve(self, num_bytes: int) -> None:
        """Reserve in the wrapped file; takes no simulated time."""
        self.inner.reserve(num_bytes)

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Start the reads on both devices."""
        answer_at = self.throttle.start_read(offsets, lengths)
        inner = self.inner.submit_reads(offsets, lengths, addresses, keep_alive)
        return ThrottledTicket(inner, self.throttle, answer_at)

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Write, and return when the simulated device would have."""
        answer_at = self.throttle.start_write(offset, len(data))
        self.inner.write_at(offset, data)
        self.throttle.hold_until(answer_at)

    @override
    def sync(self) -> None:
        """Flush the wrapped file; takes no simulated time."""
        self.inner.sync()

    @override
    def close(self) -> None:
        """Close the wrapped file."""
        self.inner.close()
