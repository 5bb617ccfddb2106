"""KVFile read by a pool of threads: the portable fallback, on any system and any file system."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from typing_extensions import override

from penstock.core.errors import AlignmentError, FetchError, StorageError
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket, read_error, write_error
from penstock.storage.file_space import allocate, write_all

NUM_READERS = 16
_DIRTY_BYTES_MAX = 8 << 20
"""Buffered writes beyond this are flushed and dropped: the page cache is fast memory too."""


class ThreadedTicket(Ticket):
    """A batch of reads split over futures, one a thread."""

    def __init__(
        self, read_bytes: int, num_reads: int, chunks: list[Future[None]], submitted_ns: int
    ) -> None:
        self.read_bytes = read_bytes
        self.num_reads = num_reads
        self.submitted_ns = submitted_ns
        self.finished_ns = 0 if chunks else submitted_ns
        self._chunks = chunks

    @override
    def done(self) -> bool:
        """Whether every thread has ended its share."""
        finished = all(chunk.done() for chunk in self._chunks)
        if finished and not self.finished_ns:
            self.finished_ns = time.perf_counter_ns()
        return finished

    @override
    def wait(self) -> None:
        """Block until every thread has ended its share.

        Raises:
            FetchError: a read failed or came up short.
        """
        if not self.finished_ns:
            try:
                wait(self._chunks)
            except BaseException:
                wait(self._chunks)  # threads write into the caller's memory: never leave them
                raise
            self.finished_ns = time.perf_counter_ns()
        for chunk in self._chunks:
            if chunk.cancelled():
                raise FetchError("reads were given up: the store was closed")
            if (error := chunk.exception()) is not None:
                raise error


class ThreadedFile(KVFile):
    """Takes over a file descriptor; its reads go through a pool shared by a store."""

    is_direct = False

    def __init__(
        self,
        descriptor: int,
        readers: ThreadPoolExecutor,
        *,
        sector_bytes: int = 512,
        skips_cache: bool = False,
        is_direct: bool = False,
    ) -> None:
        """Take over `descriptor`.

        Args:
            readers: stays its maker's to shut down.
            skips_cache: the descriptor is O_DIRECT, so everything must be aligned.
            is_direct: reads are known to come from the device.
        """
        self.sector_bytes = sector_bytes
        self.is_direct = is_direct
        self._skips_cache = skips_cache
        self._descriptor = descriptor
        self._readers = readers
        self._num_bytes = 0
        self._dirty_bytes = 0
        self._seeking = threading.Lock()  # where the system cannot read at an offset
        self._has_preadv = hasattr(os, "preadv")

    @override
    def reserve(self, num_bytes: int) -> None:
        """Allocate blocks for [0, num_bytes) where the system can, else only set the length."""
        if num_bytes > self._num_bytes:
            allocate(self._open_descriptor(), self._num_bytes, num_bytes)
            self._num_bytes = num_bytes

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Deal the reads out to the threads: one future a thread, not one a read."""
        if self._descriptor < 0:
            raise FetchError("the store is closed")
        if self._skips_cache:
            self._check(int(np.bitwise_or.reduce(offsets | lengths | addresses)))
        submitted_ns = time.perf_counter_ns()
        reads = list(zip(offsets.tolist(), lengths.tolist(), addresses.tolist(), strict=True))
        num_chunks = min(NUM_READERS, len(reads))
        try:
            chunks = [
                self._readers.submit(self._read_chunk, reads[i::num_chunks], keep_alive)
                for i in range(num_chunks)
            ]
        except RuntimeError as error:
            raise FetchError("the store is closed") from error
        return ThreadedTicket(int(lengths.sum()), len(reads), chunks, submitted_ns)

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Write, and keep what the page cache holds of it small."""
        descriptor = self._open_descriptor()
        if self._skips_cache:
            self._check(offset | len(data) | int(data.__array_interface__["data"][0]))
        if hasattr(os, "pwrite"):
            write_all(descriptor, offset, data)
        else:
            self._seek_and_write(descriptor, offset, data)
        self._num_bytes = max(self._num_bytes, offset + len(data))
        self._dirty_bytes += len(data)
        if self._dirty_bytes > _DIRTY_BYTES_MAX and not self._skips_cache:
            self.sync()

    @override
    def sync(self) -> None:
        """Flush to the device and drop the pages that the system kept."""
        descriptor = self._open_descriptor()
        try:
            getattr(os, "fdatasync", os.fsync)(descriptor)
        except OSError as error:
            raise write_error(error, "flush the KV cache") from error
        self._dirty_bytes = 0
        if not self._skips_cache:
            _drop_pages(descriptor, 0, 0)

    @override
    def close(self) -> None:
        """Close the descriptor. Close only when no read is under way, or after the pool."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _read_chunk(self, reads: list[tuple[int, int, int]], keep_alive: object) -> None:
        for offset, length, address in reads:
            view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
            try:
                got = self._read_at(offset, view)
            except OSError as error:
                raise read_error(offset, length, -(error.errno or 0)) from error
            if got != length:
                raise read_error(offset, length, got)
            if not self._skips_cache:
                _drop_pages(self._descriptor, offset, length)

    def _read_at(self, offset: int, view: memoryview) -> int:
        """Read until `view` is full or the file ends; returns bytes read."""
        if not self._has_preadv:
            with self._seeking:
                os.lseek(self._descriptor, offset, os.SEEK_SET)
                with open(self._descriptor, "rb", buffering=0, closefd=False) as raw:
                    return _fill(view, raw.readinto)
        got = 0
        while got < len(view):
            count = os.preadv(self._descriptor, [view[got:]], offset + got)
            if not count:
                break
            got += count
        return got

    def _seek_and_write(self, descriptor: int, offset: int, data: ByteArray) -> None:
        view = data.data
        try:
            with self._seeking:
                os.lseek(descriptor, offset, os.SEEK_SET)
                while len(view):
                    view = view[os.write(descriptor, view) :]
        except OSError as error:
            raise write_error(error, "write the KV cache") from error

    def _check(self, bits: int) -> None:
        if bits & (self.sector_bytes - 1):
            raise AlignmentError(f"direct I/O that is not aligned to {self.sector_bytes} bytes")

    def _open_descriptor(self) -> int:
        if self._descriptor < 0:
            raise StorageError("the store is closed")
        return self._descriptor


def _fill(view: memoryview, readinto: Callable[[memoryview], int | None]) -> int:
    got = 0
    while got < len(view) and (count := readinto(view[got:])):
        got += count
    return got


def _drop_pages(descriptor: int, offset: int, num_bytes: int) -> None:
    """Ask the system to forget what it cached of the file; 0 bytes means up to its end."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
