"""KVFile in host memory: for dry runs, for tests, and underneath simulated devices."""

import ctypes
import threading
import time

import numpy as np
from typing_extensions import override

from penstock.core.errors import FetchError, StorageError, StoreFullError
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket, read_error


class FinishedTicket(Ticket):
    """A batch of reads that ended before its ticket was made."""

    def __init__(
        self, read_bytes: int, num_reads: int, submitted_ns: int, error: FetchError | None = None
    ) -> None:
        self.read_bytes = read_bytes
        self.num_reads = num_reads
        self.submitted_ns = submitted_ns
        self.finished_ns = time.perf_counter_ns()
        self._error = error

    @override
    def done(self) -> bool:
        """Always true."""
        return True

    @override
    def wait(self) -> None:
        """Return at once, or raise the FetchError of the batch."""
        if self._error is not None:
            raise self._error


class MemoryFile(KVFile):
    """Bytes in anonymous memory; reads are copies made at submission."""

    sector_bytes = 512
    is_direct = False

    def __init__(self) -> None:
        self._bytes: ByteArray | None = np.zeros(0, dtype=np.uint8)
        self._growing = threading.Lock()  # one thread makes room while another one writes

    @override
    def reserve(self, num_bytes: int) -> None:
        """Grow the memory; it is taken from the system page by page as it is written."""
        with self._growing:
            self._grow(num_bytes)

    def _grow(self, num_bytes: int) -> None:
        present = self._open_bytes(StorageError)
        if num_bytes <= len(present):
            return
        try:
            grown = np.zeros(num_bytes, dtype=np.uint8)
        except MemoryError as error:
            raise StoreFullError(f"no memory for a file of {num_bytes} bytes") from error
        grown[: len(present)] = present
        self._bytes = grown

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Copy at once; the ticket is finished."""
        source = self._open_bytes(FetchError)
        submitted_ns = time.perf_counter_ns()
        base, size = source.__array_interface__["data"][0], len(source)
        error, copy = None, ctypes.memmove
        for offset, length, address in zip(
            offsets.tolist(), lengths.tolist(), addresses.tolist(), strict=True
        ):
            if offset < 0 or offset + length > size:
                error = error or read_error(offset, length, max(0, size - offset))
            else:
                copy(address, base + offset, length)
        return FinishedTicket(int(lengths.sum()), len(offsets), submitted_ns, error)

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Copy `data` in, growing the file if it ends beyond."""
        with self._growing:
            self._grow(offset + len(data))
            self._open_bytes(StorageError)[offset : offset + len(data)] = data

    @override
    def sync(self) -> None:
        """Nothing to do."""

    @override
    def close(self) -> None:
        """Give the memory back."""
        self._bytes = None

    def _open_bytes(self, kind: type[StorageError]) -> ByteArray:
        if self._bytes is None:
            raise kind("the store is closed")
        return self._bytes
