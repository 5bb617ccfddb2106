"""Processes that make batches ahead of the training, in the order of their numbers."""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from penstock.core.errors import PenstockError
from training.data import Batch, RowMaker
from training.prose_data import ProseRowMaker
from training.prose_settings import ProseSettings
from training.run_settings import AnySettings
from training.video_data import VideoRowMaker
from training.video_settings import VideoSettings

_AHEAD = 4
_SET_PIPE_SIZE = 1031  # Linux's F_SETPIPE_SZ
_PIPE_BYTES = 1 << 20  # a whole batch; 64 KiB by default, each of which has to be waited for
_NICE = 5


Source = Mapping[str, int] | Path
"""What rows are made from: a vocabulary, or the folder of a prepared corpus."""


class BatchMaker(Protocol):
    """Makes micro-batches by number."""

    def batch(self, number: int) -> Batch:
        """Micro-batch `number` of the run, from 0; the same one every time."""
        ...


def batch_maker(settings: AnySettings, source: Source) -> BatchMaker:
    """The one that a run's settings ask for.

    Raises:
        ConfigError: the mix names a task that does not exist, or the source does not do.
    """
    if isinstance(settings, ProseSettings):
        assert isinstance(source, Path)
        return ProseRowMaker(settings, source)
    assert not isinstance(source, Path)
    if isinstance(settings, VideoSettings):
        return VideoRowMaker(settings, source)
    return RowMaker(settings, source)


class WorkerError(PenstockError):
    """A process that makes batches failed or died."""


class BatchStream:
    """Micro-batches `first` to `last - 1`, made by `workers` processes or, with none, here.

    How many processes there are changes nothing in the batches. Worker w makes every
    `workers`-th one and waits when `_AHEAD` of its batches have not been taken.
    """

    def __init__(
        self, settings: AnySettings, source: Source, *, first: int, last: int,
        workers: int,
    ) -> None:  # fmt: skip
        self._numbers = range(first, last)
        self._here = batch_maker(settings, source)  # refuses a bad mix before anything is started
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for worker in range(min(workers, len(self._numbers))):
            taken, given = context.Pipe(duplex=False)
            _widen(given)
            process = context.Process(
                target=_produce, args=(settings, source, self._numbers[worker::workers], given),
                daemon=True,
            )  # fmt: skip
            process.start()
            given.close()  # only the process has it now: when it dies the pipe ends
            self._pipes.append(taken)
            self._processes.append(process)

    def __iter__(self) -> Iterator[Batch]:
        """The batches in order.

        Raises:
            WorkerError: a process failed.
        """
        for at, number in enumerate(self._numbers):
            if not self._pipes:
                yield self._here.batch(number)
            else:
                yield self._take(at % len(self._pipes))

    def _take(self, worker: int) -> Batch:
        try:
            made: Any = self._pipes[worker].recv()
        except (EOFError, OSError):
            raise WorkerError(
                f"process {worker} that makes batches died; is memory short?"
            ) from None
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
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def _widen(pipe: Connection) -> None:
    """Let a pipe hold a whole batch, where the system can do that."""
    with contextlib.suppress(ImportError, OSError):
        from fcntl import fcntl

        fcntl(pipe.fileno(), _SET_PIPE_SIZE, _PIPE_BYTES)


def _produce(settings: AnySettings, source: Source, numbers: range, given: Connection) -> None:
    """Make batches until all are made or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    if hasattr(os, "nice"):
        os.nice(_NICE)  # the training itself waits for one core above all
    made: queue.Queue[Any] = queue.Queue(_AHEAD)
    sender = threading.Thread(target=_send, args=(made, given), daemon=True)
    sender.start()
    try:
        maker = batch_maker(settings, source)
        for number in numbers:
            made.put(ForkingPickler.dumps(maker.batch(number)))
    except Exception:
        made.put(ForkingPickler.dumps(traceback.format_exc()))
    made.put(None)
    sender.join()


def _send(made: "queue.Queue[Any]", given: Connection) -> None:
    """Hand over what is made; without a reader the process ends."""
    try:
        while (content := made.get()) is not None:
            given.send_bytes(content)
        given.close()
    except OSError:
        os._exit(1)
