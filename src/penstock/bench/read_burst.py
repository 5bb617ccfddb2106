"""Burst bandwidth: a policy's own read batches, awaited at once, against the disk's."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.cache_adapter import TieredCache
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import Ticket
from penstock.storage.measured_directory import measure_directory

MAX_BATCHES = 400


@dataclass(frozen=True, slots=True)
class _Batch:
    layer: int
    units: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """Bandwidth of real fetch batches beside the device's own at the same size and depth."""

    request_bytes: int
    """Bytes of a read, the mean over all batches, in whole units."""
    depth: int
    """Reads in a batch, the median."""
    batches: int
    bandwidth: float
    """Bytes per second of the policy's batches: the median over batches."""
    device_bandwidth: float
    """What `penstock devices` measures for batches of `depth` reads of `request_bytes`."""

    @property
    def share(self) -> float:
        """Our bandwidth as a share of the device's."""
        return self.bandwidth / self.device_bandwidth if self.device_bandwidth else 0.0


class FetchRecorder:
    """Remembers which units a cache fetches together, step by step."""

    def __init__(self, cache: TieredCache) -> None:
        """Start recording; `stop` ends it."""
        self._cache = cache
        self.batches: list[_Batch] = []
        self._regions: list[Any] = []
        store = cache._runtime._store
        assert store is not None
        for layer in range(cache._config.shape.num_layers):
            region = store.region(layer)
            self._record(layer, region)
            self._regions.append(region)

    def _record(self, layer: int, region: Any) -> None:
        submit = region.submit_read

        def submit_read(
            units: NDArray[np.int64], buffer: AlignedBuffer, rows: NDArray[np.int64]
        ) -> Ticket:
            if len(self.batches) < MAX_BATCHES:
                self.batches.append(_Batch(layer, units.copy()))
            ticket: Ticket = submit(units, buffer, rows)
            return ticket

        region.submit_read = submit_read

    def stop(self) -> None:
        """End the recording."""
        for region in self._regions:
            del region.submit_read  # the instance's own, over the class's
        self._regions = []


def measure_burst(
    cache: TieredCache, recorder: FetchRecorder, place: str, *, file_bytes: int, seed: int = 0
) -> Burst | None:
    """Replay the recorded batches, the device's own measurement before and after.

    Each batch keeps its pattern but is moved by a random distance, so that neither the disk nor a
    cache below it has just read the same places.

    Args:
        file_bytes: of the file that the device's own measurement reads from.

    Returns:
        None when nothing was recorded.
    """
    batches = [batch for batch in recorder.batches if len(batch.units)]
    if not batches:
        return None
    store = cache._runtime._store
    assert store is not None
    draw = np.random.default_rng(seed)
    end = int(max(batch.units.max() for batch in batches)) + 1
    buffer = AlignedBuffer(max(len(batch.units) for batch in batches), store.row_bytes)
    counts: list[int] = []
    speeds: list[float] = []

    def replay() -> None:
        for batch in batches:
            units = (batch.units + draw.integers(end)) % end
            rows = np.arange(len(units))
            start = time.perf_counter()
            ticket = store.region(batch.layer).submit_read(units, buffer, rows)
            ticket.wait()
            speeds.append(ticket.read_bytes / (time.perf_counter() - start))
            counts.append(ticket.num_reads)

    replay()
    total_units = sum(len(batch.units) for batch in batches)
    units_per_read = max(1, round(total_units / sum(counts)))
    depth = max(1, int(np.median(counts)))
    counts.clear()
    speeds.clear()
    cell = (units_per_read * store.row_bytes, depth)
    device = []
    for _ in range(2):
        measured = measure_directory(
            place, file_bytes=file_bytes, cells=[cell], seconds_per_cell=0.5
        )
        device.append(measured.cells[0].bandwidth)
        if len(device) == 1:
            replay()
    return Burst(
        request_bytes=cell[0], depth=depth, batches=len(batches),
        bandwidth=float(np.median(speeds)), device_bandwidth=float(np.mean(device)),
    )  # fmt: skip
