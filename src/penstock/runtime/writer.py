"""Writer: closed groups to disk behind the decode loop, on one thread."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.trace import Tracer
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.unit_region import UnitRegion

Done = TypeVar("Done")


class Writer:
    """Writes units in submission order; errors come up in `drain`, never only in a log."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-writer")
        self._tracer = tracer

    def submit(
        self,
        region: UnitRegion,
        unit_ids: NDArray[np.int64],
        buffer: AlignedBuffer,
        rows: NDArray[np.int64],
    ) -> "Future[int]":
        """Write `buffer[rows]` to `unit_ids`; the rows must not change until the future is done."""
        return self._pool.submit(self._write, region, unit_ids, buffer, rows)

    def run(self, job: Callable[[], Done]) -> "Future[Done]":
        """Do something else on the same thread, in its turn."""
        return self._pool.submit(job)

    def _write(
        self,
        region: UnitRegion,
        unit_ids: NDArray[np.int64],
        buffer: AlignedBuffer,
        rows: NDArray[np.int64],
    ) -> int:
        start = time.perf_counter_ns()
        written = region.write(unit_ids, buffer, rows)
        if self._tracer is not None:
            now = time.perf_counter_ns()
            self._tracer.add("write", "disk write", start, now, units=len(unit_ids), bytes=written)
        return written

    def close(self) -> None:
        """Finish what is queued and stop the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
