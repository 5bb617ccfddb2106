"""Frames: messages with their bulk and a checksum, over connections that share no memory.

    frame    magic "PNSF", message_bytes u32, bulk_bytes u32, checksum u64; message; bulk

The message is as in `protocol`, the bulk what `Bulk` says of it, in this order. The checksum is
XXH3 of message and bulk. Its seed is the connection's own (`hello`) plus the frame's number, so
that a frame which is lost, repeated or of another connection is noticed. A checksum is no
signature: who can change bytes on the way is kept out by TLS alone.
"""

import struct
from collections.abc import Callable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.methods.hillinfer.near_storage import protocol

_HEADER = struct.Struct("<4sIIQ")
MAGIC = b"PNSF"
_MOST_MESSAGE = protocol.MOST_BODY_BYTES + 64
_JOINED_BYTES = 1 << 16
"""A smaller frame is sent in one piece."""
Views = Sequence[NDArray[np.uint8]]
Place = Callable[[int, protocol.Message], Views]


class Frames:
    """Sends and takes frames; takes the place of a `protocol.Reader`.

    Attributes:
        most_bulk: a frame with more bulk is refused before room is made for it
        place: where the bulk of a message goes; its lengths must add up to the frame's
        sent_bytes, received_bytes: on the wire, without TCP's own
    """

    def __init__(self, connection: protocol.Connection, sends: int, takes: int) -> None:
        """Take over an authenticated connection.

        Args:
            sends, takes: seeds of the checksums of either direction.
        """
        self.connection = connection
        self._sends, self._takes = sends, takes
        self.most_bulk = 0
        self.place: Place = _nowhere
        self.sent_bytes = self.received_bytes = 0
        self._header = bytearray(_HEADER.size)
        self._body: bytearray | None = None
        self._filled = 0

    def send(self, request: int, message: protocol.Message, bulk: Views = ()) -> None:
        """Send a message and its bulk; one caller at a time."""
        data = protocol.pack(request, message)
        seed, self._sends = self._sends, (self._sends + 1) % 2**64
        digest = xxhash.xxh3_64(data, seed=seed)
        for part in bulk:
            digest.update(part.data)
        size = sum(len(part) for part in bulk)
        head = _HEADER.pack(MAGIC, len(data), size, digest.intdigest()) + data
        if size <= _JOINED_BYTES:
            self.connection.sendall(b"".join([head, *(part.data for part in bulk)]))
        else:
            self.connection.sendall(head)
            for part in bulk:
                self.connection.sendall(part.data)
        self.sent_bytes += len(head) + size

    def receive_some(self) -> bool:
        """Wait for bytes of the frame that is next; returns whether any came.

        Raises:
            ProtocolError: what comes is no frame.
            BlockingIOError, OSError: as `protocol.Reader`.
        """
        into = self._header if self._body is None else self._body
        if self._filled < len(into):
            try:
                count = self.connection.recv_into(memoryview(into)[self._filled :])
            except ConnectionError:
                return False
            if not count:
                return False
            self._filled += count
            self.received_bytes += count
        if self._body is None and self._filled == len(self._header):
            magic, message, bulk, _ = _HEADER.unpack(self._header)
            if magic != MAGIC:
                raise protocol.ProtocolError("what came is no frame")
            if message > _MOST_MESSAGE or bulk > self.most_bulk:
                raise protocol.ProtocolError(f"a frame of {message} and {bulk} bytes")
            self._body, self._filled = bytearray(message + bulk), 0
        return True

    def next_buffered(self) -> tuple[int, protocol.Message] | None:
        """The message of a frame that has come whole, its bulk put in its place.

        Raises:
            ProtocolError: the frame is damaged, or of another kind than it should be.
        """
        body = self._body
        if body is None or self._filled < len(body):
            return None
        _, size, bulk_bytes, checksum = _HEADER.unpack(self._header)
        seed, self._takes = self._takes, (self._takes + 1) % 2**64
        if xxhash.xxh3_64_intdigest(body, seed=seed) != checksum:
            raise protocol.ProtocolError("a frame whose checksum is another")
        self._body, self._filled = None, 0
        request, message = protocol.unpack(bytes(body[:size]))
        views = self.place(request, message)
        if sum(len(view) for view in views) != bulk_bytes:
            raise protocol.ProtocolError(f"{type(message).__name__} with {bulk_bytes} bytes")
        at = size
        for view in views:
            view[:] = np.frombuffer(body, dtype=np.uint8, count=len(view), offset=at)
            at += len(view)
        return request, message

    def receive(self) -> tuple[int, protocol.Message] | None:
        """Wait for one message; None when the other side has gone. Raises as the others."""
        while (message := self.next_buffered()) is None:
            if not self.receive_some():
                return None
        return message


def _nowhere(_: int, message: protocol.Message) -> Views:
    return ()
