"""DeviceHost: near-storage devices on this host, for caches on others, over TCP."""

import contextlib
import os
import socket
import threading
import time
from dataclasses import replace

from penstock.core.errors import StorageError
from penstock.core.ledger import MemoryLedger, Reservation
from penstock.methods.hillinfer.near_storage import protocol, shared_memory
from penstock.methods.hillinfer.near_storage.address import split_address
from penstock.methods.hillinfer.near_storage.bulk import Bulk, Piece
from penstock.methods.hillinfer.near_storage.device_memory import DeviceMemory
from penstock.methods.hillinfer.near_storage.device_process import Device, carry_out, failed
from penstock.methods.hillinfer.near_storage.frames import Frames
from penstock.methods.hillinfer.near_storage.hello import welcome
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings
from penstock.methods.hillinfer.near_storage.tls import Identity, TlsConnection
from penstock.storage.open_files import Descriptors, open_descriptors, wrap_descriptors

HELLO_S = 5.0
"""Most seconds until a connection has proved its key."""
MOST_CONNECTIONS = 192
"""Further ones are closed at once."""
KEEP_S = 600.0
_TAKE_OVER_S = 10.0


class _Pool:
    """What one cache has here; it outlives the cache's connections."""

    def __init__(
        self, settings: DeviceSettings, opened: Descriptors, held: DeviceMemory,
        memory: Reservation,
    ) -> None:  # fmt: skip
        self._descriptors, self.reservation = opened.numbers, memory
        self.files = wrap_descriptors(opened)
        self.instance, self.session = os.urandom(16).hex(), ""
        self.writes = self.area = 0
        self.joined: list[tuple[Frames, threading.Thread]] = []
        self.left_at = time.monotonic()
        self.serve(settings, held)

    def serve(self, settings: DeviceSettings, held: DeviceMemory) -> None:
        """Serve these settings; files stay, codes are made from them again."""
        memory = shared_memory.unshared(settings.division.num_bytes)
        self.settings, self.bulk = settings, Bulk(memory, settings.division)
        self.held = held
        self.device = Device(settings, self.files, memory, lambda *_: None, held, self._descriptors)

    def close(self) -> None:
        """End the connections, and let files and memory go."""
        self.leave()
        self.files.close()
        self.reservation.release()

    def leave(self) -> None:
        """End the connections that there are, and wait for what they have begun.

        Raises:
            StorageError: it does not end.
        """
        self.session = ""
        others = [each for each in self.joined if each[1] is not threading.current_thread()]
        for frames, _ in others:
            with contextlib.suppress(OSError):
                frames.connection.shutdown(socket.SHUT_RDWR)
        for _, thread in others:
            thread.join(_TAKE_OVER_S)
            if thread.is_alive():
                raise StorageError("the pool's last request has not ended yet; try again later")
        self.joined = []


