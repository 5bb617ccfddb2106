"""FileTier: blocks in a store on a disk, read straight into slots in host memory."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from penstock.core.closing import close_all
from penstock.core.errors import StoreFullError
from penstock.core.trace import Tracer
from penstock.engine.beams.slow_tier import Move, SlowTier
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.store import KVStore
from penstock.storage.unit_region import UnitRegion

Int64Array = NDArray[np.int64]


class MoveJob(Move):
    """A move on a thread."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    @override
    def wait(self) -> None:
        """Block until the thread is done with it."""
        self._future.result()


class MoveThread:
    """Does moves one after the other, in their order. After one has failed, nothing is moved any
    more: a block whose save failed must not be loaded."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-beams")
        self._tracer = tracer

    def submit(self, name: str, num_blocks: int, job: Callable[[], None]) -> MoveJob:
        """Queue a move; its error comes up where a caller waits for it, or in `check`."""

        def run() -> None:
            start = time.perf_counter_ns()
            self.check()
            try:
                job()
            except BaseException as error:
                self._failure = error
                raise
            if self._tracer is not None:
                end = time.perf_counter_ns()
                self._tracer.add(name, f"disk {name}", start, end, blocks=num_blocks)

        return MoveJob(self._pool.submit(run))

    def check(self) -> None:
        """Raise the error of the first move that failed, if one has."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Let the move under way end; those that wait are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class GrowingRegion:
    """The blocks of a region, with room on the disk for as many as there are, a quarter ahead."""

    def __init__(self, region: UnitRegion) -> None:
        self.region = region
        self._room = 0

    def write(self, blocks: Int64Array, buffer: AlignedBuffer, slots: Int64Array) -> None:
        """Write slots of a buffer as `blocks`, both int64 [num_blocks].

        Raises:
            StoreFullError: there is no room.
            StorageError: the write failed.
        """
        end = int(blocks.max(initial=-1)) + 1
        if end > self._room:
            try:
                self.region.reserve(end + end // 4)
                self._room = end + end // 4
            except StoreFullError:
                self.region.reserve(end)
                self._room = end
        self.region.write(blocks, buffer, slots)


class FileTier(SlowTier):
    """Fast memory is the host's; reads land in the slots themselves, writes come from them."""

    def __init__(
        self, location: str, num_slots: int, block_bytes: int, tracer: Tracer | None = None
    ) -> None:
        """Open the store and take the memory for the slots.

        Args:
            location: see `KVStore.create`.

        Raises:
            ConfigError: the location makes no sense.
            StorageError: the directory cannot be used.
        """
        self._store = KVStore.create(location, num_layers=1, unit_bytes=block_bytes)
        self._blocks = GrowingRegion(self._store.region(0))
        self._buffer = AlignedBuffer(num_slots, self._blocks.region.padded_bytes)
        self._thread = MoveThread(tracer)
        self.slots = self._buffer.tensor
        self.description = self._store.describe()
        self.simulated = self._store.simulated

    @override
    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> Move:
        """Read in the background; the moves before it have ended then."""
        region, buffer = self._blocks.region, self._buffer
        units, places = _array(blocks), _array(slots)
        return self._thread.submit(
            "load", len(units), lambda: region.submit_read(units, buffer, places).wait()
        )

    @override
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> Move:
        """Write from the slots in the background."""
        units, places = _array(blocks), _array(slots)
        return self._thread.submit(
            "save", len(units), lambda: self._blocks.write(units, self._buffer, places)
        )

    @override
    def give_back(self, slots: Sequence[int]) -> Move | None:
        """Give the memory of empty slots back to the system, behind the moves under way."""
        emptied = list(slots)
        return self._thread.submit(
            "give back", len(emptied), lambda: self._buffer.give_back(emptied)
        )

    @override
    def check(self) -> None:
        """Raise the error of a move that failed."""
        self._thread.check()

    @override
    def close(self) -> None:
        """Let the move under way end, and give file and thread back."""
        close_all(self._thread.close, self._store.close)


def _array(numbers: Sequence[int]) -> Int64Array:
    return np.array(numbers, dtype=np.int64)
