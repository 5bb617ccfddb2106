"""Progress of a benchmark on stderr: how much is done, how long it took, how long is left."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

_SAY_EVERY_S = 2.0


class Progress:
    """Counts pieces of work of about the same cost and says when the rest will be done.

    Work that is skipped (done in an earlier run, refused) counts as done but not for the pace.
    """

    def __init__(
        self, total: int, *, stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._total = total
        self._done = self._worked = 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began = clock()
        self._said = 0.0

    @property
    def done(self) -> int:
        """Work that is done or was skipped."""
        return self._done

    def step(self, count: int) -> None:
        """Work was done."""
        self._done += count
        self._worked += count

    def skip(self, count: int) -> None:
        """Work need not be done."""
        self._done += count

    def add(self, what: str, count: int) -> None:
        """Work was done; a line every two seconds at most says so."""
        self.step(count)
        if self._clock() - self._said > _SAY_EVERY_S:
            self.say(what)

    def up_to(self, what: str) -> Callable[[int], None]:
        """A function that takes how much of some work is done in all."""
        before = 0

        def reach(done: int) -> None:
            nonlocal before
            self.add(what, done - before)
            before = done

        return reach

    def say(self, what: str) -> None:
        """Print a line: share done, time taken, time left, and what is going on."""
        self._said = self._clock()
        spent_s = self._said - self._began
        left = "?"
        if self._worked:
            left = _clock_time(spent_s / self._worked * (self._total - self._done))
        share = self._done / self._total if self._total else 1.0
        line = f"{share:4.0%}  {_clock_time(spent_s)} gone, {left} left  {what}"
        print(line, file=self._stream, flush=True)


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
