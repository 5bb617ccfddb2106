"""Channel: one connection to a near-storage device; requests on it, and ScorerError."""

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections import deque
from typing import Protocol

from typing_extensions import override

from penstock.core import errors
from penstock.core.errors import FetchError, PenstockError, StorageError
from penstock.methods.hillinfer.near_storage import protocol
from penstock.methods.hillinfer.near_storage.bulk import Bulk
from penstock.methods.hillinfer.near_storage.frames import Frames, Views

_RECENT_UNITS = 1 << 14
_GLANCE_S = 0.25
"""A blocked wait looks around this often: a deadline is kept to within so much."""


class ScorerError(FetchError):
    """A near-storage device died, did not answer in time, or answered nonsense.

    Nothing of the step may be used. The pool is safe in the files: the device is started again
    when it is needed next (after `crop` to a length before the step).
    """


class LateError(ScorerError):
    """A near-storage device did not answer in time."""


class Device(Protocol):
    """What a channel asks of the device that it leads to.

    Attributes:
        given_up: what becomes of one that is given up, for people
    """

    timeout_s: float
    given_up: str

    def give_up(self, error: ScorerError) -> None:
        """End all channels with this error."""

    def gone(self) -> ScorerError:
        """Why the device has closed a connection; gives it up."""


class Exchange:
    """One request under way: its number, and the answers that are not taken yet."""

    def __init__(self, channel: "Channel", number: int) -> None:
        self.number = number
        self.answers: deque[protocol.Message] = deque()
        self.channel = channel

    def next(self, deadline: float) -> protocol.Message:
        """Wait for the next answer. deadline: by `time.monotonic`.

        Raises:
            ScorerError: the device is gone, or the deadline has passed (it is given up then).
            StorageError: what the device says failed.
        """
        message = self.channel.wait_for(self, deadline)
        if isinstance(message, protocol.Failed):
            self.channel.forget(self)
            raise _error_of(message)
        return message

    def done(self, deadline: float) -> int:
        """Wait for `Done`; returns the nanoseconds that the device worked. Raises as `next`."""
        message = self.next(deadline)
        if not isinstance(message, protocol.Done):
            kind = type(message).__name__
            raise self.channel.nonsense(f"{kind} where Done was expected")
        self.channel.forget(self)
        return message.nanoseconds


