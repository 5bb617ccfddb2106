"""Writer: closed units to disk behind the decode loop, on one thread."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.trace import Tracer
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.unit_region import UnitRegion

Done = TypeVar("Done")


class _Write(NamedTuple):
    """One call of `Writer.hold`."""

    future: "Future[int]"
    region: UnitRegion
    unit_ids: NDArray[np.int64]
    buffer: AlignedBuffer
    slots: NDArray[np.int64]


class Writer:
    """Writes units in submission order; errors come up in `drain`, never only in a log."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-writer")
        self._tracer = tracer
        self._deferred: list[_Write] = []
        self._lock = Lock()
        """The layer that is computed and the one that is prefetched write from two threads."""

    def submit(
        self,
        region: UnitRegion,
        unit_ids: NDArray[np.int64],
        buffer: AlignedBuffer,
        slots: NDArray[np.int64],
    ) -> "Future[int]":
        """Write `buffer[slots]` to `unit_ids`; the slots must not change until the future is
        done."""
        self.start_deferred()
        return self._pool.submit(self._write, region, unit_ids, buffer, slots)

    def defer(
        self,
        region: UnitRegion,
        unit_ids: NDArray[np.int64],
        buffer: AlignedBuffer,
        slots: NDArray[np.int64],
    ) -> "Future[int]":
        """As `submit`, but not before `start_deferred`.

        Layers that close a unit in the same decode step wake the thread once, behind the last of
        them, instead of each: it and the step want the interpreter in turns.
        """
        future: Future[int] = Future()
        with self._lock:
            self._deferred.append(_Write(future, region, unit_ids, buffer, slots))
        return future

    def start_deferred(self) -> None:
        """Begin what is deferred; none of these futures may be waited for before."""
        with self._lock:
            deferred, self._deferred = self._deferred, []
        if deferred:
            self._pool.submit(self._write_all, deferred)

    def run(self, job: Callable[[], Done]) -> "Future[Done]":
        """Do something else on the same thread, in its turn."""
        self.start_deferred()
        return self._pool.submit(job)

    def wait(self) -> None:
        """Until all that was queued has ended; what failed comes up in its own `drain`."""
        self.run(lambda: None).result()

    def _write_all(self, deferred: "list[_Write]") -> None:
        for write in deferred:
            try:
                write.future.set_result(self._write(*write[1:]))
            except BaseException as error:
                write.future.set_exception(error)

    def _write(
        self,
        region: UnitRegion,
        unit_ids: NDArray[np.int64],
        buffer: AlignedBuffer,
        slots: NDArray[np.int64],
    ) -> int:
        start = time.perf_counter_ns()
        written = region.write(unit_ids, buffer, slots)
        if self._tracer is not None:
            now = time.perf_counter_ns()
            self._tracer.add("write", "disk write", start, now, units=len(unit_ids), bytes=written)
        return written

    def close(self) -> None:
        """Finish what is queued and stop the thread."""
        self._deferred = []  # they will not be read
        self._pool.shutdown(wait=True, cancel_futures=True)
