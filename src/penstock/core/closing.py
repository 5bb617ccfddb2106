"""Closing several things at once: all of them, whatever some raise, and past a Ctrl-C."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


def close_all(*steps: Callable[[], object]) -> None:
    """Run every step, in order, also behind one that raises; a Ctrl-C waits for the end.

    Raises:
        BaseException: the first that a step raised, when all have run.
    """
    failure: BaseException | None = None
    with DeferredInterrupts():
        for step in steps:
            try:
                step()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure


class DeferredInterrupts:
    """A block that a Ctrl-C does not cut in two: the first one comes up behind it.

    A second one is heard at once, so that a step that hangs can be left. Other threads than the
    main one are never interrupted.
    """

    def __init__(self) -> None:
        self._former: Any = None
        self._is_pending = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        former = signal.getsignal(signal.SIGINT)
        if not callable(former):  # ignored, the system's own, or not set by Python
            return
        self._former = former
        try:
            signal.signal(signal.SIGINT, self._hold)
        except ValueError:  # the main thread of an interpreter within another one
            self._former = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        former, self._former = self._former, None
        if former is None:
            return
        if signal.getsignal(signal.SIGINT) == self._hold:
            signal.signal(signal.SIGINT, former)
        if self._is_pending:
            signal.raise_signal(signal.SIGINT)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending and self._former is not None:
            self._former(number, frame)
        self._is_pending = True
