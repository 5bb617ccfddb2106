"""close_all() and DeferredInterrupts: everything is run, and a Ctrl-C comes up behind it."""

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from penstock.core.closing import DeferredInterrupts, close_all


@pytest.fixture(autouse=True)
def python_handler() -> Iterator[None]:
    """A handler as Python sets it, wherever the tests run."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, former)


def _raising(error: BaseException, done: list[str]) -> Callable[[], None]:
    def step() -> None:
        done.append(type(error).__name__)
        raise error

    return step


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_every_step_runs_and_the_first_failure_is_told() -> None:
    done: list[str] = []
    steps = [_raising(OSError("first"), done), _raising(KeyboardInterrupt(), done)]
    with pytest.raises(OSError, match="first"):
        close_all(*steps, lambda: done.append("last"))
    assert done == ["OSError", "KeyboardInterrupt", "last"]


def test_an_interrupt_comes_up_behind_the_last_step() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        close_all(_interrupt, lambda: done.append(1), lambda: done.append(2))
    assert done == [1, 2]


def test_a_second_interrupt_leaves_a_step_that_hangs() -> None:
    done: list[str] = []

    def hangs() -> None:
        _interrupt()
        _interrupt()
        done.append("went on")

    with pytest.raises(KeyboardInterrupt):
        close_all(hangs, lambda: done.append("last"))
    assert done == ["last"]


def test_blocks_lie_within_each_other() -> None:
    done: list[str] = []

    def outer() -> None:
        with DeferredInterrupts():
            close_all(_interrupt, lambda: done.append("inner"))
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["inner", "outer"]


def test_a_failure_and_an_interrupt_together() -> None:
    with pytest.raises(KeyboardInterrupt) as told:
        close_all(_interrupt, _raising(OSError("beside"), []))
    assert isinstance(told.value.__context__, OSError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL], ids=["ignored", "system"])
def test_handlers_that_are_not_pythons_stay(handler: signal.Handlers) -> None:
    former = signal.signal(signal.SIGINT, handler)
    try:
        with DeferredInterrupts():
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_handler_that_a_step_sets_stays() -> None:
    own: Callable[..., None] = lambda *_: None  # noqa: E731
    with DeferredInterrupts():
        signal.signal(signal.SIGINT, own)
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_threads_close_as_ever() -> None:
    done: list[int] = []
    thread = threading.Thread(target=lambda: close_all(lambda: done.append(1)))
    thread.start()
    thread.join()
    assert done == [1]
