"""serve(): an application behind a socket, until a signal; check(): the same for a few requests."""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from penstock.core.errors import CacheStateError, ConfigError
from penstock.server.settings import ServerSettings

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CHECK_S = 600.0
ENDING = (signal.SIGINT, signal.SIGTERM, *filter(None, [getattr(signal, "SIGHUP", None)]))
"""Signals that end a server."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Args:
        port: 0: any that is free.

    Raises:
        ConfigError: there is no such address, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen at {host}, port {port}: {reason}") from error


def hosts_of(host: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Values of the Host header that are answered: on loopback, its own names alone."""
    if host not in LOOPBACK:
        return allowed or ("*",)
    return ("localhost", "127.0.0.1", "[::1]", *allowed)


class Served(Protocol):
    """What an application has as `state.backend`."""

    is_closing: bool
    """Set where no new requests are to be taken."""

    @property
    def error(self) -> BaseException | None:
        """Why it can answer no more, if it cannot."""


class _Server(uvicorn.Server):
    """Takes no new requests as soon as it is told to end."""

    def __init__(self, config: uvicorn.Config, backend: Served) -> None:
        super().__init__(config)
        self._backend = backend
        self.told: signal.Signals | None = None
        """The signal that told it to end."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        """As uvicorn's; a second signal cuts the answers off that are under way."""
        again = self.told is not None
        self.told = signal.Signals(sig)
        if again:
            _say_plainly(f"{self.told.name} again: answers under way are cut off")
            self.force_exit = True
        else:
            grace = self.config.timeout_graceful_shutdown
            _say_plainly(f"{self.told.name}: answers under way have {grace} s to end")
        self._backend.is_closing = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """As uvicorn's; ends with the engine, without which it has no answers."""
        if self._backend.error is not None:
            self._backend.is_closing = True
            return True
        return await super().on_tick(counter)


def _server_of(app: FastAPI, grace_s: float) -> _Server:
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, lifespan="off", ws="none",
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )  # fmt: skip
    return _Server(config, app.state.backend)


def serve(app: FastAPI, listening: socket.socket, *, grace_s: float = 30.0) -> str:
    """Answer requests until a signal of `ENDING`; then finish what is under way.

    Args:
        listening: from `bind`; closed at the end.
        grace_s: how long answers under way may take then; a second signal ends them at once.

    Returns:
        The name of the signal.

    Raises:
        CacheStateError: the engine has failed.
    """
    server = _server_of(app, grace_s)
    with _handled(server.handle_exit):
        server.run(sockets=[listening])
    error = app.state.backend.error
    if error is not None:
        why = f"{type(error).__name__}: {error}"
        raise CacheStateError(f"the engine failed, so the server ends: {why}") from error
    return "its owner" if server.told is None else server.told.name


@contextmanager
def says_why_it_ends() -> Iterator[None]:
    """Outside `serve`, a signal of `ENDING` ends the process at once, with a line on stderr; what
    kills it from inside, such as a fault in a library, leaves a trace there."""
    with suppress(OSError, ValueError, AttributeError):  # stderr may be closed, or no file
        faulthandler.enable()
    with _handled(_end_at_once):
        yield


def _end_at_once(number: int, frame: Any) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    _say_plainly(f"{signal.Signals(number).name}: ended at once; what was not stored is lost")
    os._exit(128 + number)


@contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Signals that end a server go to a handler. One that is ignored stays so, as under nohup.

    uvicorn sets handlers of its own for two of them, which call the server's, and raises them again
    when it has ended: they have done their work by then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in ENDING}
    former = {number: each for number, each in former.items() if each != signal.SIG_IGN}
    for number in former:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, each in former.items():
            signal.signal(number, each)


def _say_plainly(text: str) -> None:
    """A line on stderr, from a signal handler; where there is none, none."""
    with suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode())


@contextmanager
def in_background(app: FastAPI, listening: socket.socket) -> Iterator[str]:
    """Serve from a thread; yields the URL. Requests that are left at the end are cut off."""
    server = _server_of(app, 1.0)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listening]}, name="penstock-http", daemon=True
    )
    thread.start()
    try:
        yield url_of(listening)
    finally:
        server.should_exit = True
        thread.join()


def url_of(listening: socket.socket) -> str:
    """Where a socket is reached from this machine."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check(
    app: FastAPI, listening: socket.socket, settings: ServerSettings, say: Callable[[str], None]
) -> None:
    """Ask a server of everything once, through its socket; says what was answered.

    Raises:
        ConfigError: something was not answered.
    """
    with in_background(app, listening) as url:
        for path, body in (
            ("/health", None),
            ("/v1/models", None),
            ("/v1/completions", {"prompt": "1, 2, 3,", "max_tokens": 4, "temperature": 0}),
            ("/metrics", None),
        ):
            headers = {"Content-Type": "application/json"}
            if settings.api_key is not None:
                headers["Authorization"] = f"Bearer {settings.api_key}"
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(url + path, data, headers)
            try:
                with urllib.request.urlopen(request, timeout=_CHECK_S) as answer:
                    answer.read()
            except OSError as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # it is the open answer
                raise ConfigError(f"{path} was not answered: {error}") from error
            say(f"{path} is answered")
