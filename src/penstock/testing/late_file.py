"""LateFile: memory full of rubbish until written, read only when waited for; for hard tests."""

from collections.abc import Callable

from typing_extensions import override

from penstock.storage.file import ByteArray, Int64Array, Ticket
from penstock.storage.memory_file import MemoryFile

_SECTOR_BITS = 511


class LateTicket(Ticket):
    """Reads that reach the file only when they are waited for, as late as a disk may be."""

    def __init__(self, start: Callable[[], Ticket], read_bytes: int, num_reads: int) -> None:
        self.read_bytes = read_bytes
        self.num_reads = num_reads
        self.submitted_ns = self.finished_ns = 0
        self._start = start
        self._ended: Ticket | None = None

    @override
    def done(self) -> bool:
        """Whether a thread has waited."""
        return self._ended is not None

    @override
    def wait(self) -> None:
        """Read now, the first time; see `Ticket.wait`."""
        self._ended = self._ended or self._start()
        self._ended.wait()


class LateFile(MemoryFile):
    """Insists on alignment and reservation as direct I/O does, and remembers its traffic.

    Attributes:
        writes, reads: (offset, bytes) of each so far
        present: bytes reserved
    """

    def __init__(self) -> None:
        super().__init__()
        self.present = 0
        self.writes: list[tuple[int, int]] = []
        self.reads: list[tuple[int, int]] = []

    @override
    def reserve(self, num_bytes: int) -> None:
        """Grow; what is new holds rubbish."""
        super().reserve(num_bytes)
        if num_bytes > self.present:
            assert self._bytes is not None
            self._bytes[self.present :] = 0xAA
            self.present = num_bytes

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Note the reads; they are made when the ticket is waited for."""
        assert not ((offsets | lengths | addresses) & _SECTOR_BITS).any(), "not aligned"
        assert (lengths > 0).all(), "a read of nothing"
        self.reads += zip(offsets.tolist(), lengths.tolist(), strict=True)
        start = super().submit_reads
        return LateTicket(
            lambda: start(offsets, lengths, addresses, keep_alive),
            int(lengths.sum()), len(offsets),
        )  # fmt: skip

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Write inside what is reserved."""
        address = data.__array_interface__["data"][0]
        assert not (offset | len(data) | address) & _SECTOR_BITS, "not aligned"
        assert offset + len(data) <= self.present, "beyond what was reserved"
        self.writes.append((offset, len(data)))
        super().write_at(offset, data)
