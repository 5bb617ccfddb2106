"""Front: takes the requests of several replicas, and passes each to the one that has its KV.

A router of Serve sees no body, where the document and the conversation are named; the front does.
It keeps an application of one Serve replica for each rank, so that Serve starts, health-checks and
restarts every replica, and the front alone decides which one is asked.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import parse_qs, unquote

from penstock.cluster.affinity import Ring, Route, route
from penstock.cluster.replica import Message
from penstock.cluster.request_key import DOCUMENTS, request_key
from penstock.cluster.scaling import Scaler
from penstock.core.errors import ConfigError, PenstockError
from penstock.server.errors import ANTHROPIC, LOG, ApiError
from penstock.server.meters import of_replicas
from penstock.server.sse import frame

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_LOOK_S = 0.25
_KEPT = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
         "headers", "client", "server")  # fmt: skip
"""Of a request's scope: what goes to a replica."""


class ReplicaLostError(PenstockError):
    """A replica ended, or cannot be reached."""


class Link(Protocol):
    """The way to a replica; each call raises `ReplicaLostError`."""

    def ask(self, scope: Message, body: bytes) -> AsyncIterator[Message | None]:
        """As `Replica.ask`."""

    async def let_go(self, name: str, salt: str) -> Literal["free", "given up", "asked"]:
        """As `Replica.let_go`."""

    async def life(self) -> str:
        """As `Replica.life`."""

    def restart(self) -> None:
        """Let it end in order, if it runs, and return when another one answers in its place."""

    def stop(self) -> None:
        """Let it end in order."""


@dataclass
class _State:
    link: Link
    is_wanted: bool
    """False: it is stopped until the load wants it."""
    load: int = 0
    is_up: bool = True
    is_leaving: bool = False
    requests: int = 0
    spilled: int = 0
    """Requests that it took for another one."""
    lost: int = 0
    """Answers that ended with it."""


class _Unreached(Exception):
    """The replica did not begin, so another one may."""


