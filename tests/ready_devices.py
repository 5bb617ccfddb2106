"""Near-storage devices that are forked from a process which holds numpy and Penstock.

Most of such a device's start is imports: a quarter of a second, where a fork takes a hundredth.
The forked process is a child of the test, as one is that `subprocess` starts.
"""

import ctypes
import fcntl
import importlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from penstock.core.child_python import import_path

ROOT = str(Path(__file__).parents[1])
PRELOADED = (
    "penstock.devices.presets", "penstock.devices.throttle",
    "penstock.methods.hillinfer.near_storage.streamed_keys", "penstock.storage.throttled_file",
    "penstock.methods.hillinfer.near_storage.protocol", "penstock.storage.open_files",
)  # fmt: skip
"""What a device imports. Its own module runs as a program."""
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
"""The system call."""
_BESIDE = 0x8000 | signal.SIGCHLD
"""CLONE_PARENT: a child of this process's parent."""
_HIGH = 400
"""Descriptors from here on are the forking process's own: no test has so many."""
_MOST = 200


class Start(NamedTuple):
    """What the forking process is told; the descriptors come with it."""

    code: str
    arguments: list[str]
    folder: str
    numbers: list[int]
    """Of the descriptors, in the new process."""


@contextmanager
def ready_devices() -> Iterator[None]:
    """Near-storage devices that start within are forked; where that is impossible, they start."""
    import pytest  # which the forking process needs not

    if _CLONE is None:
        yield
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path[:] = {[*import_path(), ROOT]!r}; "
    code += "import tests.ready_devices as ready; "
    code += f"start = ready.wait({theirs.fileno()}); sys.argv = ['-c', *start.arguments]; "
    code += "exec(compile(start.code, '<program>', 'exec'), {'__name__': '__main__'})"
    forking = subprocess.Popen(
        [sys.executable, "-P", "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a fork has none of the others
    )  # fmt: skip
    theirs.close()

    class Forked(subprocess.Popen[bytes]):
        """A Python program, begun by a fork."""

        def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
            super().__init__(command, pass_fds=pass_fds)

        def _execute_child(
            self, args: list[str], executable: None, preexec_fn: None, close_fds: bool,
            pass_fds: Sequence[int], *_: Any,
        ) -> None:  # fmt: skip
            at, numbers = args.index("-c"), [1, 2, *pass_fds]
            start = Start(args[at + 1], args[at + 2 :], os.getcwd(), numbers)
            socket.send_fds(ours, [json.dumps(start).encode()], numbers)
            self.pid = int(ours.recv(16))
            self._child_created = True

    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    place = "penstock.methods.hillinfer.near_storage.device_client.subprocess"
    with forking, ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, stand_in)
        yield


def wait(number: int) -> Start:
    """Fork for each request on a socket; returns in the forked process. Exits with the test."""
    for module in PRELOADED:
        importlib.import_module(module)
    control = socket.socket(fileno=fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH))
    os.close(number)
    call = ctypes.PyDLL(None).syscall
    while True:
        said, received, _, _ = socket.recv_fds(control, 1 << 16, _MOST)
        if not said:
            sys.exit()
        high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _HIGH) for each in received]
        for each in received:
            os.close(each)
        process = call(_CLONE, _BESIDE, 0, 0, 0, 0)
        if not process:
            break
        for each in high:
            os.close(each)
        control.send(str(process).encode())
    control.close()
    start = Start(*json.loads(said))
    for each, wanted in zip(high, start.numbers, strict=True):
        os.dup2(each, wanted)
        os.close(each)
    os.setsid()
    os.chdir(start.folder)
    return start
