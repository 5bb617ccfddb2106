"""SealedFile: a private file whose bytes are worthless once its process is gone."""

import threading
from collections.abc import Callable

import numpy as np
from typing_extensions import override

from penstock.core.errors import StorageError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.block_cipher import BLOCK_BYTES, BlockCipher
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket, bytes_at
from penstock.storage.native_aio import AioQueue

_LEAST_SECTOR_BYTES = 512


class SealedTicket(Ticket):
    """A batch of reads that the first `wait` decrypts where they landed."""

    def __init__(self, inner: Ticket, open_it: Callable[[], None], keep_alive: object) -> None:
        self.read_bytes, self.num_reads = inner.read_bytes, inner.num_reads
        self.submitted_ns, self.finished_ns = inner.submitted_ns, inner.finished_ns
        self._inner = inner
        self._open: Callable[[], None] | None = open_it
        self._keep_alive = keep_alive
        self._failure: BaseException | None = None
        self._opening = threading.Lock()

    @override
    def done(self) -> bool:
        """Whether every read has ended; `wait` then has only the decrypting left to do."""
        finished = self._inner.done()
        self.finished_ns = self._inner.finished_ns
        return finished

    @override
    def wait(self) -> None:
        """The bytes are in the open then."""
        with self._opening:
            self._inner.wait()
            self.finished_ns = self._inner.finished_ns
            if self._failure is not None:
                raise self._failure
            opening, self._open = self._open, None
            if opening is not None:
                try:
                    opening()
                except BaseException as error:  # half of it is in the open: never twice
                    self._failure = error
                    raise
                finally:
                    self._keep_alive = None


class SealedFile(KVFile):
    """Another file, encrypted with a key that only this object has (see `BlockCipher`).

    The key is never written, and nothing of the file can be read without it: what a process leaves
    in the free blocks of a disk is noise. It does not find what is changed on the disk
    meanwhile. What was never written reads as zeros.
    """

    def __init__(self, inner: KVFile) -> None:
        """Wrap `inner`, which must be empty; closing this closes it.

        Raises:
            DocumentKeyError: `cryptography` is not installed.
        """
        self.inner = inner
        self.is_direct, self.simulated = inner.is_direct, inner.simulated
        self.sector_bytes = max(inner.sector_bytes, _LEAST_SECTOR_BYTES)
        self._cipher = BlockCipher()
        self._written = _Written()

    @override
    def reserve(self, num_bytes: int) -> None:
        """Reserve in the wrapped file."""
        self.inner.reserve(num_bytes)

    @property
    @override
    def request_queue(self) -> tuple[AioQueue, int] | None:
        """The wrapped file's: what is read by it must go through `opened`."""
        return self.inner.request_queue

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Start the reads; they are decrypted when they are waited for."""
        inner = self.inner.submit_reads(offsets, lengths, addresses, keep_alive)
        return self.opened(inner, offsets, lengths, addresses, keep_alive)

    @override
    def opened(
        self, ticket: Ticket, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array,
        keep_alive: object,
    ) -> Ticket:  # fmt: skip
        return SealedTicket(ticket, lambda: self._decrypt(offsets, lengths, addresses), keep_alive)

    def _decrypt(self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array) -> None:
        self._cipher.decrypt(offsets // BLOCK_BYTES, lengths, addresses)
        if len(offsets) and int((offsets + lengths).max()) > self._written.whole_bytes:
            runs = zip(offsets.tolist(), lengths.tolist(), addresses.tolist(), strict=True)
            for offset, length, where in runs:
                run = bytes_at(where, length)
                self._written.clear_others(offset, run, self.sector_bytes)

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Encrypt and write."""
        size = len(data)
        if offset % self.sector_bytes or size % self.sector_bytes:
            raise StorageError(f"a sealed write is not aligned to {self.sector_bytes} bytes")
        buffer = AlignedBuffer(1, size)
        self._cipher.encrypt(offset // BLOCK_BYTES, data, buffer.array[0])
        self.inner.write_at(offset, buffer.array[0])
        self._written.note(offset, size, self.sector_bytes)

    @override
    def sync(self) -> None:
        """Flush the wrapped file."""
        self.inner.sync()

    @override
    def close(self) -> None:
        """Close the wrapped file."""
        self.inner.close()


class _Written:
    """Which sectors of a file were written, a bit each.

    Attributes:
        whole_bytes: everything before was written
    """

    def __init__(self) -> None:
        self.whole_bytes = 0
        self._bits = np.zeros(0, dtype=np.uint8)
        self._lock = threading.Lock()  # a thread writes while another one reads

    def note(self, offset: int, size: int, sector_bytes: int) -> None:
        """[offset, offset + size) was written."""
        first, end = offset // sector_bytes, (offset + size) // sector_bytes
        with self._lock:
            if offset <= self.whole_bytes:  # the usual order; bits below need not be set
                self.whole_bytes = max(self.whole_bytes, offset + size)
                return
            if 8 * len(self._bits) < end:
                grown = np.zeros(max(-(-end // 8), len(self._bits) * 5 // 4), dtype=np.uint8)
                grown[: len(self._bits)] = self._bits
                self._bits = grown
            low, high = first // 8, -(-end // 8)
            bits = np.unpackbits(self._bits[low:high], bitorder="little")
            bits[first - 8 * low : end - 8 * low] = 1
            self._bits[low:high] = np.packbits(bits, bitorder="little")

    def clear_others(self, offset: int, run: ByteArray, sector_bytes: int) -> None:
        """Zero the sectors of a run, uint8 [num_bytes] read at `offset`, that were not written."""
        sectors = run.reshape(-1, sector_bytes)
        numbers = offset // sector_bytes + np.arange(len(sectors))
        with self._lock:
            known = numbers < 8 * len(self._bits)
            written = (numbers + 1) * sector_bytes <= self.whole_bytes
            at = numbers[known]
            written[known] |= (self._bits[at // 8] >> (at % 8).astype(np.uint8) & 1).astype(bool)
        sectors[~written] = 0
