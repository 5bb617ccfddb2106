"""TcpDevice: the cache's end of a near-storage device on another host."""

import contextlib
import os
import socket
import time
import weakref

from typing_extensions import override

from penstock.core.errors import StorageError
from penstock.methods.hillinfer.near_storage import protocol, shared_memory
from penstock.methods.hillinfer.near_storage.address import split_address
from penstock.methods.hillinfer.near_storage.bulk import Bulk
from penstock.methods.hillinfer.near_storage.channel import (
    Channel,
    FramedChannel,
    ScorerError,
)
from penstock.methods.hillinfer.near_storage.device_client import NearDevice
from penstock.methods.hillinfer.near_storage.frames import Frames
from penstock.methods.hillinfer.near_storage.hello import greet
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings
from penstock.methods.hillinfer.near_storage.tls import Trust

LOST = "the pool is lost"
"""How a host begins to say so."""


class PoolLostError(ScorerError):
    """A device on another host no longer has what was written to it; the cache is lost."""


class TcpDevice(NearDevice):
    """A pool of a `DeviceHost`, connected again after the connection was lost.

    The host keeps the pool meanwhile. It is told all maps and which tokens are hot by the next
    request; a write that had no answer is sent again, to the same place. A host that lost the pool,
    or has counted fewer writes than it has acknowledged, is refused until `begin_anew`.
    """

    given_up = "was given up; it is connected again when it is needed next"

    def __init__(
        self, settings: DeviceSettings, address: str, key: bytes, *, timeout_s: float,
        trust: Trust | None = None,
    ) -> None:  # fmt: skip
        """Connect.

        Args:
            address: host:port.
            key: that the host has as well.
            timeout_s: most seconds to wait for a connection, or an answer.
            trust: whose certificate the host must show; None: nothing is encrypted.

        Raises:
            StorageError: there is no device, or it refuses; `HelloError` when it has another key,
                `TlsError` when it has another certificate.
        """
        self.address, self._key, self._pool = address, key, os.urandom(16).hex()
        self._trust = trust
        self._instance, self._acknowledged = "", 0
        self._lost: PoolLostError | None = None
        self._wire_bytes = 0
        super().__init__(settings, address, timeout_s=timeout_s)

    @override
    def _open(self, settings: DeviceSettings, place: str) -> DeviceSettings:
        return settings

    @override
    def _share_memory(self, settings: DeviceSettings) -> None:
        memory = shared_memory.unshared(settings.division.num_bytes)
        self._divide(settings, memory)

    @override
    def _start(self) -> None:
        state = self._state
        state.is_ready = False
        if self._lost is not None:
            raise self._lost
        self._wire_bytes, state.channels = self.wire_bytes, []
        state.failure = None
        deadline = time.monotonic() + self.timeout_s
        self.generation += 1
        try:
            scores = self._connect(deadline)
            self.scores = scores
            settings = {
                **self.settings.as_json(), "pool": self._pool,
                "instance": self._instance if self._acknowledged else "",
            }  # fmt: skip
            try:
                said = self._first(scores, protocol.Configure(settings), protocol.Ready)
            except StorageError as error:
                if LOST not in str(error):
                    raise
                raise self._lose() from error
            self._take(said)
            session = str(said["session"])
            self.reads, self.writes = (
                self._join(session, role, deadline) for role in ("reads", "writes")
            )
        except BaseException as error:
            failure = error if isinstance(error, ScorerError) else None
            state.failure = failure or ScorerError(
                f"no near-storage device answers at {self.address}: {error}"
            )
            for each in state.channels:
                each.close()
            if isinstance(error, OSError) and failure is None:
                raise state.failure from error
            raise

    def _connect(self, deadline: float) -> FramedChannel:
        host, port = split_address(self.address)
        left = max(0.01, deadline - time.monotonic())
        connection = socket.create_connection((host, port), timeout=left)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            over: protocol.Connection = connection
            if self._trust is not None:
                over = self._trust.connect(connection, host, deadline)
            seeds = greet(over, self._key, deadline)
            connection.settimeout(None)
            frames = Frames(over, seeds.of_cache, seeds.of_device)
            channel = FramedChannel(
                frames, Bulk(self.memory, self.settings.division), weakref.proxy(self)
            )
        except BaseException:
            connection.close()
            raise
        self._state.channels.append(channel)
        return channel

    def _join(self, session: str, role: str, deadline: float) -> FramedChannel:
        channel = self._connect(deadline)
        self._first(channel, protocol.Join({"session": session, "role": role}), protocol.Done)
        return channel

    def _first(
        self, channel: FramedChannel, message: protocol.Message, kind: type[protocol.Message]
    ) -> dict[str, object]:
        """Send a connection's first message; returns what the answer says."""
        exchange = channel.begin(message)
        answer = exchange.next(self.deadline())
        channel.forget(exchange)
        if not isinstance(answer, kind):
            raise channel.nonsense(f"{type(answer).__name__} where {kind.__name__} was expected")
        return dict(getattr(answer, "values", {}))

    def _take(self, said: dict[str, object]) -> None:
        self._take_ready(said)
        if self._trust is not None:
            self.description += ", TLS on the way"
        try:
            instance, writes = str(said["instance"]), int(str(said["writes"]))
        except (KeyError, ValueError):
            raise self.scores.nonsense("a Ready message without its fields") from None
        if self._acknowledged and (instance != self._instance or writes < self._acknowledged):
            raise self._lose()
        self._instance = instance

    def _lose(self) -> PoolLostError:
        self._lost = PoolLostError(
            f"the device at {self.address} has lost this cache's tokens; begin a new cache"
        )
        return self._lost

    def begin_anew(self) -> None:
        """Take a new pool with the next connection, in place of one that is lost."""
        with self.lock:
            self._pool, self._instance, self._acknowledged = os.urandom(16).hex(), "", 0
            self._lost, self.is_empty = None, True

    @property
    def wire_bytes(self) -> int:
        """Bytes sent and received so far, without TCP's and TLS's own."""
        channels = [each for each in self._state.channels if isinstance(each, FramedChannel)]
        return self._wire_bytes + sum(
            each.frames.sent_bytes + each.frames.received_bytes for each in channels
        )

    @override
    def call(self, channel: Channel, message: protocol.Message, patience_s: float = 0.0) -> int:
        took = super().call(channel, message, patience_s)
        if isinstance(message, protocol.Write):
            self._acknowledged += 1
        return took

    @override
    def give_up(self, error: ScorerError) -> None:
        super().give_up(error)
        for channel in self._state.channels:
            channel.wake()

    @override
    def gone(self) -> ScorerError:
        if self._state.failure is not None:
            return self._state.failure
        error = ScorerError(
            f"the near-storage device at {self.address} closed its connection; it is connected "
            "again when it is needed next"
        )
        self.give_up(error)
        return error

    @override
    def close(self) -> None:
        """Let the pool go, where the host still answers."""
        if not self._state.closed and self.is_alive():
            with contextlib.suppress(OSError):  # it goes by itself after a while
                self.call(self.writes, protocol.Drop({}))
        super().close()
