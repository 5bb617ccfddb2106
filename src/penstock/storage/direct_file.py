"""KVFile over O_DIRECT, read through native Linux AIO: nothing of it in the page cache."""

import os

from typing_extensions import override

from penstock.core.errors import AlignmentError, FetchError, StorageError
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket, write_error
from penstock.storage.file_space import allocate, write_all
from penstock.storage.native_aio import AioQueue


class DirectFile(KVFile):
    """Takes over an O_DIRECT file descriptor; its reads go through a queue shared by a store."""

    is_direct = True

    def __init__(self, descriptor: int, queue: AioQueue, sector_bytes: int) -> None:
        """Take over `descriptor`.

        Args:
            queue: stays its maker's to close; closing it fails the reads under way.
            sector_bytes: what offsets, lengths and addresses must be multiples of.
        """
        self.sector_bytes = sector_bytes
        self._descriptor = descriptor
        self._queue = queue
        self._num_bytes = 0

    @override
    def reserve(self, num_bytes: int) -> None:
        """Allocate blocks for [0, num_bytes): growing by writes is slow and blocks."""
        if num_bytes > self._num_bytes:
            allocate(self._open_descriptor(), self._num_bytes, num_bytes)
            self._num_bytes = num_bytes

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Hand the reads to the kernel; about 2 us each on the caller."""
        if self._descriptor < 0:
            raise FetchError("the store is closed")
        return self._queue.submit(
            self._descriptor, offsets, lengths, addresses, keep_alive, self.sector_bytes
        )

    @property
    @override
    def request_queue(self) -> tuple[AioQueue, int] | None:
        return None if self._descriptor < 0 else (self._queue, self._descriptor)

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Write past the page cache; returns when the device has the bytes."""
        address = int(data.__array_interface__["data"][0])
        if (offset | len(data) | address) & (self.sector_bytes - 1):
            raise AlignmentError(f"a write is not aligned to {self.sector_bytes} bytes")
        write_all(self._open_descriptor(), offset, data)
        self._num_bytes = max(self._num_bytes, offset + len(data))

    @override
    def sync(self) -> None:
        """Flush the device's own cache."""
        try:
            os.fdatasync(self._open_descriptor())
        except OSError as error:
            raise write_error(error, "flush the KV cache") from error

    @override
    def close(self) -> None:
        """Close the descriptor; the kernel keeps the file until reads under way have ended."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open_descriptor(self) -> int:
        if self._descriptor < 0:
            raise StorageError("the store is closed")
        return self._descriptor