class Front:
    """An ASGI application over replicas."""

    def __init__(
        self, links: Mapping[str, Link], *, together: int, running: int | None = None,
        at_random: bool = False, patience_s: float = 60.0,
    ) -> None:  # fmt: skip
        """Begin with the first `running` of them up; None: with all.

        Args:
            together: requests that a replica runs together; below that none spills over.
            at_random: each request goes anywhere, to compare with.
            patience_s: how long a request waits where no replica can take it.

        Raises:
            ConfigError: there is no replica.
        """
        self.is_closing = False
        self._together, self._patience_s, self._at_random = together, patience_s, at_random
        running = len(links) if running is None else running
        self._states = {
            name: _State(link, is_wanted=rank < running)
            for rank, (name, link) in enumerate(links.items())
        }
        self._ring = Ring(self._wanted())
        self._tasks: set[asyncio.Task[None]] = set()
        self._rolling = threading.Lock()

    @property
    def error(self) -> BaseException | None:
        """None: what fails is a replica, and Serve starts another."""
        return None

    @property
    def count(self) -> int:
        """Replicas, up or down, that are not stopped."""
        return len(self._wanted())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path, method = scope["path"], scope["method"]
        is_document = path == DOCUMENTS or path.startswith(DOCUMENTS + "/")
        if path == "/health":
            await _answer(send, *self._health())
        elif path == "/metrics":
            await _answer(send, 200, await self._metrics(scope), b"text/plain; version=0.0.4")
        elif is_document and method == "GET":
            await _answer(send, *await self._documents(scope))
        else:
            body = await _body(receive)
            if is_document and method == "DELETE" and await self._let_go(scope):
                name = unquote(path[len(DOCUMENTS) + 1 :])
                said = {"object": "document.deleted", "id": name, "deleted": True}
                await _answer(send, 200, json.dumps(said).encode())
                return
            await self._pass_on(scope, body, receive, send, stays=is_document)

    # Which replica ----------------------------------------------------------------------------

    def _wanted(self) -> dict[str, _State]:
        return {name: each for name, each in self._states.items() if each.is_wanted}

    def _up(self) -> dict[str, _State]:
        return {name: each for name, each in self._wanted().items() if each.is_up}

    def _able(self) -> dict[str, int]:
        """Loads of the replicas that take requests."""
        return {name: each.load for name, each in self._up().items() if not each.is_leaving}

    async def _choose(self, key: str | None, stays: bool) -> Route:
        end_s = time.monotonic() + self._patience_s
        while not (able := self._able()) and not self.is_closing and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_S)  # one is being restarted
        if not able or self.is_closing:
            what = "the server is shutting down" if self.is_closing else "no replica is running"
            raise ApiError(503, f"{what}; try again later", headers={"Retry-After": "5"})
        if self._at_random:
            drawn = random.choice(list(able))
            return Route(drawn, drawn)
        if key is None:
            least = min(able, key=lambda name: able[name])
            return Route(least, least)
        walk = self._ring.walk(key)
        rest = [name for name in walk if name in able]
        # A document is added by one replica, which alone can say how far it is.
        chosen = rest[0] if stays else route(rest, able, least=self._together).replica
        return Route(chosen, walk[0])

    async def _pass_on(
        self, scope: Message, body: bytes, receive: Receive, send: Send, *, stays: bool
    ) -> None:
        key = request_key(scope["path"], scope["query_string"].decode("latin-1"), body)
        for _ in range(2 * len(self._states)):
            chosen = await self._choose(key, stays)
            relay = asyncio.create_task(self._relay(chosen, scope, body, send))
            gone = asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait((relay, gone), return_when=asyncio.FIRST_COMPLETED)
                if not relay.done():
                    return  # the client is gone
                await relay
                return
            except _Unreached:
                continue  # it takes no requests until it is back
            finally:
                for task in (relay, gone):
                    task.cancel()
                await asyncio.gather(relay, gone, return_exceptions=True)
        raise ApiError(503, "no replica can be reached", headers={"Retry-After": "5"})

    async def _relay(self, chosen: Route, scope: Message, body: bytes, send: Send) -> None:
        state, headers = self._states[chosen.replica], None
        state.load += 1
        is_here = False
        try:
            async with aclosing(self._messages(chosen.replica, scope, body)) as messages:
                async for message in messages:
                    if message is None:
                        is_here = True
                        state.requests += 1
                        state.spilled += chosen.is_spill
                        continue
                    if message["type"] == "http.response.start":
                        headers = [*message["headers"], *_said(chosen)]
                        message = {**message, "headers": headers}
                    await send(message)
        except ReplicaLostError:
            if not is_here:
                raise _Unreached from None
            state.lost += 1
            error = ApiError(
                503, f"replica {chosen.replica} ended while it answered; ask again",
                code="replica_lost", headers={"Retry-After": "1"},
            )  # fmt: skip
            if headers is None:
                raise error from None
            if not _is_stream(headers):
                raise
            is_anthropic = scope["path"].startswith(ANTHROPIC)
            last = frame(error.body(anthropic=is_anthropic), "error" if is_anthropic else None)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            state.load -= 1

    async def _messages(
        self, name: str, scope: Message, body: bytes
    ) -> AsyncGenerator[Message | None, None]:
        """What a replica sends; one that is lost is asked no more until it is there again."""
        state = self._states[name]
        kept = {each: scope[each] for each in _KEPT if each in scope}
        try:
            async for message in state.link.ask(kept, body):
                yield message
        except ReplicaLostError as error:
            if state.is_up:
                state.is_up = False
                LOG.warning("replica %s is lost: %s", name, error)
                task = asyncio.create_task(self._await_return(name))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            raise

    async def _await_return(self, name: str) -> None:
        state = self._states[name]
        while state.is_wanted and not state.is_up:
            await asyncio.sleep(_LOOK_S)
            try:
                await state.link.life()
            except ReplicaLostError:
                continue
            state.is_up = True
            LOG.warning("replica %s is back", name)

    # What concerns all ------------------------------------------------------------------------

    def _health(self) -> tuple[int, bytes]:
        said = {
            name: "leaving" if each.is_leaving else "up" if each.is_up else "down"
            for name, each in self._wanted().items()
        }
        if self.is_closing or not self._up():
            error = ApiError(503, "the server is shutting down, or no replica is running")
            return 503, json.dumps({**error.body(), "replicas": said}).encode()
        return 200, json.dumps({"status": "ok", "replicas": said}).encode()

    async def _whole(self, name: str, scope: Message) -> tuple[int, bytes] | None:
        """The answer of one replica to a request without a body; None: it is lost."""
        status, body = 500, b""
        try:
            async for message in self._messages(name, scope, b""):
                if message is not None:
                    status = message.get("status", status)
                    body += message.get("body", b"")
        except ReplicaLostError:
            return None
        return status, body

    async def _all(self, scope: Message) -> dict[str, tuple[int, bytes]]:
        names = list(self._up())
        found = await asyncio.gather(*(self._whole(name, scope) for name in names))
        answers = {name: each for name, each in zip(names, found, strict=True) if each is not None}
        if not answers:
            raise ApiError(503, "no replica is running", headers={"Retry-After": "5"})
        return answers

    async def _metrics(self, scope: Message) -> bytes:
        states, up = self._states, self._up()
        counts: dict[str, Mapping[str, float]] = {
            "penstock:replica_up": {name: name in up for name in states},
            "penstock:replica_open_requests": {name: each.load for name, each in states.items()},
            "penstock:replica_requests": {name: each.requests for name, each in states.items()},
            "penstock:replica_spilled": {name: each.spilled for name, each in states.items()},
            "penstock:replica_lost_answers": {name: each.lost for name, each in states.items()},
        }
        answers = await self._all(scope)
        return await asyncio.to_thread(
            of_replicas, {name: text for name, (_, text) in answers.items()}, counts
        )

    async def _documents(self, scope: Message) -> tuple[int, bytes]:
        """The shared folder as any replica sees it; what one is reading, as that one tells it."""
        answers = list((await self._all(scope)).values())
        good = [json.loads(body) for status, body in answers if status == 200]
        if not good:
            return answers[0]
        if "data" not in good[0]:
            return 200, json.dumps(max(good, key=_is_read_there)).encode()
        merged: dict[str, Any] = {}
        for each in (entry for said in good for entry in said["data"]):
            if each["id"] not in merged or _is_read_there(each):
                merged[each["id"]] = each
        return 200, json.dumps({**good[0], "data": list(merged.values())}).encode()

    async def _let_go(self, scope: Message) -> bool:
        """Every replica closes a document that is to be deleted.

        Returns:
            Whether one of them was still reading it, and gave that up.

        Raises:
            ApiError: one is asking it.
        """
        name = unquote(scope["path"][len(DOCUMENTS) + 1 :])
        salt = "".join(parse_qs(scope["query_string"].decode("latin-1")).get("cache_salt", []))
        found = await asyncio.gather(
            *(each.link.let_go(name, salt) for each in self._up().values()), return_exceptions=True
        )
        if "asked" in found:
            raise ApiError(409, f"the document {name!r} is being asked; try again later")
        return "given up" in found

    def roll(self, grace_s: float) -> None:
        """Restart one replica after another, from a thread; answers under way end first.

        Conversations are in their folder by then, so that the next replica goes on with them.

        Args:
            grace_s: how long the answers of a replica may take before it is restarted.

        Raises:
            ConfigError: a restart goes on already.
        """
        if not self._rolling.acquire(blocking=False):
            raise ConfigError("the replicas are being restarted already")
        try:
            for name, state in self._wanted().items():
                # One that is down, or just killed, must be back before another one leaves.
                while not all(each.is_up for each in self._wanted().values() if each is not state):
                    time.sleep(_LOOK_S)
                state.is_leaving = True
                _await_answers(state, grace_s)
                try:
                    state.link.restart()
                    state.is_up = True
                    LOG.warning("replica %s is restarted", name)
                except ReplicaLostError as error:
                    LOG.error("replica %s cannot be restarted: %s", name, error)
                finally:
                    state.is_leaving = False
        finally:
            self._rolling.release()

    def scale(self, scaler: Scaler, grace_s: float) -> None:
        """Start and stop replicas as the open requests want it, from a thread, until the end.

        Args:
            grace_s: as for `roll`, of a replica that is stopped.
        """
        while not self.is_closing:
            time.sleep(_LOOK_S)
            running = self._wanted()
            load = sum(each.load for each in running.values())
            number = scaler.wanted(len(running), load, time.monotonic())
            if number == len(running) or not self._rolling.acquire(blocking=False):
                continue
            try:
                if number > len(running):
                    self._start(next(each for each in self._states if each not in running))
                else:
                    self._stop(list(running)[-1], grace_s)
            except ReplicaLostError as error:
                LOG.error("the number of replicas stays %d: %s", len(running), error)
            finally:
                self._rolling.release()

    def _start(self, name: str) -> None:
        state = self._states[name]
        state.link.restart()
        state.is_up = state.is_wanted = True
        self._ring = Ring(self._wanted())
        LOG.warning("replica %s is started: the others were full", name)

    def _stop(self, name: str, grace_s: float) -> None:
        state = self._states[name]
        state.is_wanted = False
        self._ring = Ring(self._wanted())
        _await_answers(state, grace_s)
        state.link.stop()
        LOG.warning("replica %s is stopped: the others have room", name)


def _await_answers(state: _State, most_s: float) -> None:
    """Wait until a replica that takes no more requests has answered what it had."""
    end_s = time.monotonic() + most_s
    while state.load and time.monotonic() < end_s:
        time.sleep(_LOOK_S)


def _is_read_there(entry: Mapping[str, Any]) -> bool:
    return "progress" in entry


def _said(chosen: Route) -> list[tuple[bytes, bytes]]:
    said = [(b"x-penstock-replica", chosen.replica.encode())]
    return [*said, (b"x-penstock-spill", chosen.home.encode())] if chosen.is_spill else said


def _is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, status: int, body: bytes, kind: bytes = b"application/json") -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
