"""Processes that make batches ahead of the training, in the order of their numbers."""

import multiprocessing
import queue
import signal
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from penstock.core.errors import PenstockError
from training.data import Batch, RowMaker
from training.prose_data import ProseRowMaker
from training.prose_settings import ProseSettings
from training.settings import Settings

_AHEAD = 4
_LOOK_S = 2.0


Source = Mapping[str, int] | Path
"""What rows are made from: the bundled vocabulary, or the folder of a prepared corpus."""


class BatchMaker(Protocol):
    """Makes micro-batches by number."""

    def batch(self, number: int) -> Batch:
        """Micro-batch `number` of the run, from 0; the same one every time."""
        ...


def batch_maker(settings: Settings | ProseSettings, source: Source) -> BatchMaker:
    """The one that a run's settings ask for.

    Raises:
        ConfigError: the mix names a task that does not exist, or the source does not do.
    """
    if isinstance(settings, ProseSettings):
        assert isinstance(source, Path)
        return ProseRowMaker(settings, source)
    assert not isinstance(source, Path)
    return RowMaker(settings, source)


class WorkerError(PenstockError):
    """A process that makes batches failed or died."""


class BatchStream:
    """Micro-batches `first` to `last - 1`, made by `workers` processes or, with none, here.

    How many processes there are changes nothing in the batches. Worker w makes every
    `workers`-th one and waits when `_AHEAD` of its batches have not been taken.
    """

    def __init__(
        self, settings: Settings | ProseSettings, source: Source, *, first: int, last: int,
        workers: int,
    ) -> None:  # fmt: skip
        self._numbers = range(first, last)
        self._here = batch_maker(settings, source)  # refuses a bad mix before anything is started
        self._queues: list[Any] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for worker in range(min(workers, len(self._numbers))):
            batches = context.Queue(_AHEAD)
            process = context.Process(
                target=_produce, args=(settings, source, self._numbers[worker::workers], batches),
                daemon=True,
            )  # fmt: skip
            process.start()
            self._queues.append(batches)
            self._processes.append(process)

    def __iter__(self) -> Iterator[Batch]:
        """The batches in order.

        Raises:
            WorkerError: a process failed.
        """
        for at, number in enumerate(self._numbers):
            if not self._queues:
                yield self._here.batch(number)
            else:
                yield self._take(at % len(self._queues))

    def _take(self, worker: int) -> Batch:
        while True:
            try:
                made = self._queues[worker].get(timeout=_LOOK_S)
            except queue.Empty:
                if not self._processes[worker].is_alive():
                    raise WorkerError(
                        f"process {worker} that makes batches died; is memory short?"
                    ) from None
                continue
            if isinstance(made, str):
                raise WorkerError(f"a process that makes batches failed:\n{made}")
            assert isinstance(made, Batch)
            return made

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for batches in self._queues:
            batches.cancel_join_thread()
            batches.close()
        self._queues, self._processes = [], []

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def _produce(
    settings: Settings | ProseSettings, source: Source, numbers: range, batches: Any
) -> None:
    """Make batches until all are made or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    try:
        maker = batch_maker(settings, source)
        for number in numbers:
            if not _put(maker.batch(number), batches):
                return
    except Exception:
        _put(traceback.format_exc(), batches)


def _put(made: Batch | str, batches: Any) -> bool:
    """Hand over a batch; False when nobody is there to take it."""
    parent = multiprocessing.parent_process()
    while parent is None or parent.is_alive():
        try:
            batches.put(made, timeout=_LOOK_S)
        except queue.Full:
            continue
        return True
    batches.cancel_join_thread()
    return False
