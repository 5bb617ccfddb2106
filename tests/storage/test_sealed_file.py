"""A sealed file gives back what was written, and leaves nothing of it on the disk."""

from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import FetchError, StorageError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.memory_file import MemoryFile
from penstock.storage.sealed_file import SECTOR_BYTES, SealedFile
from penstock.storage.store import KVStore

SECRET = b"the quarterly figures of a firm "


def secret_rows(count: int) -> AlignedBuffer:
    buffer = AlignedBuffer(count, SECTOR_BYTES)
    buffer.array[:] = np.frombuffer(SECRET * (SECTOR_BYTES // len(SECRET)), dtype=np.uint8)
    return buffer


def read(file: SealedFile, first: int, count: int) -> np.ndarray:
    buffer = AlignedBuffer(count, SECTOR_BYTES)
    at = np.array([first * SECTOR_BYTES, buffer.address, count * SECTOR_BYTES])
    file.submit_reads(at[:1], at[2:], at[1:2], buffer.array).wait()
    return buffer.array


def test_what_is_below_says_nothing() -> None:
    inner = MemoryFile()
    file = SealedFile(inner)
    buffer = secret_rows(4)
    file.write_at(2 * SECTOR_BYTES, buffer.array.reshape(-1))
    assert np.array_equal(read(file, 2, 4), buffer.array)
    assert np.array_equal(read(file, 3, 2), buffer.array[:2]), "sectors stand alone"
    assert not read(file, 0, 2).any(), "what was never written is zeros"
    below = inner._open_bytes(StorageError).tobytes()
    assert SECRET[:8] not in below
    assert len(set(below[2 * SECTOR_BYTES :])) == 256
    file.write_at(2 * SECTOR_BYTES, buffer.array[:1].reshape(-1))
    again = inner._open_bytes(StorageError).tobytes()
    assert again[2 * SECTOR_BYTES :] != below[2 * SECTOR_BYTES :], "another nonce each time"


def test_what_was_changed_below_is_an_error() -> None:
    inner = MemoryFile()
    file = SealedFile(inner)
    file.write_at(0, secret_rows(2).array.reshape(-1))
    inner._open_bytes(StorageError)[SECTOR_BYTES + 7] ^= 1
    read(file, 0, 1)
    with pytest.raises(FetchError, match="damaged"):
        read(file, 0, 2)


def test_large_sectors_are_refused() -> None:
    inner = MemoryFile()
    inner.sector_bytes = 8192
    with pytest.raises(StorageError, match="8192"):
        SealedFile(inner)


def test_a_sealed_store_on_a_disk_says_so(tmp_path: Path) -> None:
    with KVStore.create(str(tmp_path), num_layers=2, unit_bytes=5000, sealed=True) as store:
        assert "encrypted" in store.describe()
        assert store.row_bytes == 8192
        assert all(isinstance(store.region(layer).file, SealedFile) for layer in range(2))
    with KVStore.create("memory", num_layers=1, unit_bytes=5000, sealed=True) as store:
        assert isinstance(store.region(0).file, MemoryFile), "memory is no disk"
