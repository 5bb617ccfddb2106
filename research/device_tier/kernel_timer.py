"""time_calls(): the device's time of small launches, without Python's in between."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from research.device_tier.step_timer import new_event

Call = Callable[[], object]
FEWEST, MOST = 3, 40
"""Repetitions of a measurement."""


@dataclass(frozen=True, slots=True)
class CallTime:
    """How long one call takes."""

    seconds: float
    """Median."""
    how: Literal["graph", "launched", "host"]
    """Replayed from a CUDA graph, launched one by one (gaps count), or by the host's clock."""


def time_calls(
    calls: Sequence[Call], device: torch.device, *, most_s: float = 0.12, graph: bool = True,
) -> CallTime:  # fmt: skip
    """Run all calls one after another, several times; the time of one of them.

    Args:
        calls: the same work on different memory, so that caches do not hold it.
        most_s: repetitions end when this much time has passed, but not before `FEWEST`.
        graph: false for what cannot be recorded.
    """
    if device.type != "cuda":
        for call in calls:
            call()
        return CallTime(_median(calls, most_s, lambda: _host_time(calls)), "host")
    _run(calls)
    torch.cuda.synchronize()
    recorded = _record(calls) if graph else None
    if recorded is not None:
        recorded.replay()
        play = recorded.replay
        return CallTime(_median(calls, most_s, lambda: _device_time(play)), "graph")
    return CallTime(_median(calls, most_s, lambda: _device_time(lambda: _run(calls))), "launched")


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _record(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _run(calls)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _median(calls: Sequence[Call], most_s: float, once: Callable[[], float]) -> float:
    began = time.perf_counter()
    times: list[float] = []
    while len(times) < MOST:
        times.append(once() / len(calls))
        if len(times) >= FEWEST and time.perf_counter() - began > most_s:
            break
    return float(np.median(times))


def _host_time(calls: Sequence[Call]) -> float:
    began = time.perf_counter()
    _run(calls)
    return time.perf_counter() - began


def _device_time(play: Callable[[], None]) -> float:
    first, last = new_event(), new_event()
    first.record()
    play()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3
