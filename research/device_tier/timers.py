"""Timing on a device: steps, kernels with and without a graph, and the plain twins."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from penstock.engine.device_tier import device_layer
from penstock.kernels.device import available
from penstock.models import fused_step

# How long decode steps take, on a GPU by its own clock --------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Steps that ran one after another."""

    steps_ms: list[float]
    """Each step, from the end of the one before; on a GPU between events on its stream."""
    wall_s: float
    """All of them by the host's clock, the device waited for at both ends of a group."""

    def figures(self, batch: int) -> dict[str, Any]:
        """For result files. The mean is what an answer takes: steps that retrieve are rare but
        slow, and a median does not see them."""
        mean = 1e3 * self.wall_s / len(self.steps_ms)
        low, middle, high = np.percentile(self.steps_ms, [10, 50, 90])
        return {
            "steps": len(self.steps_ms), "mean_ms": mean, "median_ms": float(middle),
            "p10_ms": float(low), "p90_ms": float(high), "max_ms": max(self.steps_ms),
            "device_mean_ms": float(np.mean(self.steps_ms)), "tokens_per_s": 1e3 * batch / mean,
        }  # fmt: skip


def time_steps(
    step: Callable[[], None], count: int, device: torch.device, *, group: int, most_s: float
) -> StepTimes:
    """Run `count` steps in groups; fewer when `most_s` is up after a group.

    Args:
        group: steps between two waits for the device.
    """
    steps_ms: list[float] = []
    wall_s = 0.0
    while len(steps_ms) < count and (not steps_ms or wall_s < most_s):
        size = min(group, count - len(steps_ms))
        times, taken = (_cuda_group if device.type == "cuda" else _host_group)(step, size)
        steps_ms += times
        wall_s += taken
    return StepTimes(steps_ms=steps_ms, wall_s=wall_s)


def _cuda_group(step: Callable[[], None], size: int) -> tuple[list[float], float]:
    events = [new_event() for _ in range(size + 1)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    taken = time.perf_counter() - began
    pairs = pairwise(events)
    return [first.elapsed_time(second) for first, second in pairs], taken


def _host_group(step: Callable[[], None], size: int) -> tuple[list[float], float]:
    marks = [time.perf_counter()]
    for _ in range(size):
        step()
        marks.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in pairwise(marks)], marks[-1] - marks[0]


def new_event() -> Any:
    """A CUDA event that tells the time."""
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


# The device's time of small launches, without Python's in between ---------------------------------

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


# Other forms of the device tier's work for a while, for ablations ---------------------------------


@contextmanager
def without_triton() -> Iterator[None]:
    """Let every kernel run as its plain torch twin inside, as if Triton were not installed."""
    found = available._has_triton
    vars(available)["_has_triton"] = lambda: False
    try:
        yield
    finally:
        vars(available)["_has_triton"] = found


@contextmanager
def as_flagged(flags: Collection[str]) -> Iterator[None]:
    """As a method's flags say (`Method.flags`); what is none of a kernel's is left out."""
    layer, step = vars(device_layer), vars(fused_step)
    found = layer["STAYING_GATHER"], layer["on_link"], step["ENABLED"]
    if "filling" in flags:
        layer["STAYING_GATHER"] = False
    if "inline" in flags:
        layer["on_link"] = nullcontext
    if "parts" in flags:
        step["ENABLED"] = False
    try:
        if "torch" in flags:
            with without_triton():
                yield
        else:
            yield
    finally:
        layer["STAYING_GATHER"], layer["on_link"], step["ENABLED"] = found
