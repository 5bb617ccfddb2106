"""StepMeter: counts a cache's steps and their time."""

import time

from penstock.core.stats import PhaseStats, RunStats
from penstock.core.trace import Tracer


class StepMeter:
    """Writes steps, tokens and seconds of prefill and decoding into a cache's statistics."""

    def __init__(self, stats: RunStats, tracer: Tracer | None) -> None:
        self._stats = stats
        self._tracer = tracer
        self._phase: PhaseStats | None = None
        self._started_s = 0.0
        self._left_s = 0.0

    def begin(self, tokens: int, *, decoding: bool, verifying: bool = False) -> PhaseStats:
        """A step of so many tokens, all rows together, begins; the one before it is over."""
        follows = decoding or verifying or self._phase is self._stats.prefill
        self.end(time.perf_counter() if follows else None)
        phase = self._stats.decode if decoding else self._stats.prefill
        self._phase = phase = self._stats.verify if verifying else phase
        phase.steps += 1
        phase.tokens += tokens
        self._started_s = self._left_s = time.perf_counter()  # one that fails is never left
        return phase

    def leave(self, count: int) -> None:
        """The last layer is done with a step of `count` tokens a row."""
        self._left_s = time.perf_counter()
        if self._tracer is not None:
            start, end = int(self._started_s * 1e9), int(self._left_s * 1e9)
            self._tracer.add("step", "compute", start, end, tokens=count)

    def end(self, end_s: float | None = None) -> None:
        """Close the step under way, at `end_s` or when its last layer was done.

        A step that another follows lasts until that one begins, so that the model's own work
        between the last layer and the next first one counts; idle time between turns does not.
        """
        if self._phase is not None:
            self._phase.seconds += (end_s or self._left_s) - self._started_s
            self._phase = None

    def take_back(self, tokens: int) -> None:
        """The decode step under way, if there is one, has not happened."""
        if self._phase is None:
            return
        self._phase = None
        self._stats.decode.steps -= 1
        self._stats.decode.tokens -= tokens
