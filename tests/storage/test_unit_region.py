"""UnitRegion behaves like a dict from unit number to bytes."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.errors import FetchError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import Int64Array, KVFile, Ticket
from penstock.storage.memory_file import MemoryFile
from penstock.storage.store import KVStore
from penstock.storage.unit_region import UnitRegion

NUM_UNITS, NUM_ROWS = 40, 24


class RegionMachine(RuleBasedStateMachine):
    """Writes, overwrites and reads units, with several reads under way at once."""

    @initialize(unit_bytes=st.sampled_from([1, 100, 512, 1000, 4096]), disk=st.booleans())
    def open(self, unit_bytes: int, disk: bool) -> None:
        location = "auto" if disk else "memory"
        self.store = KVStore.create(location, num_layers=2, unit_bytes=unit_bytes)
        self.region = self.store.region(1)
        self.region.reserve(NUM_UNITS)
        self.model: dict[int, int] = {}
        self.stamp = 0
        self.pending: list[tuple[Ticket, AlignedBuffer, dict[int, int]]] = []

    @rule(pairs=st.dictionaries(st.integers(0, NUM_UNITS - 1), st.none(), max_size=NUM_ROWS))
    def write(self, pairs: dict[int, None]) -> None:
        self.finish_reads()
        units = np.array(list(pairs), dtype=np.int64)
        rows = np.random.default_rng(self.stamp).permutation(NUM_ROWS)[: len(units)]
        buffer = AlignedBuffer(NUM_ROWS, self.region.padded_bytes)
        for unit, row in zip(units.tolist(), rows.tolist(), strict=True):
            self.stamp += 1
            buffer.array[row] = self.stamp % 251
            self.model[unit] = self.stamp % 251
        written = self.region.write(units, buffer, rows)
        assert written == len(units) * self.region.padded_bytes

    @rule(data=st.data())
    def start_read(self, data: st.DataObject) -> None:
        if not self.model:
            return
        units = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=NUM_ROWS))
        shift = data.draw(st.integers(0, NUM_ROWS - len(units)))
        rows = np.arange(len(units), dtype=np.int64) + shift
        buffer = AlignedBuffer(NUM_ROWS, self.region.padded_bytes)
        ids = np.array(units, dtype=np.int64)
        ticket = self.region.submit_read(ids, buffer, rows)
        expected = {row: self.model[u] for row, u in zip(rows.tolist(), units, strict=True)}
        self.pending.append((ticket, buffer, expected))

    @rule()
    def finish_reads(self) -> None:
        for ticket, buffer, expected in reversed(self.pending):
            ticket.wait()
            values = np.zeros(NUM_ROWS, dtype=np.uint8)
            for row, value in expected.items():
                values[row] = value
            assert (buffer.array == values[:, None]).all()
        self.pending.clear()

    @invariant()
    def few_pending(self) -> None:
        if hasattr(self, "pending") and len(self.pending) > 4:
            self.finish_reads()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.finish_reads()
            self.store.close()


RegionMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
TestRegion = RegionMachine.TestCase


class CountingFile(MemoryFile):
    """Remembers the requests it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[int, int]] = []

    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        self.requests = list(zip(offsets.tolist(), lengths.tolist(), strict=True))
        return super().submit_reads(offsets, lengths, addresses, keep_alive)


def test_neighbouring_units_become_one_request() -> None:
    file = CountingFile()
    region = UnitRegion(file, 600)
    assert region.padded_bytes == 1024
    region.reserve(16)
    buffer = AlignedBuffer(8, region.padded_bytes)
    units, rows = np.array([7, 3, 4, 5]), np.array([0, 4, 5, 6])
    ticket = region.submit_read(units, buffer, rows)
    assert file.requests == [(3 * 1024, 3 * 1024), (7 * 1024, 1024)]
    assert ticket.num_reads == 2
    assert ticket.read_bytes == 4 * 1024


def test_rows_are_padded_to_the_files_sector() -> None:
    file: KVFile = MemoryFile()
    file.sector_bytes = 4096
    assert UnitRegion(file, 1).padded_bytes == 4096
    assert UnitRegion(file, 4096).padded_bytes == 4096
    assert UnitRegion(file, 4097).padded_bytes == 8192


def test_unreserved_units_cannot_be_read() -> None:
    region = UnitRegion(MemoryFile(), 512)
    region.reserve(2)
    buffer = AlignedBuffer(1, 512)
    ticket = region.submit_read(np.array([5]), buffer, np.array([0]))
    with pytest.raises(FetchError):
        ticket.wait()


def test_a_row_outside_the_buffer_is_a_mistake() -> None:
    region = UnitRegion(MemoryFile(), 512)
    region.reserve(2)
    buffer = AlignedBuffer(1, 512)
    for row in (1, -1):
        with pytest.raises(AssertionError, match="outside"):
            region.submit_read(np.array([0]), buffer, np.array([row]))
