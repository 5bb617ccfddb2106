"""UnitRegion: the fixed-size, sector-aligned units of one layer in one file."""

from collections.abc import Callable

import numpy as np

from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.coalesce import Runs, coalesce, plan_reads
from penstock.storage.file import Int64Array, KVFile, Ticket

_RUN_BYTES = 1 << 20
"""Longest transfer: beyond it bandwidth no longer grows and a failed read costs more."""


class UnitRegion:
    """Units numbered from 0, each `padded_bytes` apart; unit i lies at i * padded_bytes.

    Attributes:
        unit_bytes: payload of a unit
        padded_bytes: a unit's place on disk and in a buffer: the payload padded to whole sectors
        sector_bytes: what units are padded to
        run_units: most units in one transfer
    """

    def __init__(self, file: KVFile, unit_bytes: int, sector_bytes: int | None = None) -> None:
        """Lay units over a file.

        Args:
            sector_bytes: what units are padded to; None: the file's own sectors.
        """
        assert unit_bytes > 0, unit_bytes
        self.file = file
        self.unit_bytes = unit_bytes
        self.sector_bytes = sector = sector_bytes or file.sector_bytes
        assert sector % file.sector_bytes == 0, (sector, file.sector_bytes)
        self.padded_bytes = -(-unit_bytes // sector) * sector
        self.observer: Callable[[Int64Array], None] | None = None
        """Called with the units of every batch of reads (measurements)."""
        self.run_units = max(1, _RUN_BYTES // self.padded_bytes)

    def reserve(self, num_units: int) -> None:
        """Make room on the disk for units [0, num_units).

        Raises:
            StoreFullError: there is no room.
        """
        self.file.reserve(num_units * self.padded_bytes)

    def submit_read(self, unit_ids: Int64Array, buffer: AlignedBuffer, slots: Int64Array) -> Ticket:
        """Start reading `unit_ids[i]` into slot `slots[i]` of `buffer`, both int64 [num_units].

        Raises:
            FetchError: the store is closed. Errors of the reads themselves come from `Ticket.wait`.
        """
        if self.observer is not None:
            self.observer(unit_ids)
        reads = plan_reads(unit_ids, slots, self.run_units, buffer)
        if reads is None:
            runs, padded_bytes = self._plan(unit_ids, buffer, slots), self.padded_bytes
            reads = (
                runs.first_units * padded_bytes, runs.num_units * padded_bytes,
                runs.first_slots * padded_bytes + buffer.address,
            )  # fmt: skip
        return self.file.submit_reads(*reads, buffer.array)

    def write(self, unit_ids: Int64Array, buffer: AlignedBuffer, slots: Int64Array) -> int:
        """Write slot `slots[i]` of `buffer` as unit `unit_ids[i]`; both int64 [num_units].

        Returns:
            Bytes written, padding included.

        Raises:
            StoreFullError: there is no room.
            StorageError: the write failed.
        """
        if len(unit_ids) == 1:  # what a decoded unit is, layer after layer
            unit, slot = int(unit_ids[0]), int(slots[0])
            assert 0 <= slot < buffer.num_slots, "a slot outside the buffer"
            self.file.write_at(unit * self.padded_bytes, buffer.array[slot])
            return self.padded_bytes
        runs = self._plan(unit_ids, buffer, slots)
        for unit, slot, count in zip(*(part.tolist() for part in runs), strict=True):
            self.file.write_at(
                unit * self.padded_bytes, buffer.array[slot : slot + count].reshape(-1)
            )
        return len(unit_ids) * self.padded_bytes

    def _plan(self, unit_ids: Int64Array, buffer: AlignedBuffer, slots: Int64Array) -> Runs:
        assert unit_ids.shape == slots.shape, (unit_ids.shape, slots.shape)
        assert unit_ids.dtype == slots.dtype == np.int64, (unit_ids.dtype, slots.dtype)
        assert buffer.slot_bytes == self.padded_bytes, (buffer.slot_bytes, self.padded_bytes)
        if len(slots):
            largest = slots.view(np.uint64).max()  # negative slots are large ones
            assert largest < buffer.num_slots, "a slot outside the buffer"
        return coalesce(unit_ids, slots, self.run_units)
