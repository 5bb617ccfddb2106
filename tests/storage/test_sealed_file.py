"""A sealed file gives back what was written, and leaves nothing of it on the disk."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import FetchError, StorageError
from penstock.storage import store as store_module
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.memory_file import MemoryFile
from penstock.storage.sealed_file import SealedFile
from penstock.storage.store import KVStore, Sealing
from penstock.testing.faulty_file import FaultyFile

SECTOR = 512
SECRET = b"the quarterly figures of a firm "


def secret_rows(count: int) -> AlignedBuffer:
    buffer = AlignedBuffer(count, SECTOR)
    buffer.array[:] = np.frombuffer(SECRET * (SECTOR // len(SECRET)), dtype=np.uint8)
    return buffer


def read(file: SealedFile, first: int, count: int) -> np.ndarray:
    buffer = AlignedBuffer(count, SECTOR)
    at = np.array([first * SECTOR, buffer.address, count * SECTOR])
    file.submit_reads(at[:1], at[2:], at[1:2], buffer.array).wait()
    return buffer.array


def below(inner: MemoryFile) -> bytes:
    return inner._open_bytes(StorageError).tobytes()


def test_what_is_below_says_nothing() -> None:
    inner = MemoryFile()
    file = SealedFile(inner)
    buffer = secret_rows(4)
    file.write_at(2 * SECTOR, buffer.array.reshape(-1))
    assert np.array_equal(read(file, 2, 4), buffer.array)
    assert np.array_equal(read(file, 3, 2), buffer.array[:2]), "sectors stand alone"
    assert SECRET[:8] not in below(inner)
    stored = below(inner)[2 * SECTOR :]
    blocks = {stored[i : i + 16] for i in range(0, len(stored), 16)}
    assert len(blocks) == 4 * SECTOR // 16, "equal text shows nowhere"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(0, 3)), max_size=12))
def test_what_was_written_is_read_and_the_rest_is_zeros(writes: list[tuple[int, int, int]]) -> None:
    inner = MemoryFile()
    file, known = SealedFile(inner), np.zeros((100, SECTOR), dtype=np.uint8)
    file.reserve(known.size)
    for first, count, stamp in writes:
        known[first : first + count] = stamp
        buffer = AlignedBuffer(count, SECTOR)
        buffer.array[:] = stamp
        file.write_at(first * SECTOR, buffer.array.reshape(-1))
        assert np.array_equal(read(file, 0, 100), known)


def test_a_wait_decrypts_once() -> None:
    file = SealedFile(MemoryFile())
    data = secret_rows(3)
    file.write_at(0, data.array.reshape(-1))
    buffer = AlignedBuffer(3, SECTOR)
    at = np.array([0, buffer.address, buffer.array.size])
    ticket = file.submit_reads(at[:1], at[2:], at[1:2], buffer.array)
    ticket.wait()
    ticket.wait()
    assert ticket.done()
    assert np.array_equal(buffer.array, data.array)


def test_a_read_that_failed_is_told_again() -> None:
    inner = FaultyFile(MemoryFile(), failing_reads={0})
    file = SealedFile(inner)
    file.write_at(0, secret_rows(2).array.reshape(-1))
    buffer = AlignedBuffer(2, SECTOR)
    at = np.array([0, buffer.address, buffer.array.size])
    ticket = file.submit_reads(at[:1], at[2:], at[1:2], buffer.array)
    for _ in range(2):
        with pytest.raises(FetchError):
            ticket.wait()


def test_large_sectors_stay_what_they_are() -> None:
    inner = MemoryFile()
    inner.sector_bytes = 8192
    file = SealedFile(inner)
    assert file.sector_bytes == 8192
    with pytest.raises(StorageError, match="8192"):
        file.write_at(4096, np.zeros(8192, dtype=np.uint8))


def kinds(store: KVStore) -> set[bool]:
    return {isinstance(store.region(layer).file, SealedFile) for layer in range(2)}


def test_a_store_on_a_disk_says_whether_it_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(place: str, sealed: Sealing) -> KVStore:
        return KVStore.create(place, num_layers=2, unit_bytes=5000, sealed=sealed)

    cases: list[tuple[Sealing, bool, bool]] = [
        (True, False, True), (False, True, False), ("auto", True, True), ("auto", False, False),
    ]  # fmt: skip
    for sealed, is_fast, expected in cases:
        monkeypatch.setattr(store_module, "is_fast", lambda is_fast=is_fast: is_fast)
        with make(str(tmp_path), sealed) as store:
            assert kinds(store) == {expected}
            assert ("not encrypted" in store.describe()) != expected
            assert "encrypted" in store.describe()
        with make("memory", sealed) as store:
            assert isinstance(store.region(0).file, MemoryFile), "memory is no disk"
