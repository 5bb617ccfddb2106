"""Measure a storage device: bandwidth by request size and depth, and the profile that fits."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.devices.profile import DeviceProfile

Int64Array = npt.NDArray[np.int64]
ReadBatch = Callable[[Int64Array, Int64Array], None]
"""Reads lengths[i] bytes at offsets[i], submitted together; returns when all have come."""

REQUEST_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
DEPTHS = (1, 8, 32, 128)
BATCH_BYTES_MAX = 32 << 20
"""Cells whose batch would be larger are left out."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table: batches of `depth` reads of `request_bytes` each."""

    request_bytes: int
    depth: int
    bandwidth: float
    """Bytes per second: the median over batches."""
    batch_s: float
    """Seconds from submission to the last answer: the median over batches."""
    num_batches: int


def cells_of(
    request_bytes: Sequence[int] = REQUEST_BYTES, depths: Sequence[int] = DEPTHS
) -> list[tuple[int, int]]:
    """The (request size, depth) pairs worth measuring."""
    return [(r, d) for r in request_bytes for d in depths if r * d <= BATCH_BYTES_MAX]


def measure_reads(
    read_batch: ReadBatch,
    file_bytes: int,
    cells: Sequence[tuple[int, int]],
    *,
    seconds_per_cell: float = 0.25,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> Iterator[Cell]:
    """Yield one measured cell after another.

    Places are drawn without repetition as long as the file lasts, so a cache inside the device
    or the host helps as little as it would in use. The first batch of a cell is not counted.

    Args:
        file_bytes: of a file that was really written: unwritten blocks read as zeros at once.
        seconds_per_cell: at least five batches are read, however long they take.
        seed: of the places; repeated measurements of one file want others each time.
    """
    draw = np.random.default_rng(seed)
    for request_bytes, depth in cells:
        places = file_bytes // request_bytes
        lengths = np.full(depth, request_bytes, dtype=np.int64)
        order, used = draw.permutation(places), 0
        times: list[float] = []
        began = clock()
        while len(times) < 6 or clock() - began < seconds_per_cell:
            if used + depth > places:
                order, used = draw.permutation(places), 0
            offsets = np.resize(order[used : used + depth], depth) * request_bytes
            used += depth
            start = clock()
            read_batch(offsets, lengths)
            times.append(clock() - start)
        batch_s = float(np.median(times[1:]))
        yield Cell(request_bytes, depth, request_bytes * depth / batch_s, batch_s, len(times) - 1)


def fit_profile(cells: Sequence[Cell], *, name: str, sector_bytes: int) -> DeviceProfile:
    """The profile that comes nearest to a measured table.

    Latency from the smallest reads at depth 1; per-request and per-byte time by least squares on
    relative error over the deepest batches.
    """
    deepest = max(cell.depth for cell in cells)
    deep = [c for c in cells if c.depth >= min(deepest, 32)] or list(cells)
    per_read = np.array([c.batch_s / c.depth for c in deep])
    sizes = np.array([float(c.request_bytes) for c in deep])
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) / per_read[:, None]
    (fixed_s, byte_s), *_ = np.linalg.lstsq(terms, np.ones_like(per_read), rcond=None)
    bandwidth = 1 / byte_s if byte_s > 0 else max(c.bandwidth for c in deep)
    fixed_s = max(float(fixed_s), 1e-7)
    smallest = min((c.depth, c.request_bytes, c.batch_s) for c in cells)
    latency_s = max(0.0, smallest[2] / smallest[0] - fixed_s - smallest[1] / bandwidth)
    return DeviceProfile(
        name=name,
        title=name,
        bandwidth=float(bandwidth),
        write_bandwidth=float(bandwidth),
        iops=1 / (fixed_s + sector_bytes / float(bandwidth)),
        latency_s=float(latency_s),
        sector_bytes=sector_bytes,
        flash_page_bytes=sector_bytes,
        source="measured; writes are taken to be as fast as reads",
    )
