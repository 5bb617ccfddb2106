"""Processes that do jobs ahead of the reader of their results, in the order of the jobs."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from penstock.core.errors import PenstockError

_WORKERS_MOST = 14
_AHEAD = 6
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

_maker: list[Callable[[Any], Any]] = []
"""Of this process, if it is one of those that work ahead."""


class AheadError(PenstockError):
    """A process that works ahead could not be started, or died."""


def default_workers() -> int:
    """Processes for this machine: as many as there are cores less two, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_WORKERS_MOST, (cores or 2) - 2))


def do_ahead(
    build: Callable[..., Callable[[_Job], _Result]], given: tuple[Any, ...], jobs: Iterable[_Job],
    *, workers: int,
) -> Iterator[_Result]:  # fmt: skip
    """The results of jobs, in their order. How many processes there are changes nothing in them.

    Args:
        build: a function or class of a module; makes, once in each process, what does a job.
        given: its arguments.
        jobs: taken one by one, a few for each process before their results are asked for.
        workers: processes; 0: each job is done here, when its result is asked for.

    Raises:
        AheadError: a process could not be started, or died. What a job raises is raised here.
    """
    if workers < 1:
        yield from map(build(*given), jobs)
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin,
        initargs=(build, given),
    )  # fmt: skip
    waiting: deque[Future[_Result]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(_do, job))
            if len(waiting) >= workers * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise AheadError(
            "a process that works ahead could not be started, or died (is memory short?); "
            "--workers 0 does without them"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(build: Callable[..., Callable[[Any], Any]], given: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _maker.append(build(*given))


def _end_with_parent() -> None:
    """A parent that was killed cannot say that there is nothing more to do."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(job: Any) -> Any:
    return _maker[0](job)
