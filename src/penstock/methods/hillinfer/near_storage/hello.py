"""The first words of a TCP connection: versions, and that both sides have the same key.

    cache -> device   magic "PNSH", version u16, 32 random bytes
    device -> cache   the same of its own, and HMAC-SHA256(key, "device" + both)
    cache -> device   HMAC-SHA256(key, "cache" + both)

Either side closes the connection where the other's proof is wrong; the key is never sent. The words
"device" and "cache" keep a proof from being used for its opposite.
"""

import hashlib
import hmac
import os
import struct
import time
from typing import NamedTuple

from penstock.methods.hillinfer.near_storage.channel import ScorerError
from penstock.methods.hillinfer.near_storage.protocol import Connection

VERSION = 1
_HELLO = struct.Struct("<4sH32s")
_MAGIC = b"PNSH"
_PROOF_BYTES = 32


class HelloError(ScorerError):
    """The other side has no key, another version, or does not speak the protocol."""


class Seeds(NamedTuple):
    """Of the checksums of the frames of a connection."""

    of_cache: int
    of_device: int


def greet(connection: Connection, key: bytes, deadline: float) -> Seeds:
    """The cache's part. deadline: by `time.monotonic`.

    Raises:
        HelloError: the other side is not a device that has the key.
        OSError: the connection failed, or the deadline has passed.
    """
    ours = _HELLO.pack(_MAGIC, VERSION, os.urandom(32))
    connection.settimeout(_left(deadline))
    connection.sendall(ours)
    theirs = _hello(connection, deadline)
    proof = _exactly(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"device", ours + theirs)):
        raise HelloError(
            "the near-storage device does not have this cache's key; give both the same key file"
        )
    connection.sendall(_proof(key, b"cache", ours + theirs))
    return _seeds(key, ours + theirs)


def welcome(connection: Connection, key: bytes, deadline: float) -> Seeds:
    """The device's part. Raises as `greet`."""
    theirs = _hello(connection, deadline)
    ours = _HELLO.pack(_MAGIC, VERSION, os.urandom(32))
    connection.sendall(ours + _proof(key, b"device", theirs + ours))
    proof = _exactly(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"cache", theirs + ours)):
        raise HelloError("a cache without this device's key")
    return _seeds(key, theirs + ours)


def _hello(connection: Connection, deadline: float) -> bytes:
    data = _exactly(connection, _HELLO.size, deadline)
    magic, version, _ = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise HelloError("the other side is no near-storage device, or no cache")
    if version != VERSION:
        raise HelloError(f"the other side speaks version {version} over TCP, this one {VERSION}")
    return data


def _exactly(connection: Connection, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(_left(deadline))
        part = connection.recv(count - len(data))
        if not part:
            raise HelloError("the other side closed the connection before it proved its key")
        data += part
    return data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _proof(key: bytes, who: bytes, hellos: bytes) -> bytes:
    return hmac.new(key, b"penstock near storage, " + who + hellos, hashlib.sha256).digest()


def _seeds(key: bytes, hellos: bytes) -> Seeds:
    data = _proof(key, b"frames", hellos)
    return Seeds(int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little"))
