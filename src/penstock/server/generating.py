"""Generation: requests to the engine on behalf of one HTTP request, and their events."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from fastapi import Request as HttpRequest

from penstock.core.errors import CacheStateError
from penstock.generation.serving.events import Event, Failed, Finished, Prefill, Token
from penstock.generation.serving.handle import Handle
from penstock.server.asking import Asked
from penstock.server.backend import Backend
from penstock.server.errors import ApiError

_LOOK_S = 0.5
"""How often a client that waits for a whole answer is looked after."""


class ClientGoneError(Exception):
    """The client has closed the connection; no one reads an answer."""


class News(NamedTuple):
    """An event of one of the requests."""

    number: int
    event: Event


class Generation:
    """Requests that were submitted together, cancelled together when their client goes.

    A context manager: what is not over when it is left is cancelled.
    """

    def __init__(self, backend: Backend, handles: Sequence[Handle]) -> None:
        """Take over handles; use `begin`."""
        self._backend, self._handles = backend, handles
        self._began_s = time.monotonic()
        self._token_s: dict[int, float] = {}
        self.finished: dict[int, Finished] = {}
        """By the number of the request."""
        self.progress: dict[int, Prefill] = {}
        """The newest of each request."""

    @classmethod
    async def begin(cls, backend: Backend, asked: Sequence[Asked]) -> "Generation":
        """Submit requests; prompts are encoded in a thread.

        Raises:
            QueueFullError: one finds no place; none is asked then.
            As for `Engine.submit`.
        """

        def submit() -> list[Handle]:
            handles: list[Handle] = []
            try:
                handles.extend(_submit(backend, each) for each in asked)
            except BaseException:
                for handle in handles:
                    handle.cancel()
                for each in asked[len(handles) :]:
                    each.release()
                raise
            return handles

        return cls(backend, await asyncio.to_thread(submit))

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Give up what is not over."""
        for handle in self._handles:
            if not handle.is_over:
                handle.cancel()

    async def events(self, tick_s: float) -> AsyncGenerator[News | None]:
        """Events of all requests as they come, to the end of the last one.

        Yields:
            None where nothing has come for `tick_s`.

        Raises:
            ApiError: the time of the request is over.
            PenstockError: what one of them failed of.
        """
        waiting = {
            asyncio.ensure_future(anext(handle)): number
            for number, handle in enumerate(self._handles)
        }
        until_s = self._began_s + self._backend.settings.max_request_s
        try:
            while waiting:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    self.cancel()
                    raise ApiError(504, "the answer took longer than a request may take here")
                done, _ = await asyncio.wait(
                    waiting, timeout=min(tick_s, left_s), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield None
                for task in sorted(done, key=waiting.__getitem__):
                    number = waiting.pop(task)
                    event = task.result()
                    if not isinstance(event, Finished | Failed):
                        waiting[asyncio.ensure_future(anext(self._handles[number]))] = number
                    self._take(number, event)
                    yield News(number, event)
        finally:
            for task in waiting:
                task.cancel()

    async def whole(self, http: HttpRequest) -> list[Finished]:
        """The answers when all are over, in the order of the requests.

        Raises:
            ClientGoneError: the client has gone; the requests are cancelled.
            As for `events`.
        """
        looked_s = time.monotonic()
        async with aclosing(self.events(_LOOK_S)) as events:
            async for _ in events:
                if time.monotonic() - looked_s > _LOOK_S:
                    looked_s = time.monotonic()
                    if await http.is_disconnected():
                        self.cancel()
                        raise ClientGoneError
        return [self.finished[number] for number in range(len(self._handles))]

    def _take(self, number: int, event: Event) -> None:
        match event:
            case Failed():
                raise event.error
            case Finished():
                self.finished[number] = event
                self._backend.meters.finished(event)
                if event.reason == "abort" and self._backend.is_closing:
                    raise CacheStateError("the engine is closed")
            case Prefill():
                self.progress[number] = event
            case Token():
                now = time.monotonic()
                before = self._token_s.get(number)
                self._token_s[number] = now
                if before is not None:
                    self._backend.meters.between_tokens(now - before)


def _submit(backend: Backend, asked: Asked) -> Handle:
    """Submit a request, whose document is let go with its last event."""

    def on_event(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            asked.release()

    return backend.engine.submit(asked.request, on_event)
