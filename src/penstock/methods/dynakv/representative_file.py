"""RepresentativeFile: one layer's cluster centroids in a file, read whole, written in part."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.methods.dynakv.cluster_spans import merge
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import Int64Array, KVFile, Ticket

_RUN_BYTES = 1 << 20
"""Longest read; see `UnitRegion`."""


class Written(NamedTuple):
    """What a write took."""

    writes: int
    num_bytes: int
    """Whole sectors."""


class RepresentativeBuffer:
    """Memory for the representatives of one layer at a time.

    Attributes:
        vectors: float32 [rows, capacity, dim]
        holder: whose representatives they are, or None
    """

    def __init__(self, rows: int, capacity: int, dim: int, sector_bytes: int) -> None:
        """Allocate."""
        num_bytes = self.num_bytes(rows, capacity, dim, sector_bytes)
        self.memory = AlignedBuffer(num_bytes // sector_bytes, sector_bytes)
        flat = self.memory.array.reshape(-1)[: 4 * rows * capacity * dim].view(np.float32)
        self.vectors: npt.NDArray[np.float32] = flat.reshape(rows, capacity, dim)
        self.holder: object = None

    @staticmethod
    def num_bytes(rows: int, capacity: int, dim: int, sector_bytes: int) -> int:
        """Bytes of a buffer, for the ledger."""
        return -(-4 * rows * capacity * dim // sector_bytes) * sector_bytes


class RepresentativeFile:
    """Representatives of one layer: cluster c of row r is number `r * capacity + c` of the file.

    Source: DynaKV, section 6.1 (pipeline 1: representatives are stored on flash).

    The file is an image of the buffer, so that reads land in place and writes go out of it. A
    sector that is written holds nothing that matters but what the buffer holds too.
    """

    def __init__(self, file: KVFile, buffer: RepresentativeBuffer) -> None:
        """Lay out an empty `file`, which stays its owner's to close.

        Args:
            buffer: may serve others too; its sectors are at least the file's.
        """
        assert buffer.memory.slot_bytes % file.sector_bytes == 0
        self._file, self.buffer = file, buffer
        self._reserved = False

    def submit_read(self, counts: Int64Array) -> Ticket:
        """Start reading each row's first `counts[row]` representatives into the buffer. [rows]

        Raises:
            FetchError: the file is closed. Errors of the reads themselves come from `wait`.
        """
        lows, highs = self._sectors(*self._rows(counts))
        pieces = [
            (low, min(_RUN_BYTES, high - low))
            for begin, high in zip(lows.tolist(), highs.tolist(), strict=True)
            for low in range(begin, high, _RUN_BYTES)
        ]
        offsets, lengths = np.array(pieces, dtype=np.int64).reshape(-1, 2).T.copy()
        memory = self.buffer.memory
        return self._file.submit_reads(offsets, lengths, offsets + memory.address, memory.array)

    def write_all(self, counts: Int64Array) -> Written:
        """Write each row's first `counts[row]` representatives. [rows]

        Raises:
            StoreFullError: there is no room.
            StorageError: a write failed.
        """
        if not self._reserved:
            self._file.reserve(self.buffer.memory.num_bytes)
            self._reserved = True
        return self._write(*self._rows(counts))

    def write(self, numbers: Int64Array) -> Written:
        """Write those that have changed.

        Args:
            numbers: row times capacity plus cluster. [changed]

        Raises:
            StorageError: a write failed.
        """
        lows = numbers * self._vector_bytes
        return self._write(lows, lows + self._vector_bytes)

    def _write(self, lows: Int64Array, highs: Int64Array) -> Written:
        lows, highs = self._sectors(lows, highs)
        flat = self.buffer.memory.array.reshape(-1)
        for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
            self._file.write_at(low, flat[low:high])
        return Written(len(lows), int((highs - lows).sum()))

    @property
    def _vector_bytes(self) -> int:
        return 4 * int(self.buffer.vectors.shape[2])

    def _rows(self, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
        lows = np.arange(len(counts)) * (self.buffer.vectors.shape[1] * self._vector_bytes)
        return lows, lows + counts * self._vector_bytes

    def _sectors(self, lows: Int64Array, highs: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Whole sectors of some ranges of bytes, merged where they touch; none of empty ranges."""
        sector, filled = self.buffer.memory.slot_bytes, highs > lows
        lows, highs = lows[filled] // sector * sector, -(-highs[filled] // sector) * sector
        spans = merge(lows, highs)
        return spans.lows, spans.highs
