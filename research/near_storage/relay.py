"""Relay: a TCP proxy that delays, loses or damages what passes; our stand-in for a bad network."""

import contextlib
import queue
import random
import socket
import threading
import time
from typing import Literal

Mode = Literal["open", "hole", "closed", "garbage"]
_PIECE = 1 << 16


class Relay:
    """Passes connections on to one address.

    Attributes:
        delay_s: how much later everything comes, each way
        mode: "hole": nothing passes, nothing is said; "closed": connections end, new ones too;
            "garbage": now and then a byte is another
    """

    def __init__(self, target: tuple[str, int], listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        """Listen at once."""
        self.target, self.delay_s, self.seed = target, 0.0, 0
        self.mode: Mode = "open"
        self._listener = socket.create_server(listen)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and those to come."""
        self.mode = "closed"
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Listen no more."""
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.mode == "closed":
                    raise OSError
                far = socket.create_connection(self.target, timeout=5)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(one)
                line: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=self._take, args=(one, line), daemon=True).start()
                threading.Thread(target=self._give, args=(other, one, line), daemon=True).start()

    def _take(self, source: socket.socket, line: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
        noise = random.Random(self.seed)
        data = b" "
        while data:
            try:
                data = source.recv(_PIECE)
            except OSError:
                data = b""
            if self.mode == "garbage" and data:
                damaged = bytearray(data)
                damaged[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
                data = bytes(damaged)
            line.put((time.monotonic() + self.delay_s, data))

    def _give(
        self, to: socket.socket, source: socket.socket,
        line: "queue.SimpleQueue[tuple[float, bytes]]",
    ) -> None:  # fmt: skip
        with contextlib.suppress(OSError):
            while True:
                due, data = line.get()
                if (left := due - time.monotonic()) > 0:
                    time.sleep(left)
                if not data:
                    break
                if self.mode != "hole":
                    to.sendall(data)
        for each in (to, source):
            self._open.discard(each)
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        source.close()
