"""FaultyFile fails what it was told to fail, after the real work has ended, and nothing else."""

import errno

import numpy as np
import pytest

from penstock.core.errors import FetchError, StorageError, StoreFullError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.memory_file import MemoryFile
from penstock.storage.unit_region import UnitRegion
from penstock.testing.faulty_file import FaultyFile


def make(file: FaultyFile) -> tuple[UnitRegion, AlignedBuffer]:
    region = UnitRegion(file, 512)
    region.reserve(4)
    return region, AlignedBuffer(4, 512)


def test_chosen_reads_fail() -> None:
    region, buffer = make(FaultyFile(MemoryFile(), failing_reads={1}))
    one = np.array([0])
    tickets = [region.submit_read(one, buffer, one) for _ in range(3)]
    tickets[0].wait()
    for _ in range(2):
        with pytest.raises(FetchError) as caught:
            tickets[1].wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EIO
    assert tickets[1].done()
    tickets[2].wait()


def test_chosen_writes_fail_and_write_nothing() -> None:
    region, buffer = make(FaultyFile(MemoryFile(), failing_writes={0}))
    buffer.array[:] = 3
    one = np.array([0])
    with pytest.raises(StoreFullError):
        region.write(one, buffer, one)
    region.submit_read(one, buffer, one).wait()
    assert not buffer.array[0].any()
    buffer.array[:] = 3
    region.write(one, buffer, one)


def test_kind_of_write_error() -> None:
    file = FaultyFile(MemoryFile(), failing_writes={0}, write_errno=errno.EIO)
    region, buffer = make(file)
    with pytest.raises(StorageError) as caught:
        region.write(np.array([0]), buffer, np.array([0]))
    assert not isinstance(caught.value, StoreFullError)
