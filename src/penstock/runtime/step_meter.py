"""StepMeter: counts a cache's steps and their time."""

import time

from penstock.core.stats import PhaseStats, RunStats


class StepMeter:
    """Writes steps, tokens and seconds of prefill and decoding into a cache's statistics."""

    def __init__(self, stats: RunStats) -> None:
        self._stats = stats
        self._phase: PhaseStats | None = None
        self.started_s = 0.0
        """When the newest step began, on the clock of time.perf_counter."""
        self._left_s = 0.0

    def begin(self, tokens: int, *, decoding: bool) -> PhaseStats:
        """A step of so many tokens, all rows together, begins; the one before it is over."""
        follows = decoding or self._phase is self._stats.prefill
        self.end(time.perf_counter() if follows else None)
        self._phase = phase = self._stats.decode if decoding else self._stats.prefill
        phase.steps += 1
        phase.tokens += tokens
        self.started_s = time.perf_counter()
        return phase

    def leave(self) -> None:
        """The last layer is done."""
        self._left_s = time.perf_counter()

    def end(self, end_s: float | None = None) -> None:
        """Close the step under way, at `end_s` or when its last layer was done.

        A step that another follows lasts until that one begins, so that the model's own work
        between the last layer and the next first one counts; idle time between turns does not.
        """
        if self._phase is not None:
            self._phase.seconds += (end_s or self._left_s) - self.started_s
            self._phase = None

    def take_back(self, tokens: int) -> None:
        """The decode step under way has not happened."""
        self._phase = None
        self._stats.decode.steps -= 1
        self._stats.decode.tokens -= tokens
