"""Writer: in the order of calls, together where held, with errors for whoever waits."""

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.core.errors import StorageError
from penstock.engine.slot_transfer import PoolMemory, SlotTransfer
from penstock.engine.writer import Writer
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.memory_file import MemoryFile
from penstock.storage.unit_region import UnitRegion

UNIT_BYTES = 4096


class NotedRegion(UnitRegion):
    """Notes who writes which units; some may fail."""

    def __init__(self, *, fails: int = -1) -> None:
        super().__init__(MemoryFile(), UNIT_BYTES, UNIT_BYTES)
        self.written: list[int] = []
        self.threads: set[int] = set()
        self._fails = fails

    def write(
        self, unit_ids: NDArray[np.int64], buffer: AlignedBuffer, rows: NDArray[np.int64]
    ) -> int:
        """See `UnitRegion.write`."""
        self.threads.add(threading.get_ident())
        self.written.append(int(unit_ids[0]))
        if int(unit_ids[0]) == self._fails:
            raise StorageError("the device is gone")
        return super().write(unit_ids, buffer, rows)


def one(number: int) -> NDArray[np.int64]:
    return np.array([number], dtype=np.int64)


@pytest.fixture
def buffer() -> AlignedBuffer:
    made = AlignedBuffer(4, UNIT_BYTES)
    made.array[:] = np.arange(4, dtype=np.uint8)[:, None] + 1
    return made


def test_held_writes_wait_and_then_run_in_order(buffer: AlignedBuffer) -> None:
    writer, region = Writer(None), NotedRegion()
    held = [writer.defer(region, one(i), buffer, one(i)) for i in (2, 0)]
    assert writer.run(lambda: list(region.written)).result(5) == [2, 0], "in their turn"
    assert [future.result(5) for future in held] == [UNIT_BYTES] * 2
    third = writer.defer(region, one(3), buffer, one(3))
    assert not third.done()
    assert region.written == [2, 0]
    writer.submit(region, one(1), buffer, one(1)).result(5)
    assert third.result(5) == UNIT_BYTES
    assert region.written == [2, 0, 3, 1]
    assert region.threads.isdisjoint({threading.get_ident()})
    writer.start_deferred()
    writer.close()


def test_a_failed_write_does_not_stop_the_others(buffer: AlignedBuffer) -> None:
    writer, region = Writer(None), NotedRegion(fails=1)
    held = [writer.defer(region, one(i), buffer, one(i)) for i in range(3)]
    writer.start_deferred()
    assert held[2].result(5) == UNIT_BYTES
    with pytest.raises(StorageError, match="the device is gone"):
        held[1].result(5)
    writer.close()


def test_who_drains_starts_what_is_held(buffer: AlignedBuffer) -> None:
    writer, region = Writer(None), NotedRegion()
    transfer = SlotTransfer(region, PoolMemory(buffer.tensor, buffer), None, writer, None)
    transfer.write(one(2), one(1), later=True)
    transfer.drain()
    assert region.written == [2]
    failing = NotedRegion(fails=0)
    broken = SlotTransfer(failing, PoolMemory(buffer.tensor, buffer), None, writer, None)
    broken.write(one(0), one(0), later=True)
    with pytest.raises(StorageError, match="the device is gone"):
        broken.drain()
    broken.drain()
    writer.close()


def test_closing_forgets_what_is_held(buffer: AlignedBuffer) -> None:
    writer, region = Writer(None), NotedRegion()
    writer.defer(region, one(0), buffer, one(0))
    writer.close()
    assert region.written == []
