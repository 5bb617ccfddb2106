"""Replica: a server's application in a process of its own, asked by calls instead of a socket."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Literal
from uuid import uuid4

Message = MutableMapping[str, Any]
"""Of ASGI."""


class Replica:
    """One of several servers of the same model; Ray Serve makes it, watches it and restarts it."""

    def __init__(self, open_app: Callable[[], AbstractContextManager[Any]]) -> None:
        """Load the model.

        Args:
            open_app: gives the application of `make_app`, and closes what is behind it.
        """
        self._closing = ExitStack()
        self._app = self._closing.enter_context(open_app())
        self._life = uuid4().hex
        self._running: set[asyncio.Task[None]] = set()

    def check_health(self) -> None:
        """Raise where the engine has failed, so that Serve starts another replica."""
        if (error := self._app.state.backend.error) is not None:
            raise RuntimeError("the engine failed") from error

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """As `Meters.samples`."""
        found: Iterator[tuple[str, dict[str, str], float]]
        found = self._app.state.backend.meters.samples()
        return found

    async def life(self) -> str:
        """Its own name, which no later replica of its rank has."""
        return self._life

    async def ask(self, scope: Message, body: bytes) -> AsyncIterator[Message | None]:
        """Answer a request.

        Yields:
            None as soon as the request is here, then the messages of the answer.
        """
        yield None
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            # The application has answered an error, and logged it, before it raises it again.
            with suppress(Exception):
                await self._app(scope, receive, messages.put)
            await messages.put(None)

        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            gone.set()

    async def let_go(self, name: str, salt: str) -> Literal["free", "given up", "asked"]:
        """As `Shelf.let_go`."""
        shelf = self._app.state.backend.shelf
        if shelf is None:
            return "free"
        said: Literal["free", "given up", "asked"]
        said = await asyncio.to_thread(shelf.let_go, name, salt)
        return said

    def close(self) -> None:
        """Close the engine, behind what it still stores."""
        self._closing.close()

    def __del__(self) -> None:
        """Serve's way to end a replica."""
        self.close()
