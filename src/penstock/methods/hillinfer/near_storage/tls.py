"""TLS for connections between hosts: the standard library's, over bytes in memory.

An `ssl.SSLSocket` may not be written to by one thread while another reads. Here the TLS state works
on buffers (`ssl.MemoryBIO`) under a lock, and the socket is waited for without it.
"""

import binascii
import hashlib
import hmac
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from penstock.core.errors import ConfigError
from penstock.methods.hillinfer.near_storage.hello import HelloError

_PIECE = 1 << 17
FILE, FINGERPRINT = "file:", "sha256:"


class TlsError(HelloError):
    """The other side's certificate is not the one that is trusted, or there is no TLS with it."""


class Trust(NamedTuple):
    """Whom a cache takes for its host."""

    context: ssl.SSLContext
    fingerprint: bytes = b""
    """SHA-256 of its certificate; empty: the context knows who signed it, and its name counts."""

    @classmethod
    def of(cls, text: str) -> "Trust":
        """Trust as a user writes it.

        Args:
            text: "file:PATH", certificates in PEM of whom signed the host's, or the host's own; or
                "sha256:HEX", the fingerprint of the host's.

        Raises:
            ConfigError: it is neither, or cannot be read.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if text.startswith(FINGERPRINT):
            try:
                digest = binascii.unhexlify(text.removeprefix(FINGERPRINT).replace(":", ""))
            except ValueError:
                digest = b""
            if len(digest) != hashlib.sha256().digest_size:
                raise ConfigError(f"{text!r} is no fingerprint; give sha256: and 64 digits")
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return cls(context, digest)
        if not text.startswith(FILE):
            raise ConfigError(f"device_tls={text!r} must be file:PATH or sha256:HEX")
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        path = text.removeprefix(FILE)
        _load(path, lambda: context.load_verify_locations(path))
        return cls(context)

    def connect(self, connection: socket.socket, host: str, deadline: float) -> "TlsConnection":
        """Speak TLS over a connection to `host`.

        Raises:
            TlsError: the other side has another certificate, or speaks no TLS.
            OSError: the connection failed, or the deadline has passed.
        """
        try:
            tls = TlsConnection(connection, self.context, deadline, host=host)
        except ssl.SSLCertVerificationError as error:
            raise TlsError(
                f"the certificate of {host} is not trusted: {error.verify_message}"
            ) from error
        except (ssl.SSLError, EOFError, ConnectionError) as error:
            raise TlsError(f"no TLS with {host}: {error}") from error
        if self.fingerprint and not hmac.compare_digest(tls.fingerprint(), self.fingerprint):
            raise TlsError(
                f"the certificate of {host} is another: sha256:{tls.fingerprint().hex()}"
            )
        return tls


class Identity(NamedTuple):
    """A host's certificate."""

    context: ssl.SSLContext
    fingerprint: str
    """For caches that trust nothing else: "sha256:HEX"."""

    @classmethod
    def of(cls, certificate: str, key: str) -> "Identity":
        """Read both from files in PEM; `key` without a password.

        Raises:
            ConfigError: they cannot be read, or do not fit each other.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        _load(f"{certificate} and {key}", lambda: context.load_cert_chain(
            certificate, key, password=_no_password
        ))  # fmt: skip
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        first = Path(certificate).read_text(encoding="ascii", errors="replace").partition(begin)[2]
        pem = begin + first.partition(end)[0] + end
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
        return cls(context, FINGERPRINT + digest)


class TlsConnection:
    """In place of a socket, once both sides have shaken hands; one thread reads, any may write."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, deadline: float, *,
        host: str | None = None,
    ) -> None:  # fmt: skip
        """Shake hands.

        Args:
            deadline: by `time.monotonic`.
            host: whom the certificate must name; None: this is the host.

        Raises:
            OSError: that failed; `ssl.SSLError` when the other side does not suit.
            EOFError: the other side closed the connection.
        """
        self._socket = connection
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._coming, self._going, server_side=host is None, server_hostname=host
        )
        self._state, self._sending = threading.Lock(), threading.Lock()
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._fill():
                    raise EOFError("the connection was closed") from None
            except ssl.SSLError:
                self._flush()  # why, for the other side
                raise
            else:
                self._flush()
                return

    def fingerprint(self) -> bytes:
        """SHA-256 of the other side's certificate."""
        return hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").digest()

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it. Raises as a socket."""
        view = memoryview(data).cast("B")
        while len(view):
            with self._sending:  # records go in the order in which they were made
                with self._state:
                    view = view[self._tls.write(view[:_PIECE]) :]
                    made = self._going.read()
                self._socket.sendall(made)

    def recv_into(self, into: bytearray | memoryview) -> int:
        """Wait for some bytes; returns how many, 0 when the other side has gone.

        Raises:
            OSError: as a socket; `ssl.SSLError` when what came was changed on the way.
        """
        while True:
            try:
                with self._state:
                    return self._tls.read(len(into), into)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                self._flush()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            if not self._fill():
                return 0

    def recv(self, most: int) -> bytes:
        """As `recv_into`."""
        into = bytearray(most)
        return bytes(into[: self.recv_into(into)])

    def _fill(self) -> bool:
        """Wait for bytes of the socket."""
        data = self._socket.recv(_PIECE)
        with self._state:
            self._coming.write(data)
        return bool(data)

    def _flush(self) -> None:
        """Send what TLS has to say by itself."""
        if self._going.pending:
            with self._sending:
                with self._state:
                    made = self._going.read()
                self._socket.sendall(made)

    def settimeout(self, seconds: float | None) -> None:
        """Of the socket."""
        self._socket.settimeout(seconds)

    def setsockopt(self, level: int, name: int, value: int | bytes) -> None:
        """Of the socket."""
        self._socket.setsockopt(level, name, value)

    def shutdown(self, how: int) -> None:
        """Of the socket; TLS says nothing: a frame that was cut short is noticed by its length."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Of the socket."""
        self._socket.close()


def _load(what: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{what}: no certificate can be read ({reason})") from error


def _no_password() -> str:
    raise ValueError("the key wants a password; give one without")
