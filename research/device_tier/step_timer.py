"""time_steps(): how long decode steps take, on a GPU by its own clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch


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