class Channel:
    """Sends requests and hands out the answers: a waiting thread reads for all that wait.

    There is no thread that receives, so that an answer is with who asked as soon as it comes.
    """

    def __init__(self, connection: protocol.Connection, device: Device) -> None:
        """Take over a connected socket."""
        seconds, rest = divmod(device.timeout_s, 1)
        for option, patience in (
            (socket.SO_SNDTIMEO, (int(seconds), int(rest * 1e6))),
            (socket.SO_RCVTIMEO, (0, int(_GLANCE_S * 1e6))),
        ):  # fmt: skip
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *patience))
        self._connection, self._device = connection, device
        self._reader: protocol.Reader | Frames = protocol.Reader(connection)
        self._numbers = itertools.count(1)
        self._exchanges: dict[int, Exchange] = {}
        self._sending, self._receiving = threading.Lock(), threading.RLock()
        self.failure: ScorerError | None = None

    def begin(self, message: protocol.Message) -> Exchange:
        """Send a request.

        Raises:
            ScorerError: the device is gone.
        """
        exchange = Exchange(self, next(self._numbers))
        self._exchanges[exchange.number] = exchange
        try:
            self.send(exchange, message)
        except BaseException:
            self.forget(exchange)
            raise
        return exchange

    def send(self, exchange: Exchange, message: protocol.Message) -> None:
        """Send another message of a request that is under way.

        Raises:
            ScorerError: the device is gone.
        """
        try:
            with self._sending:
                if self.failure is not None:
                    raise self.failure
                self._put(exchange, message)
        except BlockingIOError as error:
            raise self._late(self._device.timeout_s) from error
        except OSError as error:
            if isinstance(error, ScorerError):
                raise
            raise self._device.gone() from error

    def _put(self, exchange: Exchange, message: protocol.Message) -> None:
        """Write a message to the connection, whose bulk the other side sees."""
        self._connection.sendall(protocol.pack(exchange.number, message))

    def wait_for(self, exchange: Exchange, deadline: float) -> protocol.Message:
        """The next answer of a request. Raises as `Exchange.next`, but for `Failed`."""
        patience_s = deadline - time.monotonic()
        while not exchange.answers:
            if self.failure is not None:
                raise self._ended(self.failure)
            if not self._receiving.acquire(timeout=_GLANCE_S):
                if time.monotonic() > deadline:
                    raise self._late(patience_s)
                continue
            try:
                if not exchange.answers:
                    self._receive(deadline, patience_s)
            finally:
                self._receiving.release()
        return exchange.answers.popleft()

    def _receive(self, deadline: float, patience_s: float) -> None:
        """Read what comes and hand it out."""
        try:
            if not self._reader.receive_some():
                raise self.failure or self._device.gone()
            while (received := self._reader.next_buffered()) is not None:
                self._take(*received)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise self._late(patience_s) from None
        except protocol.ProtocolError as error:
            raise self.nonsense(str(error)) from error
        except OSError as error:
            if isinstance(error, ScorerError):
                raise
            raise self.failure or self._device.gone() from error

    def _take(self, number: int, message: protocol.Message) -> None:
        exchange, kind = self._exchanges.get(number), type(message).__name__
        if exchange is None:
            raise protocol.ProtocolError(f"{kind} for a request that is not under way")
        if message.KIND < protocol.Ready.KIND:
            raise protocol.ProtocolError(f"{kind}, which is for devices")
        exchange.answers.append(message)

    def forget(self, exchange: Exchange) -> None:
        """A request has had its last answer."""
        self._exchanges.pop(exchange.number, None)

    def nonsense(self, what: str) -> ScorerError:
        """Give the device up for an answer that makes no sense; returns what to raise."""
        error = ScorerError(
            f"the near-storage device answered nonsense ({what}) and {self._device.given_up}"
        )
        self._device.give_up(error)
        return error

    def _late(self, patience_s: float) -> ScorerError:
        if self.failure is not None:
            return self._ended(self.failure)
        error = LateError(
            f"the near-storage device did not answer within {max(0.0, patience_s):.3g} s and "
            f"{self._device.given_up}"
        )
        self._device.give_up(error)
        return self._ended(error)

    def _ended(self, error: ScorerError) -> ScorerError:
        """The error, once no thread puts what came into memory that is free from now on."""
        with self._receiving:
            return error

    def wake(self) -> None:
        """End the connection under those who wait for it; what comes late is put nowhere."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class FramedChannel(Channel):
    """A channel whose other end shares no memory: bulk travels with its message (`Frames`)."""

    def __init__(self, frames: Frames, bulk: Bulk, device: Device) -> None:
        """Take over an authenticated connection, and put what comes into the bulk's memory."""
        super().__init__(frames.connection, device)
        self.frames, self._bulk, self._reader = frames, bulk, frames
        frames.most_bulk, frames.place = len(bulk.memory), self._place
        self._asked: dict[int, protocol.Message] = {}

    @override
    def _put(self, exchange: Exchange, message: protocol.Message) -> None:
        self._asked.setdefault(exchange.number, message)
        self.frames.send(exchange.number, message, self._bulk.views(self._bulk.pieces(message)))

    def _place(self, request: int, message: protocol.Message) -> Views:
        """Where an answer's bulk goes: where its request said, not where the answer says."""
        asked = self._asked.get(request)
        if self.failure is not None:
            raise self.failure  # others use the memory by now
        match message, asked:
            case protocol.Done(), protocol.Read():
                return self._bulk.views(self._bulk.read_by(asked))
            case protocol.Logits(), protocol.Score() if message.area == asked.area:
                return self._bulk.views(self._bulk.pieces(message))
            case protocol.Block(), protocol.Score():
                return self._bulk.views(self._bulk.block(asked.area, message))
        return ()

    @override
    def forget(self, exchange: Exchange) -> None:
        super().forget(exchange)
        self._asked.pop(exchange.number, None)


class Link:
    """How fast units come from a device."""

    def __init__(self) -> None:
        self._units = self._nanoseconds = 0

    def note(self, units: int, nanoseconds: int) -> None:
        """So many were read in that time; what was long ago counts half and half again."""
        self._units, self._nanoseconds = self._units + units, self._nanoseconds + nanoseconds
        if self._units > _RECENT_UNITS:
            self._units, self._nanoseconds = self._units // 2, self._nanoseconds // 2

    @property
    def rate(self) -> float:
        """Units per second; 0 before the first."""
        return self._units * 1e9 / self._nanoseconds if self._nanoseconds else 0.0


def _error_of(message: protocol.Failed) -> PenstockError:
    kind = getattr(errors, str(message.values.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, StorageError)):
        kind = FetchError
    return kind(f"near-storage device: {message.values.get('message')}")
