"""NearDevice: the cache's end of one near-storage device, and the process behind it."""

import contextlib
import os
import queue
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.child_python import python_command
from penstock.core.closing import DeferredInterrupts, close_all
from penstock.core.errors import ConfigError, StorageError
from penstock.kernels.native import compiled
from penstock.methods.hillinfer.near_storage import protocol, shared_memory
from penstock.methods.hillinfer.near_storage.channel import Channel, Link, ScorerError
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings
from penstock.storage.open_files import open_descriptors

START_TIMEOUT_S = 60.0
"""A process must answer so soon after its start."""
_GRACE_S = 2.0


class NearDevice:
    """Starts a scorer process, connects to it, and starts it again after it was lost.

    The files are opened here and handed down, so that they outlive the process and yet are gone
    with the last user. Any thread may use it.

    Attributes:
        generation: grows with every start; state that was kept with the device is sent anew
        restore: called after a restart, before anybody else's request, to send the maps
        scores, reads, writes: the channels (see `protocol`)
        link: how fast units have come
        is_empty: it began anew, and nothing was copied to it yet
        memory_bytes, coded_layers: what the device holds beside what is shared (`DeviceMemory`)
    """

    given_up = "was stopped; it is started again when it is needed next"
    program: tuple[str, ...] = ("penstock.methods.hillinfer.near_storage.device_process",)
    """Module that is run, and arguments before the descriptors."""

    def __init__(self, settings: DeviceSettings, place: str, *, timeout_s: float) -> None:
        """Open the files in `place` (see `open_files`; "memory": nameless memory) and start.

        Args:
            timeout_s: most seconds to wait for an answer.

        Raises:
            ConfigError: the system has no sockets between processes, or `place` makes no sense.
            StorageError: `place` cannot be used, or the process does not start.
        """
        if os.name != "posix":
            raise ConfigError("near-storage devices need Unix sockets; give near=false here")
        self.timeout_s = timeout_s
        self.generation = 0
        self.restore: Callable[[], None] = lambda: None
        self._descriptors: list[int] = []
        self._state = _State()
        self._close = weakref.finalize(self, _end, self._state, self._descriptors)
        self.lock = threading.RLock()
        """For starting and stopping."""
        self._sparing = threading.Lock()
        self.link = Link()
        self.sector_bytes, self.is_direct, self.description = 1, False, ""
        self.memory_bytes = self.coded_layers = 0
        self.is_empty = False
        self.write_lock = threading.Lock()
        """For `write_section`."""
        try:
            self._share_memory(self._open(settings, place))
            self._start()
        except BaseException:
            self._close()
            raise
        self._state.is_ready = True

    # Life -------------------------------------------------------------------------------------

    def _open(self, settings: DeviceSettings, place: str) -> DeviceSettings:
        """Open the files; returns the settings with what the process must know of them."""
        if place == "memory":
            for _ in range(settings.layers):
                with DeferredInterrupts():
                    self._descriptors.append(shared_memory.create(0))
            return replace(settings, in_memory=True)
        with DeferredInterrupts():
            opened = open_descriptors(place, settings.layers)
            self._descriptors += opened.numbers
        return replace(settings, directory=opened.directory, direct=opened.direct)

    def _share_memory(self, settings: DeviceSettings) -> None:
        """Serve these settings: make the shared memory, which outlives a process, so that no bytes
        are lost with one. Where that fails nothing is changed."""
        division, state = settings.division, self._state
        made = shared_memory.create(division.num_bytes)
        try:
            self.memory: NDArray[np.uint8] = shared_memory.attach(made, division.num_bytes)
        except BaseException:
            os.close(made)
            raise
        if state.memory >= 0:
            os.close(state.memory)
        state.memory = made
        self._divide(settings, self.memory)

    def _divide(self, settings: DeviceSettings, memory: NDArray[np.uint8]) -> None:
        division = settings.division
        self.memory, self.settings = memory, settings
        self.areas = [division.area(self.memory, i) for i in range(shared_memory.NUM_AREAS)]
        self.sections: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(shared_memory.NUM_SECTIONS):
            self.sections.put(division.section(i))
        self.write_section = division.section(shared_memory.NUM_SECTIONS)
        self.map_section = division.section(shared_memory.NUM_SECTIONS + 1)

    def _start(self) -> None:
        state = self._state
        state.is_ready = False  # until the state kept with the device was sent anew
        if not hasattr(socket, "AF_UNIX"):
            raise StorageError(
                "near-storage devices need Unix sockets, which this system lacks; give "
                "HillInfer(near=False), or another policy"
            )
        try:
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
        except OSError as error:
            raise StorageError(f"cannot start a near-storage device: {error}") from error
        state.failure = None
        # A dropped device is ended by who holds the channels: they must not hold the device.
        state.channels = [Channel(ours, weakref.proxy(self)) for ours, _ in pairs]
        self.scores, self.reads, self.writes = state.channels
        handed = [*(theirs.fileno() for _, theirs in pairs), state.memory]
        try:
            with DeferredInterrupts():  # a process that was begun must be known, to be ended
                state.process = subprocess.Popen(
                    python_command(*self.program, *map(str, handed)),
                    pass_fds=[*handed, *self._descriptors], stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise StorageError(f"cannot start a near-storage device: {error}") from error
        finally:
            for _, theirs in pairs:
                theirs.close()
        self.generation += 1
        settings = {
            **self.settings.as_json(), "descriptors": self._descriptors,
            "kernels": compiled.limited_to(),
        }  # fmt: skip
        exchange = self.scores.begin(protocol.Configure(settings))
        message = exchange.next(time.monotonic() + max(START_TIMEOUT_S, self.timeout_s))
        if not isinstance(message, protocol.Ready):
            raise self.scores.nonsense("no Ready after Configure")
        self.scores.forget(exchange)
        self._take_ready(message.values)

    def _take_ready(self, said: dict[str, Any]) -> None:
        try:
            self.sector_bytes = int(said["sector_bytes"])
            self.is_direct, self.description = bool(said["is_direct"]), str(said["description"])
            self.memory_bytes = int(said["memory_bytes"])
            self.coded_layers = int(said["coded_layers"])
        except (KeyError, TypeError, ValueError):
            raise self.scores.nonsense("a Ready message without its fields") from None

    def ensure_alive(self) -> None:
        """Start the process again if it was lost.

        Raises:
            StorageError: it does not start, or the store is closed.
        """
        if self.is_alive():
            return
        with self.lock:
            if self.is_alive():
                return
            self._end_if_closed()
            _stop(self._state)
            self._start()
            self._end_if_closed()
            self.restore()
            self._state.is_ready = True

    def _end_if_closed(self) -> None:
        """Another thread may close the store while one is started."""
        if self._state.closed:
            _stop(self._state)
            raise StorageError("the store is closed")

    @property
    def failure(self) -> ScorerError | None:
        """Why it was given up, until it is started again."""
        return self._state.failure

    def is_alive(self) -> bool:
        """Whether it was started and not given up."""
        return self._state.is_ready and self._state.failure is None

    def renew(self, settings: DeviceSettings) -> None:
        """Stop the process and start it anew for other settings (another batch); files stay."""
        with self.lock:
            self.give_up(ScorerError("the near-storage device was started anew"))
            _stop(self._state)
            self._share_memory(replace(
                settings, directory=self.settings.directory, direct=self.settings.direct,
                in_memory=self.settings.in_memory,
            ))  # fmt: skip
            self._start()
            self._state.is_ready = True

    def give_up(self, error: ScorerError) -> None:
        """End all channels: waiting threads get `error`, and the process is killed."""
        state = self._state
        if state.failure is None:
            state.failure = error
        for channel in state.channels:
            channel.failure = channel.failure or error
        if state.process is not None:
            state.process.kill()  # which wakes threads that are blocked in a channel

    def gone(self) -> ScorerError:
        """Why the process has closed a connection; gives it up."""
        state, code = self._state, None
        if state.failure is not None:
            return state.failure
        if state.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = state.process.wait(_GRACE_S)
        how = "closed its connection" if code is None else f"ended with status {code}"
        error = ScorerError(
            f"the near-storage device {how}; it is started again when it is needed next"
        )
        self.give_up(error)
        return error

    @property
    def process_id(self) -> int | None:
        """Of the process, while there is one."""
        process = self._state.process
        return None if process is None else process.pid

    def close(self) -> None:
        """Stop the process and let the files go; a second call does nothing."""
        self._state.closed = True
        close_all(lambda: self.give_up(ScorerError("the store is closed")), self._close)

    # Requests ---------------------------------------------------------------------------------

    def spare_section(self) -> int | None:
        """A section of the shared memory for who may never wait; None where only one is left, which
        is for those who wait."""
        with self._sparing:
            if self.sections.qsize() < 2:
                return None
            try:
                return self.sections.get_nowait()
            except queue.Empty:
                return None

    def call(self, channel: Channel, message: protocol.Message, patience_s: float = 0.0) -> int:
        """Send a request and wait for `Done`; returns nanoseconds worked. Raises as `Exchange`."""
        return channel.begin(message).done(self.deadline(patience_s))

    def deadline(self, patience_s: float = 0.0) -> float:
        """When an answer to what is sent now is late, by `time.monotonic`."""
        return time.monotonic() + self.timeout_s + patience_s


class _State:
    """What must be ended when a `NearDevice` is dropped."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.channels: list[Channel] = []
        self.failure: ScorerError | None = None
        self.is_ready = False
        self.memory = -1
        self.closed = False


def _stop(state: _State) -> None:
    close_all(lambda: _kill(state), *(channel.close for channel in state.channels))


def _kill(state: _State) -> None:
    if state.process is not None:
        state.process.kill()
        state.process.wait()
        state.process = None


def _end(state: _State, descriptors: list[int]) -> None:
    state.closed = True
    numbers = [number for number in (*descriptors, state.memory) if number >= 0]
    close_all(lambda: _stop(state), *(partial(os.close, number) for number in numbers))
    descriptors.clear()
    state.memory = -1
