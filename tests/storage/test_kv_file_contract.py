"""What every KVFile must do, run over all of them."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import AlignmentError, FetchError, StorageError
from penstock.devices.presets import NVME
from penstock.devices.throttle import Throttle
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.direct_file import DirectFile
from penstock.storage.file import KVFile, Ticket
from penstock.storage.file_space import direct_sector_bytes, open_nameless
from penstock.storage.memory_file import MemoryFile
from penstock.storage.native_aio import AioQueue
from penstock.storage.sealed_file import SealedFile
from penstock.storage.threaded_file import ThreadedFile
from penstock.storage.throttled_file import ThrottledFile

KINDS = (
    "direct",
    "threaded",
    "threaded_direct",
    "threaded_seeking",
    "memory",
    "throttled",
    "sealed",
)
BLOCK = 4096


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.fixture(params=KINDS)
def file(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KVFile]:
    kind: str = request.param
    closers: list[Callable[[], object]] = []
    made: KVFile
    if kind == "memory":
        made = MemoryFile()
    elif kind == "throttled":
        made = ThrottledFile(MemoryFile(), Throttle(NVME))
    elif kind == "sealed":
        made = SealedFile(MemoryFile())
    else:
        if kind == "threaded_seeking":
            for name in ("preadv", "pread", "pwrite", "posix_fallocate", "posix_fadvise"):
                monkeypatch.delattr(os, name)
        opened = open_nameless(str(tmp_path), direct=kind in ("direct", "threaded_direct"))
        has_direct = opened.skips_cache and direct_sector_bytes(opened.descriptor) > 0
        if kind in ("direct", "threaded_direct") and not has_direct:
            os.close(opened.descriptor)
            pytest.skip("no direct I/O on this file system")
        if kind == "direct":
            queue = AioQueue(16)
            closers.append(queue.close)
            sector_bytes = direct_sector_bytes(opened.descriptor)
            made = DirectFile(opened.descriptor, queue, sector_bytes)
        else:
            pool = ThreadPoolExecutor(4)
            closers.append(pool.shutdown)
            skips_cache = kind == "threaded_direct"
            made = ThreadedFile(opened.descriptor, pool, skips_cache=skips_cache)
    yield made
    for close in closers:
        close()
    made.close()


class TestKVFile:
    def read(self, file: KVFile, offsets: np.ndarray, length: int) -> np.ndarray:
        buffer = AlignedBuffer(len(offsets), length)
        addresses = buffer.address + length * np.arange(len(offsets))
        lengths = np.full(len(offsets), length, dtype=np.int64)
        file.submit_reads(offsets, lengths, addresses, buffer.array).wait()
        return buffer.array

    def fill(self, file: KVFile, blocks: int) -> np.ndarray:
        data = AlignedBuffer(blocks, BLOCK)
        data.array[:] = np.random.default_rng(1).integers(0, 256, data.array.shape, np.uint8)
        file.reserve(blocks * BLOCK)
        file.write_at(0, data.array.reshape(-1))
        return data.array

    def test_reads_what_was_written(self, file: KVFile) -> None:
        data = self.fill(file, 64)
        order = np.random.default_rng(2).permutation(64)
        assert (self.read(file, order * BLOCK, BLOCK) == data[order]).all()

    def test_rewriting_is_seen_by_the_next_read(self, file: KVFile) -> None:
        self.fill(file, 8)
        fresh = AlignedBuffer(1, BLOCK)
        fresh.array[:] = 7
        file.write_at(3 * BLOCK, fresh.array[0])
        assert (self.read(file, int64(3 * BLOCK), BLOCK) == 7).all()

    def test_reserved_bytes_can_be_read_before_they_are_written(self, file: KVFile) -> None:
        file.reserve(16 * BLOCK)
        assert (self.read(file, int64(15 * BLOCK), BLOCK) == 0).all()

    def test_reserving_keeps_the_bytes_and_never_shrinks(self, file: KVFile) -> None:
        data = self.fill(file, 4)
        file.reserve(64 * BLOCK)
        file.reserve(BLOCK)
        assert (self.read(file, int64(3 * BLOCK), BLOCK) == data[3]).all()
        assert (self.read(file, int64(63 * BLOCK), BLOCK) == 0).all()

    def test_mixed_lengths_land_where_they_should(self, file: KVFile) -> None:
        data = self.fill(file, 16).reshape(-1)
        buffer = AlignedBuffer(10, BLOCK)
        offsets, lengths = int64(0, 5 * BLOCK, 12 * BLOCK), int64(2 * BLOCK, BLOCK, 4 * BLOCK)
        places = int64(0, 2 * BLOCK, 4 * BLOCK)
        ticket = file.submit_reads(offsets, lengths, buffer.address + places, buffer.array)
        ticket.wait()
        flat = buffer.array.reshape(-1)
        for offset, length, place in zip(offsets, lengths, places, strict=True):
            assert (flat[place : place + length] == data[offset : offset + length]).all()
        assert (buffer.array[3] == 0).all()
        assert (buffer.array[8:] == 0).all()
        assert ticket.read_bytes == 7 * BLOCK
        assert ticket.num_reads == 3

    def test_ticket_times_and_repeated_waits(self, file: KVFile) -> None:
        self.fill(file, 4)
        buffer = AlignedBuffer(1, BLOCK)
        ticket = self.start(file, buffer, 0)
        ticket.wait()
        first = ticket.finished_ns
        ticket.wait()
        assert ticket.done()
        assert 0 < ticket.submitted_ns <= first == ticket.finished_ns

    def test_done_comes_without_waiting(self, file: KVFile) -> None:
        self.fill(file, 4)
        buffer = AlignedBuffer(1, BLOCK)
        ticket = self.start(file, buffer, 0)
        while not ticket.done():
            pass
        assert (buffer.array != 0).any()
        ticket.wait()

    def test_no_reads_at_all(self, file: KVFile) -> None:
        ticket = file.submit_reads(int64(), int64(), int64(), None)
        ticket.wait()
        assert ticket.done()
        assert ticket.read_bytes == 0

    def test_reading_past_the_end_fails_each_time(self, file: KVFile) -> None:
        self.fill(file, 4)
        buffer = AlignedBuffer(2, BLOCK)
        addresses = buffer.address + int64(0, BLOCK)
        lengths = int64(BLOCK, BLOCK)
        ticket = file.submit_reads(int64(0, 99 * BLOCK), lengths, addresses, buffer.array)
        for _ in range(2):
            with pytest.raises(FetchError, match="gave only 0"):
                ticket.wait()
        assert (buffer.array[0] != 0).any()  # the other read of the batch came

    def test_more_reads_than_the_queue_takes(self, file: KVFile) -> None:
        data = self.fill(file, 64)
        offsets = np.tile(np.arange(64), 3) * BLOCK
        assert (self.read(file, offsets, BLOCK) == np.tile(data, (3, 1))).all()

    def test_alignment(self, file: KVFile) -> None:
        self.fill(file, 4)
        buffer = AlignedBuffer(2, BLOCK)
        if not isinstance(file, DirectFile) and not getattr(file, "_skips_cache", False):
            return
        with pytest.raises(AlignmentError):
            file.submit_reads(int64(100), int64(BLOCK), int64(buffer.address), buffer.array)
        with pytest.raises(AlignmentError):
            file.submit_reads(int64(0), int64(BLOCK), int64(buffer.address + 4), buffer.array)
        with pytest.raises(AlignmentError):
            file.write_at(0, buffer.array[0, :100])

    def test_closed_file_refuses_at_once(self, file: KVFile) -> None:
        self.fill(file, 4)
        file.close()
        file.close()
        buffer = AlignedBuffer(1, BLOCK)
        with pytest.raises(FetchError, match="closed"):
            self.start(file, buffer, 0)
        with pytest.raises(StorageError, match="closed"):
            file.write_at(0, buffer.array[0])
        with pytest.raises(StorageError, match="closed"):
            file.reserve(1 << 20)

    def test_sync(self, file: KVFile) -> None:
        data = self.fill(file, 4)
        file.sync()
        assert (self.read(file, int64(0), BLOCK) == data[0]).all()

    def start(self, file: KVFile, buffer: AlignedBuffer, offset: int) -> Ticket:
        return file.submit_reads(int64(offset), int64(BLOCK), int64(buffer.address), buffer.array)
