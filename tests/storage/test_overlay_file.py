"""A shared file and a private one behind it read as one; nothing is written to the shared one."""

import numpy as np
import pytest

from penstock.core.errors import AlignmentError, FetchError, StorageError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.memory_file import MemoryFile
from penstock.storage.overlay_file import OverlayFile
from penstock.storage.unit_region import UnitRegion

SECTOR = 4096
SHARED, OWN = 5, 4


def unit(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(SECTOR, number + 1, dtype=np.uint8)


def filled() -> tuple[MemoryFile, OverlayFile]:
    base = MemoryFile()
    for i in range(SHARED + 2):  # the base goes on behind what is shared
        base.write_at(i * SECTOR, unit(i if i < SHARED else 100))
    overlay = OverlayFile(base, SHARED * SECTOR, MemoryFile())
    for i in range(SHARED, SHARED + OWN):
        overlay.write_at(i * SECTOR, unit(i))
    return base, overlay


@pytest.mark.parametrize("order", [[0, 1, 2], [7, 8], [4, 5], [3, 4, 5, 6], [8, 0, 5, 4, 4, 7]])
def test_units_of_both_parts(order: list[int]) -> None:
    _, overlay = filled()
    buffer = AlignedBuffer(len(order), SECTOR)
    units = np.array(order, dtype=np.int64)
    ticket = UnitRegion(overlay, SECTOR).submit_read(units, buffer, np.arange(len(order)))
    ticket.wait()
    assert ticket.done()
    assert ticket.read_bytes == len(order) * SECTOR
    assert ticket.finished_ns >= ticket.submitted_ns
    assert buffer.array[:, 0].tolist() == [i + 1 for i in order]


def test_the_shared_part_is_never_written_to() -> None:
    base, overlay = filled()
    with pytest.raises(AssertionError, match="never written"):
        overlay.write_at((SHARED - 1) * SECTOR, unit(9))
    overlay.close()
    buffer = AlignedBuffer(1, SECTOR)
    one = np.ones(1, dtype=np.int64)
    base.submit_reads(one * 4 * SECTOR, one * SECTOR, one * buffer.address, buffer).wait()
    assert buffer.array[0, 0] == SHARED, "the base is open still"


def test_room_is_made_for_the_private_part_alone() -> None:
    own = MemoryFile()
    overlay = OverlayFile(MemoryFile(), SHARED * SECTOR, own)
    overlay.reserve(3 * SECTOR)
    assert own._bytes is not None
    assert len(own._bytes) == 0
    overlay.reserve((SHARED + 2) * SECTOR)
    assert len(own._bytes) == 2 * SECTOR


def test_a_failed_part_fails_the_batch() -> None:
    base, overlay = filled()
    base.close()
    buffer = AlignedBuffer(2, SECTOR)
    with pytest.raises(FetchError):
        UnitRegion(overlay, SECTOR).submit_read(np.array([4, 5]), buffer, np.arange(2)).wait()


def test_closed() -> None:
    _, overlay = filled()
    overlay.close()
    one = np.ones(1, dtype=np.int64)
    with pytest.raises(FetchError, match="closed"):
        overlay.submit_reads(one, one, one, None)
    with pytest.raises(StorageError, match="closed"):
        overlay.write_at(SHARED * SECTOR, unit(1))


def test_sectors_that_do_not_fit_are_refused() -> None:
    odd = MemoryFile()
    odd.sector_bytes = 8192
    with pytest.raises(AlignmentError, match="8192"):
        OverlayFile(odd, 0, MemoryFile())
