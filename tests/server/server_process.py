"""ServerProcess: `penstock serve` in a process that is forked ready, and clients of it."""

import contextlib
import json
import re
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
import resource, sys
most = int(sys.argv.pop(1))
if most:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
from penstock.cli.entry import main
main()
"""
_ADDRESS = re.compile(r" at http://127\.0\.0\.1:(\d+) ")
READY_S = 120.0


def prepare() -> None:
    """Let every server be forked from a process that holds all that it imports."""
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
        self.port = 0

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()

    def ready(self) -> "ServerProcess":
        """Wait until it listens."""
        while True:
            found = _ADDRESS.search(self.errors())
            if found is not None:
                self.port = int(found[1])
                return self
            assert self.process.poll() is None, f"it ended: {self.errors()}"
            assert time.monotonic() - self.began_s < READY_S, self.errors()
            time.sleep(0.01)

    def errors(self) -> str:
        """What it has said."""
        return self.process.errors()

    def kill(self) -> None:
        """With SIGKILL; back when it is gone."""
        self.process.kill()
        self.process.wait()

    # Asking -----------------------------------------------------------------------------------

    def client(self) -> httpx.Client:
        """To be closed by its owner."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120.0)

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

    def is_idle(self, within_s: float = 60.0) -> bool:
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
        """What the process holds."""
        me = psutil.Process(self.process.pid)
        memory = me.memory_full_info()
        return {
            "memory_mib": memory.uss / 2**20, "descriptors": me.num_fds(),
            "threads": me.num_threads(),
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
