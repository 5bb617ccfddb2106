"""The protocol between a cache and a near-storage device: messages, versioned, over sockets.

There are three connections, so that scores, reads and writes do not wait for each other:
`Configure`, `Map`, `Score` and `Normalise` go over the first, `Read` over the second, `Reserve`,
`Write` and `Sync` over the third. Each is served in order.

A message is a header and a body. Numbers are little-endian. Bulk (keys and values, queries, scores,
lists of tokens) is in memory that both sides share and never in a message; messages say where.

    header   magic "PNST", version u16, kind u16, request u64, body_bytes u32
    body     as the message's class says: fixed fields, or JSON text where nothing is hot

Every request carries a number that its answers repeat; numbers only grow. A device answers each
request with `Done` or `Failed`, and a `Score` with `Logits` (rule "attention"), any number of
`Block`s and then `Done`. Whatever does not follow this is a `ProtocolError`, after which the
connection is given up: a device that answered nonsense once is not asked again.
"""

import functools
import json
import struct
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from penstock.core.errors import FetchError

VERSION = 2
MAGIC = b"PNST"
_HEADER = struct.Struct("<4sHHQI")
MOST_BODY_BYTES = 1 << 16
"""A longer body is nonsense: bulk goes through shared memory."""


class Connection(Protocol):
    """What is asked of a connected socket, or of what stands in for one."""

    def sendall(self, data: bytes | bytearray | memoryview, /) -> None:
        """As a socket."""

    def recv(self, most: int, /) -> bytes:
        """As a socket."""
        ...

    def recv_into(self, into: bytearray | memoryview, /) -> int:
        """As a socket."""
        ...

    def settimeout(self, seconds: float | None, /) -> None:
        """As a socket."""

    def setsockopt(self, level: int, name: int, value: int | bytes, /) -> None:
        """As a socket."""

    def shutdown(self, how: int, /) -> None:
        """As a socket."""

    def close(self) -> None:
        """As a socket."""


class ProtocolError(FetchError):
    """The other side sent what the protocol does not know; the message says what."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; subclasses have fields of fixed size in the order of `FIELDS`."""

    KIND: ClassVar[int]
    FIELDS: ClassVar[str] = ""

    def body(self) -> bytes:
        """The fields as bytes."""
        return struct.pack("<" + self.FIELDS, *_values(self))

    @classmethod
    def from_body(cls, body: bytes) -> "Message":
        """The message that `body` holds.

        Raises:
            ProtocolError: the body has another length.
        """
        fields = struct.Struct("<" + cls.FIELDS)
        if len(body) != fields.size:
            raise ProtocolError(
                f"a {cls.__name__} message of {len(body)} bytes; {fields.size} were expected"
            )
        return cls(*fields.unpack(body))


@functools.cache
def _names(kind: int) -> tuple[str, ...]:
    return tuple(field.name for field in fields(_KINDS[kind]))


def _values(message: Message) -> list[Any]:
    return [getattr(message, name) for name in _names(message.KIND)]


@dataclass(frozen=True, slots=True)
class _Text(Message):
    """A message that is JSON text: sent rarely, and read by people when something is wrong."""

    values: dict[str, Any]

    @override
    def body(self) -> bytes:
        """The values as JSON."""
        return json.dumps(self.values).encode()

    @classmethod
    @override
    def from_body(cls, body: bytes) -> "Message":
        try:
            values = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a {cls.__name__} message that is not JSON") from error
        if not isinstance(values, dict):
            raise ProtocolError(f"a {cls.__name__} message that is no object")
        return cls(values)


# From the cache to the device ------------------------------------------------------------------


class Configure(_Text):
    """The first message of the first connection: shape, precision, files, shared memory
    (`DeviceSettings`)."""

    KIND = 1


@dataclass(frozen=True, slots=True)
class Reserve(Message):
    """Make room for [0, num_bytes) of a layer's file."""

    KIND: ClassVar[int] = 2
    FIELDS: ClassVar[str] = "IQ"
    layer: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Write(Message):
    """Write bytes that lie at `start` of the shared memory; whole units."""

    KIND: ClassVar[int] = 3
    FIELDS: ClassVar[str] = "IQQQ"
    layer: int
    offset: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Read(Message):
    """Read `count` pieces, whose offsets and lengths (int64 [count] each) lie at `start`, to
    `target`, side by side."""

    KIND: ClassVar[int] = 4
    FIELDS: ClassVar[str] = "IQQQ"
    layer: int
    count: int
    start: int
    target: int


@dataclass(frozen=True, slots=True)
class Sync(Message):
    """Return when all that was written to a layer's file is on the device."""

    KIND: ClassVar[int] = 5
    FIELDS: ClassVar[str] = "I"
    layer: int


@dataclass(frozen=True, slots=True)
class Map(Message):
    """Tokens [first, first + count) of every row are in the units at `start`: int64 [rows, count].
    They are cold. With `encode` keys without codes are read back from the file (after a restart).
    """

    KIND: ClassVar[int] = 6
    FIELDS: ClassVar[str] = "IQQQ?"
    layer: int
    first: int
    count: int
    start: int
    encode: bool


