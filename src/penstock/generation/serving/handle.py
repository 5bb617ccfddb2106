"""Handle: a request under way, as its owner sees it: events, the end, and a way to cancel."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from penstock.generation.serving.events import Event, Failed, Finished

OnEvent: TypeAlias = Callable[[Event], None]


class Handle:
    """Events of one request, made by `Engine.submit`.

        for event in handle: ...        # waits for each, in any thread
        async for event in handle: ...  # in any event loop
        finished = handle.result()      # waits for the end

    Events stay until they are read; each is read once. Reading slowly holds up no one.
    """

    def __init__(self, cancel: Callable[[], None], on_event: OnEvent | None) -> None:
        """Begin without events."""
        self._cancel, self._on_event = cancel, on_event
        self._events: deque[Event] = deque()
        self._news = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._end: Finished | Failed | None = None

    def cancel(self) -> None:
        """Give the request up: its memory is free before the next step. `Finished` still comes.

        From any thread; does nothing behind the end.
        """
        self._cancel()

    @property
    def is_over(self) -> bool:
        """Whether its last event has been made."""
        return self._end is not None

    def result(self, timeout_s: float | None = None) -> Finished:
        """Wait for the end.

        Raises:
            TimeoutError: it did not come; the request goes on.
            PenstockError: what the request failed of, or whatever else its callbacks raised.
        """
        with self._news:
            if not self._news.wait_for(lambda: self.is_over, timeout_s):
                raise TimeoutError(f"the request is not over after {timeout_s} s")
        if isinstance(self._end, Failed):
            raise self._end.error
        assert self._end is not None
        return self._end

    def __iter__(self) -> "Handle":
        return self

    def __next__(self) -> Event:
        with self._news:
            self._news.wait_for(lambda: self._events or self.is_over)
            if not self._events:
                raise StopIteration
            return self._events.popleft()

    def __aiter__(self) -> "Handle":
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._news:
                if self._events:
                    return self._events.popleft()
                if self.is_over:
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                woken: asyncio.Future[None] = loop.create_future()
                self._waiting.append((loop, woken))
            await woken

    def _put(self, event: Event) -> None:
        """An event has happened."""
        with self._news:
            if self.is_over:
                return
            self._events.append(event)
            if isinstance(event, Finished | Failed):
                self._end = event
            waiting, self._waiting = self._waiting, []
            self._news.notify_all()
        for loop, woken in waiting:
            with suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(_wake, woken)
        if self._on_event is not None:
            self._on_event(event)


def _wake(woken: "asyncio.Future[None]") -> None:
    if not woken.done():  # its task may have been cancelled
        woken.set_result(None)