class DeviceHost:
    """Listens for caches that have the key, and keeps a pool for each.

    Files lie in one directory and have no name: they are gone with this process, whose caches are
    then told that their pools are lost. A pool whose cache is away is kept for `keep_s`.

    Attributes:
        address: host:port, as it is listened to
    """

    def __init__(
        self, key: bytes, *, listen: str = "127.0.0.1:0", disk: str = "auto",
        memory_bytes: int | None = None, keep_s: float = KEEP_S, identity: Identity | None = None,
    ) -> None:  # fmt: skip
        """Listen; `start` or `serve` answers.

        Args:
            disk: directory of the pools, or "auto".
            memory_bytes: most memory of all pools together; None: no bound. The codes of a pool
                that does not fit are read from its files.
            identity: the certificate that it shows; None: nothing is encrypted.

        Raises:
            ConfigError: the address makes no sense.
            StorageError: it cannot be listened to.
        """
        self._key, self._disk, self._keep_s = key, disk, keep_s
        self._identity = identity
        self._bounded = memory_bytes is not None
        self.ledger = MemoryLedger((1 << 62) if memory_bytes is None else memory_bytes)
        self._pools: dict[str, _Pool] = {}
        self._lock, self._counting = threading.RLock(), threading.Lock()
        # Of pools, and of connections: who holds the first waits for connections to end.
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        host, port = split_address(listen)
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            raise StorageError(f"cannot listen on {listen}: {error.strerror or error}") from error
        self._listener.settimeout(0.25)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread: threading.Thread | None = None

    def start(self) -> "DeviceHost":
        """Serve on a thread."""
        self._thread = threading.Thread(target=self.serve, name="penstock devices", daemon=True)
        self._thread.start()
        return self

    def serve(self) -> None:
        """Answer until `close`."""
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._forget_left()
                continue
            except OSError:
                break
            with self._counting:
                if self._closed.is_set() or len(self._open) >= MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._open.add(connection)
            threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """End all connections and drop all pools; a second call does nothing."""
        self._closed.set()
        self._listener.close()
        with self._counting:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.close()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "DeviceHost":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget_left(self) -> None:
        late = time.monotonic() - self._keep_s
        with self._lock:
            for name, pool in list(self._pools.items()):
                if not any(thread.is_alive() for _, thread in pool.joined) and pool.left_at < late:
                    del self._pools[name]
                    pool.close()

    # A connection -----------------------------------------------------------------------------

    def _handle(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):  # the cache has gone, or has no key
                deadline = time.monotonic() + HELLO_S
                over: protocol.Connection = connection
                if self._identity is not None:
                    over = TlsConnection(connection, self._identity.context, deadline)
                seeds = welcome(over, self._key, deadline)
                _keep_alive(connection)
                frames = Frames(over, seeds.of_device, seeds.of_cache)
                connection.settimeout(HELLO_S)
                received = frames.receive()
                connection.settimeout(None)
                if received is not None:
                    self._begin(frames, *received)
        finally:
            with self._counting:
                self._open.discard(connection)
            connection.close()

    def _begin(self, frames: Frames, request: int, message: protocol.Message) -> None:
        try:
            if isinstance(message, protocol.Configure):
                pool, answer = self._configure(frames, dict(message.values))
            elif isinstance(message, protocol.Join):
                pool, answer = self._join(frames, message.values), protocol.Done(0)
            else:
                raise protocol.ProtocolError("the first message must be Configure or Join")
        except Exception as error:
            frames.send(request, failed(error))
            return
        frames.send(request, answer)
        try:
            self._work(pool, frames)
        finally:
            pool.left_at = time.monotonic()

    def _configure(
        self, frames: Frames, values: dict[str, object]
    ) -> tuple[_Pool, protocol.Message]:
        name, instance = str(values.pop("pool", "")), str(values.pop("instance", ""))
        given = DeviceSettings.from_json(values)
        given = replace(given, directory="", direct=False, in_memory=False)
        with self._lock:
            if self._closed.is_set():
                raise StorageError("the device is being stopped")
            pool = self._pools.get(name)
            if pool is not None:
                pool.leave()
            if instance and (pool is None or pool.instance != instance):
                raise StorageError("the pool is lost: the device was started anew")
            if pool is None:
                pool = self._pools[name] = self._make(given)
            elif pool.settings != given:
                pool.reservation.release()
                held, pool.reservation = self._take(given)
                pool.serve(given, held)
            pool.session = os.urandom(16).hex()
            self._add(pool, frames)
        lock = threading.Lock()

        def send(request: int, message: protocol.Message) -> None:
            pieces: list[Piece] = []
            if isinstance(message, protocol.Logits):
                pieces = pool.bulk.pieces(message)
            elif isinstance(message, protocol.Block):
                pieces = pool.bulk.block(pool.area, message)
            with lock:
                frames.send(request, message, pool.bulk.views(pieces))

        pool.device.answer_to(send)
        first = pool.device.files[0]
        return pool, protocol.Ready({
            "sector_bytes": first.sector_bytes, "is_direct": first.is_direct,
            "description": f"{self.address}: {pool.files.description}",
            "instance": pool.instance, "session": pool.session, "writes": pool.writes,
            "memory_bytes": pool.held.num_bytes, "coded_layers": pool.held.coded_layers,
        })  # fmt: skip

    def _make(self, settings: DeviceSettings) -> _Pool:
        held, memory = self._take(settings)
        try:
            return _Pool(settings, open_descriptors(self._disk, settings.layers), held, memory)
        except BaseException:
            memory.release()
            raise

    def _take(self, settings: DeviceSettings) -> tuple[DeviceMemory, Reservation]:
        """Memory for a pool: what is free holds as many of its codes as fit."""
        limits = [settings.device_memory or None, self.ledger.free_bytes if self._bounded else None]
        limit = min((each for each in limits if each is not None), default=None)
        held = DeviceMemory.within(settings, limit, over_tcp=True)
        return held, self.ledger.take("a cache's pool", held.num_bytes)

    def _join(self, frames: Frames, values: dict[str, object]) -> _Pool:
        with self._lock:
            for pool in self._pools.values():
                if pool.session and pool.session == values.get("session"):
                    self._add(pool, frames)
                    return pool
        raise StorageError("there is no such session")

    def _add(self, pool: _Pool, frames: Frames) -> None:
        pool.joined.append((frames, threading.current_thread()))
        division = pool.settings.division
        frames.most_bulk = max(division.section_bytes, division.area_bytes)
        frames.place = lambda _, message: pool.bulk.views(pool.bulk.pieces(message))

    def _work(self, pool: _Pool, frames: Frames) -> None:
        begun = 0
        while (received := frames.receive()) is not None:
            request, message = received
            start = time.perf_counter_ns()
            if isinstance(message, protocol.Drop):
                self._drop(pool)
                frames.send(request, protocol.Done(0))
                return
            answer: protocol.Message
            try:
                if isinstance(message, protocol.Score | protocol.Normalise):
                    pool.area = message.area
                waits = carry_out(pool.device, request, message)
                took = time.perf_counter_ns() - start + begun
                begun = took if waits else 0
                if waits:
                    continue
                answer = protocol.Done(took)
                if isinstance(message, protocol.Write):
                    pool.writes += 1
                if isinstance(message, protocol.Read):
                    found = pool.bulk.views(pool.bulk.read_by(message))
                    frames.send(request, answer, found)
                    continue
            except Exception as error:  # whatever it is, the other side must not wait for it
                answer = failed(error)
            frames.send(request, answer)

    def _drop(self, pool: _Pool) -> None:
        with self._lock:
            for name, each in list(self._pools.items()):
                if each is pool:
                    del self._pools[name]
                    pool.close()


def _keep_alive(connection: socket.socket) -> None:
    """A peer that is gone without a word is noticed after a minute or so."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
