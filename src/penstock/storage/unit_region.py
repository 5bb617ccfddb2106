"""UnitRegion: the fixed-size, sector-aligned units of one layer in one file."""

from collections.abc import Callable

import numpy as np

from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.coalesce import Runs, coalesce, plan_reads
from penstock.storage.file import Int64Array, KVFile, Ticket

_RUN_BYTES = 1 << 20
"""Longest transfer: beyond it bandwidth no longer grows and a failed read costs more."""


class UnitRegion:
    """Units numbered from 0, each `row_bytes` apart; unit i lies at i * row_bytes.

    Attributes:
        unit_bytes: payload of a unit
        row_bytes: a unit's place on disk and in a buffer: the payload padded to whole sectors
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
        sector = sector_bytes or file.sector_bytes
        assert sector % file.sector_bytes == 0, (sector, file.sector_bytes)
        self.row_bytes = -(-unit_bytes // sector) * sector
        self.observer: Callable[[Int64Array], None] | None = None
        """Called with the units of every batch of reads (measurements)."""
        self.run_units = max(1, _RUN_BYTES // self.row_bytes)

    def reserve(self, num_units: int) -> None:
        """Make room on the disk for units [0, num_units).

        Raises:
            StoreFullError: there is no room.
        """
        self.file.reserve(num_units * self.row_bytes)

    def submit_read(self, unit_ids: Int64Array, buffer: AlignedBuffer, rows: Int64Array) -> Ticket:
        """Start reading `unit_ids[i]` into row `rows[i]` of `buffer`, both int64 [num_units].

        Raises:
            FetchError: the store is closed. Errors of the reads themselves come from `Ticket.wait`.
        """
        if self.observer is not None:
            self.observer(unit_ids)
        reads = plan_reads(unit_ids, rows, self.run_units, buffer)
        if reads is None:
            runs, row_bytes = self._plan(unit_ids, buffer, rows), self.row_bytes
            reads = (
                runs.first_units * row_bytes, runs.num_units * row_bytes,
                runs.first_rows * row_bytes + buffer.address,
            )  # fmt: skip
        return self.file.submit_reads(*reads, buffer.array)

    def write(self, unit_ids: Int64Array, buffer: AlignedBuffer, rows: Int64Array) -> int:
        """Write row `rows[i]` of `buffer` as unit `unit_ids[i]`; both int64 [num_units].

        Returns:
            Bytes written, padding included.

        Raises:
            StoreFullError: there is no room.
            StorageError: the write failed.
        """
        if len(unit_ids) == 1:  # what a decoded unit is, layer after layer
            unit, row = int(unit_ids[0]), int(rows[0])
            assert 0 <= row < buffer.num_rows, "a row outside the buffer"
            self.file.write_at(unit * self.row_bytes, buffer.array[row])
            return self.row_bytes
        runs = self._plan(unit_ids, buffer, rows)
        for unit, row, count in zip(*(part.tolist() for part in runs), strict=True):
            self.file.write_at(unit * self.row_bytes, buffer.array[row : row + count].reshape(-1))
        return len(unit_ids) * self.row_bytes

    def _plan(self, unit_ids: Int64Array, buffer: AlignedBuffer, rows: Int64Array) -> Runs:
        assert unit_ids.shape == rows.shape, (unit_ids.shape, rows.shape)
        assert unit_ids.dtype == rows.dtype == np.int64, (unit_ids.dtype, rows.dtype)
        assert buffer.row_bytes == self.row_bytes, (buffer.row_bytes, self.row_bytes)
        if len(rows):
            largest = rows.view(np.uint64).max()  # negative rows are large ones
            assert largest < buffer.num_rows, "a row outside the buffer"
        return coalesce(unit_ids, rows, self.run_units)
