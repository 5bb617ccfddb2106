"""Rows that are measured at once, each on processor cores of its own."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.core.errors import ConfigError


@dataclass(frozen=True)
class Lane:
    """Where one process runs at a time.

    Attributes:
        number: from 0 on.
        cores: that it is kept on; empty: any.
    """

    number: int
    cores: tuple[int, ...] = ()


def parse_cores(text: str) -> list[int]:
    """The numbers in a list such as "8-11,16"."""
    found: list[int] = []
    for word in text.split(","):
        first, _, last = word.strip().partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def make_lanes(cores: Sequence[int], threads: int, parallel: int) -> list[Lane]:
    """At most `parallel` lanes with a core for each thread.

    Raises:
        ConfigError: there are fewer cores than one lane needs.
    """
    if not cores:
        return [Lane(number) for number in range(parallel)]
    if len(cores) < threads:
        raise ConfigError(f"--cores has {len(cores)}, and a process has {threads} threads")
    return [
        Lane(number, tuple(cores[number * threads : (number + 1) * threads]))
        for number in range(min(parallel, len(cores) // threads))
    ]


def run_in_lanes(lanes: Sequence[Lane], jobs: Sequence[Callable[[Lane], None]]) -> None:
    """Do all jobs, in their order, as lanes become free; the first that fails ends the rest."""
    free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    for lane in lanes:
        free.put(lane)

    def do(job: Callable[[Lane], None]) -> None:
        lane = free.get()
        try:
            job(lane)
        finally:
            free.put(lane)

    with ThreadPoolExecutor(len(lanes)) as pool:
        try:
            for done in [pool.submit(do, job) for job in jobs]:
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
