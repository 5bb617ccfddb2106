"""StallClock: how long a model waited for bytes, on the host or on a CUDA stream."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StallClock:
    """Sums the time between the work before a wait and the work behind it.

    On the host that is the time spent in the block; on a GPU, where a wait only queues one stream
    behind another, the time between two events of the computing stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that the waits inside the block take."""
        if not self._is_cuda:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - start
            return
        before, after = _timed_event(), _timed_event()
        before.record()
        yield
        after.record()
        self._events.append((before, after))

    def take(self) -> float:
        """Seconds since the last call; waits for the device."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1e3
        seconds, self._seconds, self._events = self._seconds, 0.0, []
        return seconds


def _timed_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
