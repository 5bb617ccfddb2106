"""Throttle: the clock that makes fast storage take the time that a profile says."""

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock.devices.profile import DeviceProfile

_CREDIT_S = 60e-6
"""How far back an idle device may start: the time between a wait and the next submission."""
_SPIN_S = 100e-6
"""The end of a wait is spent looking at the clock, because sleeps end late by about this much."""


class Throttle:
    """A device that serves one request after another, as a clock; shared by the files on it.

    The device is busy until some moment. A batch starts there (or now, when that is past), keeps it
    busy for the profile's time, and is answered one latency later. A wait lasts until then, or
    until the real storage has answered if that takes longer.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start an idle device.

        Args:
            clock: the time in seconds.
            sleep: let that many seconds pass.
        """
        self.profile = profile
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def start_read(self, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> float:
        """Queue a batch of reads, both int64 [num_reads]; returns the time of its answer."""
        return self._start(self.profile.read_time_s(offsets, lengths))

    def start_write(self, offset: int, num_bytes: int) -> float:
        """Queue one write; returns the time of its answer."""
        return self._start(self.profile.write_time_s(offset, num_bytes))

    def is_due(self, answer_at: float) -> bool:
        """Whether the time of an answer has come."""
        return self._clock() >= answer_at

    def hold_until(self, answer_at: float) -> None:
        """Let time pass until an answer is due."""
        while (left := answer_at - self._clock()) > 0:
            self._sleep(left - _SPIN_S if left > _SPIN_S else 0.0)

    def _start(self, busy_s: float) -> float:
        with self._lock:
            self._free_at = max(self._clock() - _CREDIT_S, self._free_at) + busy_s
            return self._free_at + self.profile.latency_s