@dataclass(frozen=True, slots=True)
class Score(Message):
    """Score every cold token before `end` against the query of an area of the shared memory.

    First the layer's cold pool changes: tokens [first, first + count) of every row are mapped (the
    area's units; as `Map`, for few), all become cold (`reset`), the promoted leave it, the demoted
    enter it (lists in the area).
    """

    KIND: ClassVar[int] = 7
    FIELDS: ClassVar[str] = "IIQQQQQ?"
    layer: int
    area: int
    end: int
    first: int
    count: int
    promoted: int
    demoted: int
    reset: bool


@dataclass(frozen=True, slots=True)
class Normalise(Message):
    """The log-normalisers over everything are in the area: go on with the blocks."""

    KIND: ClassVar[int] = 8
    FIELDS: ClassVar[str] = "I"
    area: int


class Join(_Text):
    """The first message of the other connections over TCP: session, and its role."""

    KIND = 9


class Drop(_Text):
    """The cache is closed: its pool may go. Over TCP alone."""

    KIND = 10


# From the device to the cache ------------------------------------------------------------------


class Ready(_Text):
    """The device is configured: sector_bytes, is_direct, description."""

    KIND = 20


@dataclass(frozen=True, slots=True)
class Done(Message):
    """A request is carried out. `nanoseconds`: what the device worked on it."""

    KIND: ClassVar[int] = 21
    FIELDS: ClassVar[str] = "Q"
    nanoseconds: int


class Failed(_Text):
    """A request failed: `error` (a name from `core.errors`) and `message`."""

    KIND = 22


@dataclass(frozen=True, slots=True)
class Logits(Message):
    """All logits are there; their log-sums, float32 [rows, query_heads], are in the area."""

    KIND: ClassVar[int] = 23
    FIELDS: ClassVar[str] = "I"
    area: int


@dataclass(frozen=True, slots=True)
class Block(Message):
    """A score block: entries [first, first + count) of the area's positions and scores, of `row`,
    in ascending order of position. Blocks of a request are numbered from 0."""

    KIND: ClassVar[int] = 24
    FIELDS: ClassVar[str] = "IIQQ"
    number: int
    row: int
    first: int
    count: int


_MESSAGES: tuple[type[Message], ...] = (
    Configure, Reserve, Write, Read, Sync, Map, Score, Normalise, Join, Drop, Ready, Done, Failed,
    Logits, Block,
)  # fmt: skip
_KINDS = {message.KIND: message for message in _MESSAGES}


def pack(request: int, message: Message) -> bytes:
    """Header and body of a message."""
    body = message.body()
    assert len(body) <= MOST_BODY_BYTES, "bulk goes through shared memory"
    return _HEADER.pack(MAGIC, VERSION, message.KIND, request, len(body)) + body


def unpack(data: bytes) -> tuple[int, Message]:
    """The one message that `data` is.

    Raises:
        ProtocolError: it is none of this version, or more than one.
    """
    found = _first(data)
    if found is None or found[2] != len(data):
        raise ProtocolError("a message that is cut short, or has something behind it")
    return found[:2]


def _first(data: bytes | bytearray) -> tuple[int, Message, int] | None:
    """Number and message at the beginning of `data`, and where it ends; None: not whole yet."""
    if len(data) < _HEADER.size:
        return None
    magic, version, kind, request, size = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("the other side does not speak the near-storage protocol")
    if version != VERSION:
        raise ProtocolError(f"the other side speaks version {version}, this one {VERSION}")
    if kind not in _KINDS:
        raise ProtocolError(f"a message of unknown kind {kind}")
    if size > MOST_BODY_BYTES:
        raise ProtocolError(f"a message of {size} bytes; at most {MOST_BODY_BYTES} make sense")
    end = _HEADER.size + size
    if len(data) < end:
        return None
    return request, _KINDS[kind].from_body(bytes(data[_HEADER.size : end])), end


class Reader:
    """Takes messages out of what comes over a connection, however it was cut."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._buffered = bytearray()

    def next_buffered(self) -> tuple[int, Message] | None:
        """The next message that has come whole; None where there is none.

        Raises:
            ProtocolError: the bytes are no message of this version.
        """
        found = _first(self._buffered)
        if found is None:
            return None
        del self._buffered[: found[2]]
        return found[:2]

    def receive_some(self) -> bool:
        """Wait for bytes; returns whether any came, or the other side has gone.

        Raises:
            BlockingIOError: none came within the connection's patience (SO_RCVTIMEO).
            OSError: the connection failed.
        """
        try:
            part = self._connection.recv(1 << 16)
        except ConnectionError:
            return False
        self._buffered += part
        return bool(part)

    def receive(self) -> tuple[int, Message] | None:
        """Wait for one message; None when the other side has gone. Raises as the others."""
        while (message := self.next_buffered()) is None:
            if not self.receive_some():
                return None
        return message
