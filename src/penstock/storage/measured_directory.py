"""Measure a directory's disk through the very files that a store would use there."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.errors import ConfigError
from penstock.devices.measure import Cell, cells_of, measure_reads
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import Int64Array, KVFile
from penstock.storage.open_files import open_files

MIN_FILE_BYTES = 64 << 20
_WRITE_BYTES = 8 << 20


class DirectoryMeasurement(NamedTuple):
    """What a directory's disk does."""

    description: str
    """Where, and by which kind of I/O."""
    is_direct: bool
    """False: the figures are of a cache or of memory, not of a disk."""
    sector_bytes: int
    write_bandwidth: float
    """Bytes per second of one large sequential write."""
    cells: list[Cell]


def measure_directory(
    place: str = "auto",
    *,
    file_bytes: int = 512 << 20,
    cells: Sequence[tuple[int, int]] | None = None,
    seconds_per_cell: float = 0.25,
    progress: Callable[[float, str], None] = lambda share, what: None,
) -> DirectoryMeasurement:
    """Write a file in a directory, then time batches of random reads from it.

    Args:
        place: a directory, or "auto".
        file_bytes: size of the file; it has no name and is gone afterwards, whatever happens.
        cells: (request size, depth) pairs; by default the table of `devices.measure`.
        progress: called with the share done in [0, 1] and what is going on.

    Raises:
        ConfigError: the file would be too small for the figures to mean anything.
        StoreFullError: no room for the file.
        StorageError: the directory cannot be used, or a read failed.
    """
    if file_bytes < MIN_FILE_BYTES:
        raise ConfigError(f"{file_bytes} bytes are too few to measure a disk; give 64MiB or more")
    wanted = list(cells_of() if cells is None else cells)
    opened = open_files(place, 1)
    try:
        file = opened.files[0]
        write_bandwidth = _fill(file, file_bytes, progress)
        buffer = AlignedBuffer(1, max(size * depth for size, depth in wanted))

        def read_batch(offsets: Int64Array, lengths: Int64Array) -> None:
            addresses = buffer.address + np.cumsum(lengths) - lengths
            file.submit_reads(offsets, lengths, addresses, buffer.array).wait()

        measured = []
        for cell in measure_reads(
            read_batch, file_bytes, wanted, seconds_per_cell=seconds_per_cell
        ):
            measured.append(cell)
            progress(0.3 + 0.7 * len(measured) / len(wanted), "reading")
        return DirectoryMeasurement(
            opened.description, file.is_direct, file.sector_bytes, write_bandwidth, measured
        )
    finally:
        opened.close()


def _fill(file: KVFile, file_bytes: int, progress: Callable[[float, str], None]) -> float:
    """Write the whole file with bytes that do not compress; returns bytes per second."""
    block = AlignedBuffer(1, _WRITE_BYTES)
    block.array[:] = np.random.default_rng(0).integers(0, 256, block.array.shape, dtype=np.uint8)
    file.reserve(file_bytes)
    spent_s = 0.0
    for offset in range(0, file_bytes, _WRITE_BYTES):
        start = time.perf_counter()
        file.write_at(offset, block.array[0, : min(_WRITE_BYTES, file_bytes - offset)])
        spent_s += time.perf_counter() - start
        progress(0.3 * offset / file_bytes, "writing")
    start = time.perf_counter()
    file.sync()
    return file_bytes / (spent_s + time.perf_counter() - start)
