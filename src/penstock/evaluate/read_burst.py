"""Burst bandwidth: a policy's own read batches, awaited at once, against the disk's."""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.devices.measure import measure_reads
from penstock.models.cache_adapter import TieredCache
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import Int64Array, KVFile

MAX_BATCHES = 400
ROUNDS = 2
"""Replays, each between two measurements of the device."""


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
    """The same of `depth` random reads of `request_bytes` each, as `penstock devices` has them."""

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
        store = cache.tiers._store
        assert store is not None
        self._regions = [store.region(i) for i in range(cache._settings.shape.num_layers)]
        for layer, region in enumerate(self._regions):
            region.observer = partial(self._note, layer)

    def _note(self, layer: int, units: Int64Array) -> None:
        if len(self.batches) < MAX_BATCHES:
            self.batches.append(_Batch(layer, units.copy()))

    def stop(self) -> None:
        """End the recording."""
        for region in self._regions:
            region.observer = None
        self._regions = []


def measure_burst(cache: TieredCache, recorder: FetchRecorder, *, seed: int = 0) -> Burst | None:
    """Replay the recorded batches, in turn with the measurement of `penstock devices`.

    Both read the store's own files: on a virtual disk another file may be in the host's cache, or
    not, and differ by a factor of two. Each batch keeps its pattern but is moved by a random
    distance, so that neither the disk nor a cache below it has just read the same places.

    Returns:
        None when nothing was recorded.
    """
    batches = [batch for batch in recorder.batches if len(batch.units)]
    if not batches:
        return None
    store = cache.tiers._store
    assert store is not None
    draw = np.random.default_rng(seed)
    end = int(max(batch.units.max() for batch in batches)) + 1
    buffer = AlignedBuffer(max(len(batch.units) for batch in batches), store.padded_bytes)
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
    cell = (units_per_read * store.padded_bytes, depth)
    device: list[float] = []
    layers = sorted({batch.layer for batch in batches})
    for number in range(2 * ROUNDS):
        if number % 2:
            replay()
        device.extend(
            _device_bandwidth(
                store.region(layer).file,
                end * store.padded_bytes,
                cell,
                seed=int(draw.integers(10**9)),
            )
            for layer in layers
        )
    return Burst(
        request_bytes=cell[0], depth=depth, batches=len(batches),
        bandwidth=float(np.median(speeds)), device_bandwidth=float(np.median(device)),
    )  # fmt: skip


def _device_bandwidth(file: KVFile, file_bytes: int, cell: tuple[int, int], *, seed: int) -> float:
    buffer = AlignedBuffer(1, cell[0] * cell[1])

    def read_batch(offsets: Int64Array, lengths: Int64Array) -> None:
        addresses = buffer.address + np.cumsum(lengths) - lengths
        file.submit_reads(offsets, lengths, addresses, buffer.array).wait()

    (measured,) = measure_reads(read_batch, file_bytes, [cell], seconds_per_cell=0.05, seed=seed)
    return measured.bandwidth
