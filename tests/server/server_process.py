"""ServerProcess: `penstock serve` in a process that is forked ready, and clients of it."""

import contextlib
import json
import re
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from typing import Any

import httpx
import psutil

from tests.ready_process import PRELOADED, ReadyProcess, forks

_CODE = """
import ctypes, gc, json, os, resource, signal, sys
from tests.mallinfo import Malloc
most = int(sys.argv.pop(1))
if most:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

def count(*_):
    gc.collect()
    held = {"python_blocks": sys.getallocatedblocks()}
    about = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc's
    if about is not None:
        about.restype = Malloc
        said = about()
        held["malloc_mib"] = (said.uordblks + said.hblkhd) / 2**20
    os.write(2, f"held {json.dumps(held)}\\n".encode())

signal.signal(signal.SIGUSR2, count)
from penstock.cli.entry import main
main()
"""
_ADDRESS = re.compile(r" at http://127\.0\.0\.1:(\d+) ")
_HELD = re.compile(r"^held (\{.*\})$", re.MULTILINE)
PATIENCE_S = 900.0
"""For what takes a second, on a machine that has much to do."""


def prepare() -> None:
    """Let every server be forked from a process that holds all that it imports.

    A program calls it: SIGTERM ends it like Ctrl-C from then on.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers end with this process
    forks().set_forkserver_preload([*PRELOADED, "penstock.server.app", "uvicorn", "httpx"])
    ensure_running: Any = forkserver.ensure_running
    ensure_running()


class ServerProcess:
    """One server; a context manager, which kills it."""

    def __init__(
        self, *options: str, file_limit: int = 0, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it.

        Args:
            options: of `penstock serve`, the model first.
            file_limit: RLIMIT_FSIZE, in bytes; 0: none.
        """
        self.began_s = time.monotonic()
        command = (str(file_limit), "serve", *options, "--port", "0")
        self.process = ReadyProcess(_CODE, *command, environment=environment)
        self.port = self.descriptors = 0
        """Where it listens, and what it has open before requests that matter."""

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()

    def ready(self) -> "ServerProcess":
        """Wait until it answers."""
        while True:
            found = _ADDRESS.search(self.errors())
            if found is not None:
                self.port = int(found[1])
                with self.client() as client:
                    client.get("/health")
                self.await_closing()
                self.descriptors = psutil.Process(self.process.pid).num_fds()
                return self
            assert self.process.poll() is None, f"it ended: {self.errors()}"
            assert time.monotonic() - self.began_s < PATIENCE_S, self.errors()
            time.sleep(0.01)

    def errors(self) -> str:
        """What it has said."""
        return self.process.errors()

    def kill(self) -> None:
        """With SIGKILL; back when it is gone."""
        self.process.kill()
        self.process.wait()

    def await_closing(self) -> None:
        """Wait until it has closed the connections that clients have closed."""
        until = time.monotonic() + PATIENCE_S
        while any(
            each.pid == self.process.pid and each.status != psutil.CONN_LISTEN
            for each in psutil.net_connections("tcp")
        ):  # fmt: skip
            assert time.monotonic() < until
            time.sleep(0.02)

    # Asking -----------------------------------------------------------------------------------

    def client(self) -> httpx.Client:
        """To be closed by its owner."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """Frames of an answer; the connection goes with the iterator."""
        with (
            self.client() as client,
            client.stream("POST", path, json={**body, "stream": True}) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

    def metric(self, name: str) -> float:
        """One figure of /metrics."""
        with self.client() as client:
            page = client.get("/metrics").text
        return float(re.findall(rf"^{name}\{{[^}}]*\}} (\S+)", page, re.MULTILINE)[0])

    def is_idle(self, within_s: float = PATIENCE_S) -> bool:
        """Whether all that was asked is over and its memory given back, soon."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if not (
                self.metric("vllm:num_requests_running")
                or self.metric("vllm:num_requests_waiting")
                or self.metric("penstock:kv_memory_bytes")
            ):
                return True
            time.sleep(0.02)
        return False

    def resources(self) -> dict[str, float]:
        """What the process holds: also what of its memory malloc and Python have given out."""
        me = psutil.Process(self.process.pid)
        before = len(_HELD.findall(self.errors()))
        self.process.send_signal(signal.SIGUSR2)
        until = time.monotonic() + PATIENCE_S
        while len(said := _HELD.findall(self.errors())) == before:
            assert time.monotonic() < until, self.errors()[-600:]
            time.sleep(0.01)
        memory = me.memory_full_info()
        return {
            "memory_mib": memory.uss / 2**20, "descriptors": me.num_fds(),
            "threads": me.num_threads(), **json.loads(said[-1]),
        }  # fmt: skip

    # Clients that misbehave -------------------------------------------------------------------

    def connect(self, receive_bytes: int = 0) -> socket.socket:
        """A connection."""
        made = socket.socket()
        if receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(60)
        made.connect(("127.0.0.1", self.port))
        return made

    @staticmethod
    def request(path: str, body: Any) -> bytes:
        """As it goes over the wire."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def vanish(self, raw: bytes, stage: str) -> None:
        """A client that goes: at once, within head or body, behind it, at the answer's beginning or
        within it, with a reset."""
        head = raw.index(b"\r\n\r\n")
        with contextlib.suppress(OSError), self.connect() as made:
            match stage:
                case "connected":
                    return
                case "head":
                    made.sendall(raw[: head // 2])
                case "body":
                    made.sendall(raw[: (head + len(raw)) // 2])
                case "asked":
                    made.sendall(raw)
                case "answered":
                    made.sendall(raw)
                    made.recv(1)
                case "within":
                    made.sendall(raw)
                    for _ in range(4):
                        made.recv(600)
                case "reset":
                    made.sendall(raw)
                    made.recv(600)
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


STAGES = ("connected", "head", "body", "asked", "answered", "within", "reset")
