"""Workers: the jobs of the accuracy benchmark spread over processes that each have the model."""

import multiprocessing
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from penstock.core.errors import PenstockError
from penstock.core.parent_watch import end_with_parent
from penstock.evaluate.accuracy_cells import Cell
from penstock.evaluate.accuracy_jobs import Examination, Examiner, Job
from penstock.kernels.native import compiled

_LOOK_S = 2.0
"""How often to see whether the workers are alive."""
MOST_WORKERS = 8


def default_workers(device: str) -> int:
    """As many as the cores can feed: each drives its own decode loop, which is mostly Python."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    return max(1, min(MOST_WORKERS, cores if device == "cpu" else cores // 2))


def _untold(job: Job, text: str) -> None:
    """Takes no notice."""


def run_jobs(
    chains: Sequence[Sequence[Job]], examination: Examination, workers: int,
    take: Callable[[Job, Cell], None], done: Callable[[Job], None],
    going_on: Callable[[], bool] = lambda: True, tell: Callable[[Job, str], None] = _untold,
) -> None:  # fmt: skip
    """Do jobs in `workers` processes.

    Args:
        chains: jobs of one chain are done one after the other, so that a task's samples are
            answered in their order; chains run side by side, the first ones first.
        take: gets each cell as soon as it is there.
        done: told when a job has ended.
        going_on: asked before a job is begun; when it says no, what runs is finished.
        tell: gets what a job is doing before its first cell is there.

    Raises:
        PenstockError: a worker failed (with its message) or was killed.
    """
    context = multiprocessing.get_context("spawn")
    jobs, news = context.Queue(), context.Queue()
    threads = max(1, torch.get_num_threads() // workers)
    processes = [
        context.Process(
            target=_work,
            args=(examination, threads, compiled.limited_to(), jobs, news),
            daemon=True,
        )
        for _ in range(min(workers, len(chains)))
    ]
    waiting = [list(chain) for chain in chains if chain]
    running = 0
    try:
        for process in processes:
            process.start()
            if waiting:
                running += _send(waiting.pop(0), jobs, going_on)
        while running:
            kind, job, content, rest = _next(news, processes)
            if kind == "cell":
                take(job, content)
                continue
            if kind == "told":
                tell(job, content)
                continue
            if kind == "error":
                raise PenstockError(content)
            running -= 1
            done(job)
            if rest:
                waiting.insert(0, rest)
            while waiting and running < len(processes):
                running += _send(waiting.pop(0), jobs, going_on)
        for _ in processes:
            jobs.put(None)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join()


def _send(chain: list[Job], jobs: Any, going_on: Callable[[], bool]) -> int:
    if not going_on():
        return 0
    jobs.put(chain)
    return 1


def _next(news: Any, processes: Sequence[Any]) -> tuple[str, Job, Any, list[Job]]:
    while True:
        try:
            found: tuple[str, Job, Any, list[Job]] = news.get(timeout=_LOOK_S)
        except queue.Empty:
            dead = [p.exitcode for p in processes if not p.is_alive()]
            if dead:
                raise PenstockError(
                    f"a worker ended with code {dead[0]} (killed for memory?); go on with "
                    "--resume and fewer --workers"
                ) from None
        else:
            return found


def _work(examination: Examination, threads: int, kernels: str, jobs: Any, news: Any) -> None:
    """A worker's life: the first job of a chain, and word of the rest."""
    end_with_parent()
    try:
        torch.set_num_threads(threads)
        compiled.limit(kernels)
        examiner = Examiner(examination)
        for chain in iter(jobs.get, None):
            job = chain[0]
            for cell in examiner.do(job, partial(_put_word, news, job)):
                news.put(("cell", job, cell, []))
            news.put(("done", job, None, chain[1:]))
    except KeyboardInterrupt:
        return
    except Exception as error:  # told to the parent, which raises it
        news.put(("error", None, f"{type(error).__name__}: {error}", []))


def _put_word(news: Any, job: Job, text: str) -> None:
    news.put(("told", job, text, []))


def run_here(
    chains: Sequence[Sequence[Job]], examiner: Examiner, take: Callable[[Job, Cell], None],
    done: Callable[[Job], None], going_on: Callable[[], bool] = lambda: True,
    tell: Callable[[Job, str], None] = _untold,
) -> None:  # fmt: skip
    """The same in this process: the first job of every chain, then the second ones."""
    for job in _in_turn(chains):
        if not going_on():
            return
        for cell in examiner.do(job, partial(tell, job)):
            take(job, cell)
        done(job)


def _in_turn(chains: Sequence[Sequence[Job]]) -> Iterator[Job]:
    for number in range(max((len(chain) for chain in chains), default=0)):
        for chain in chains:
            if number < len(chain):
                yield chain[number]
