"""Units go to disk and come back, directly or staged; errors come up and leave nothing behind."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from penstock.core.errors import FetchError, StorageError, StoreFullError
from penstock.core.trace import Tracer
from penstock.engine.slot_transfer import PoolMemory, SlotTransfer, Staging
from penstock.engine.writer import Writer
from penstock.storage.memory_file import MemoryFile
from penstock.storage.unit_region import UnitRegion
from penstock.testing.faulty_file import FaultyFile

ROWS, STAGED_ROWS = 12, 5
CPU = torch.device("cpu")


class Rig:
    """One transfer over a faulty file; `direct` units fill their sectors, others are staged."""

    def __init__(self, direct: bool) -> None:
        self.file = FaultyFile(MemoryFile())
        self.region = UnitRegion(self.file, 1024 if direct else 700)
        self.writer = Writer(None)
        self.memory = PoolMemory.allocate(
            ROWS, self.region.unit_bytes, self.region.padded_bytes, CPU
        )
        assert (self.memory.buffer is not None) == direct
        self.staging = None if direct else Staging(STAGED_ROWS, self.region.padded_bytes, CPU)
        self.tracer = Tracer()
        self.transfer = SlotTransfer(
            self.region, self.memory, self.staging, self.writer, self.tracer
        )
        self.region.reserve(100)

    @property
    def sections_free(self) -> bool:
        return self.staging is None or len(self.staging._free) == Staging.NUM_SECTIONS

    def fill(self, first: int = 0) -> torch.Tensor:
        rows = (torch.arange(ROWS) + first).to(torch.uint8)[:, None]
        self.memory.tensor.copy_(rows.expand_as(self.memory.tensor))
        return self.memory.tensor.clone()


@pytest.fixture(params=["direct", "staged"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param == "direct")
    yield rig
    rig.writer.close()


def test_round_trip(rig: Rig) -> None:
    data = rig.fill()
    units = np.random.default_rng(0).permutation(50)[:ROWS].astype(np.int64)
    rig.transfer.write(units, np.arange(ROWS))
    rig.transfer.drain()
    rig.memory.tensor.zero_()
    slots = np.random.default_rng(1).permutation(ROWS).astype(np.int64)
    for start in range(0, ROWS, STAGED_ROWS):
        part = slice(start, start + STAGED_ROWS)
        pending = rig.transfer.read(units[part], slots[part])
        assert pending.read_bytes == len(units[part]) * rig.region.padded_bytes
        pending.land()
    assert torch.equal(rig.memory.tensor[torch.from_numpy(slots)], data)
    assert rig.sections_free
    assert rig.transfer.max_units == (None if rig.staging is None else STAGED_ROWS)


def test_a_failed_read_comes_up_and_frees_its_section(rig: Rig) -> None:
    rig.fill(7)
    rig.file.failing_reads = range(5)
    before = rig.memory.tensor.clone()
    for _ in range(5):
        pending = rig.transfer.read(np.arange(3), np.arange(3))
        with pytest.raises(FetchError, match="on purpose"):
            pending.land()
        assert rig.sections_free
    if rig.staging is not None:
        assert torch.equal(rig.memory.tensor, before), "bad bytes stay out of the slots"
    rig.transfer.read(np.arange(3), np.arange(3)).land()


@pytest.mark.parametrize("fails", [False, True])
def test_a_dropped_read_says_nothing(fails: bool, rig: Rig) -> None:
    rig.file.failing_reads = [0] if fails else []
    pending = rig.transfer.read(np.arange(3), np.arange(3))
    pending.drop()
    pending.drop()
    assert rig.sections_free


def test_a_read_that_cannot_start_frees_its_section(rig: Rig) -> None:
    rig.file.inner.close()
    for _ in range(4):
        with pytest.raises(FetchError, match="closed"):
            rig.transfer.read(np.arange(1), np.arange(1))
    assert rig.sections_free


def test_a_failed_write_comes_up_once(rig: Rig) -> None:
    rig.fill()
    rig.file.failing_writes = {1}

    def write_three() -> None:
        for unit in range(3):
            rig.transfer.write(np.array([unit * 2]), np.array([unit]))
            rig.transfer.drain()

    with pytest.raises(StoreFullError):
        write_three()
    rig.transfer.drain()
    assert rig.sections_free
    rig.transfer.write(np.array([9]), np.array([1]))
    rig.transfer.drain()


def test_the_first_of_several_failures_is_told() -> None:
    rig = Rig(direct=True)
    rig.file.failing_writes = {1, 2}
    for unit in range(4):
        rig.transfer.write(np.array([unit * 2]), np.array([unit]))
    with pytest.raises(StorageError):
        rig.transfer.drain()
    rig.transfer.drain()  # nothing is left in the queue
    rig.writer.close()


def test_some_writes_may_stay_under_way() -> None:
    rig = Rig(direct=True)
    for unit in range(3):
        rig.transfer.write(np.array([unit]), np.array([unit]))
    rig.transfer.drain(keep=1)
    assert rig.file.num_writes >= 2
    rig.transfer.drain()
    assert rig.file.num_writes == 3
    rig.writer.close()


class Gate:
    """Holds the writer up until it is opened."""

    def __init__(self, rig: Rig) -> None:
        self._event = threading.Event()
        rig.writer.run(self._event.wait)

    def open(self) -> None:
        self._event.set()


@pytest.fixture
def staged() -> Iterator[Rig]:
    rig = Rig(direct=False)
    yield rig
    rig.writer.close()


def test_copies_are_written_behind_the_caller(staged: Rig) -> None:
    gate, expected = Gate(staged), []
    for step in range(2):
        data = staged.fill(10 * step)
        staged.transfer.write(np.array([2 * step, 2 * step + 1]), np.array([3, 4]))
        expected.append(data[3:5])
    staged.memory.tensor.fill_(255)  # the slots are free again at once
    assert staged.file.num_writes == 0
    gate.open()
    staged.transfer.drain()
    assert staged.sections_free
    staged.transfer.read(np.arange(4), np.arange(4)).land()
    assert torch.equal(staged.memory.tensor[:4], torch.cat(expected))


def test_no_more_is_under_way_than_a_section_holds(staged: Rig) -> None:
    gate, done = Gate(staged), []
    data = staged.fill()

    def write_seven() -> None:
        for unit in range(7):
            staged.transfer.write(np.array([unit]), np.array([unit]))
            done.append(unit)

    thread = threading.Thread(target=write_seven)
    thread.start()
    until = time.monotonic() + 60
    while len(done) < STAGED_ROWS and time.monotonic() < until:
        time.sleep(0.001)
    thread.join(timeout=0.3)
    assert thread.is_alive()
    assert len(done) == STAGED_ROWS
    gate.open()
    thread.join()
    staged.transfer.drain()
    assert staged.sections_free
    for start in (0, 4):
        units = np.arange(start, min(start + 4, 7))
        staged.memory.tensor.zero_()
        staged.transfer.read(units, units).land()
        assert torch.equal(staged.memory.tensor[start : units[-1] + 1], data[start : units[-1] + 1])


def test_what_fails_behind_the_caller_comes_up_in_its_own_drain(staged: Rig) -> None:
    """Another transfer that needs the rows meanwhile is not told."""
    other = SlotTransfer(staged.region, staged.memory, staged.staging, staged.writer, None)
    staged.fill()
    staged.file.failing_writes = {0}
    gate = Gate(staged)
    staged.transfer.write(np.arange(2), np.arange(2))
    gate.open()
    for start in range(4, 16, 2):
        other.write(np.arange(start, start + 2), np.arange(2))
    other.drain()
    with pytest.raises(StoreFullError):
        staged.transfer.drain()
    staged.transfer.drain()
    assert staged.sections_free


def test_reads_get_the_section_of_writes_when_those_are_done(staged: Rig) -> None:
    staged.fill()
    gate = Gate(staged)
    staged.transfer.write(np.arange(3), np.arange(3))
    assert staged.staging is not None
    taken = [staged.staging.acquire() for _ in range(Staging.NUM_SECTIONS - 1)]
    thread = threading.Timer(0.1, gate.open)
    thread.start()
    taken.append(staged.staging.acquire())  # waits for the write
    assert staged.file.num_writes > 0
    for section in taken:
        staged.staging.release(section)
    staged.transfer.drain()
    assert staged.sections_free
