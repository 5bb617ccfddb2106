"""simulate(): Penstock's modules see another operating system, on this one.

What Linux has and the other system has not is hidden from the modules of `penstock` alone: other
libraries were imported before, and go on as they are. So the roads that Penstock takes there are
run, not the other system itself.
"""

import builtins
import ctypes
import importlib
import io
import os
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

NOT_ON_MAC = {
    "os": (
        "O_DIRECT", "O_TMPFILE", "posix_fadvise", "posix_fallocate", "sched_getaffinity",
        "sched_setaffinity", "fdatasync", "memfd_create", "preadv", "pwritev", "eventfd",
    ),
    "mmap": ("MADV_HUGEPAGE", "MAP_POPULATE"),
    "socket": ("SOCK_CLOEXEC",),
}  # fmt: skip
NOT_ON_WINDOWS = {
    "os": (
        *NOT_ON_MAC["os"], "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "O_SYNC",
        "O_DSYNC", "pread", "pwrite", "fork", "forkpty", "register_at_fork", "geteuid", "getuid",
        "getgid", "fchmod", "fchown", "chown", "statvfs", "fstatvfs", "uname", "sysconf", "mkfifo",
        "getpgid", "setsid", "killpg", "set_blocking", "getloadavg", "sendfile", "sync",
    ),
    "mmap": (*NOT_ON_MAC["mmap"], "MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "MADV_DONTNEED"),
    "socket": (*NOT_ON_MAC["socket"], "AF_UNIX", "SCM_RIGHTS", "send_fds", "recv_fds"),
    "signal": ("SIGKILL", "SIGHUP", "SIGPIPE", "SIGALRM", "setitimer", "pthread_sigmask"),
}  # fmt: skip
NO_MODULES = {
    "darwin": (), "win32": ("fcntl", "resource", "termios", "pwd", "grp", "_posixshmem")
}  # fmt: skip


class _Less(ModuleType):
    """A module without some of its names, and with others."""

    def __init__(self, whole: ModuleType, hidden: Collection[str], **others: Any) -> None:
        super().__init__(whole.__name__)
        self.__dict__.update(others)
        self._whole, self._hidden = whole, frozenset(hidden) - others.keys()

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} here")
        return getattr(self._whole, name)


def import_libraries() -> None:
    """What sees the system as it is."""
    import torch  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    import typer.testing  # noqa: F401


def simulate(system: str) -> None:
    """Show Penstock "darwin" or "win32" from here on; it must not be imported yet."""
    assert "penstock" not in sys.modules
    import_libraries()
    seen: dict[str, ModuleType] = {
        name: _Less(__import__(name), hidden)
        for name, hidden in (NOT_ON_MAC if system == "darwin" else NOT_ON_WINDOWS).items()
    }
    seen["sys"] = _Less(sys, (), platform=system)
    seen["ctypes"] = _Less(ctypes, (), CDLL=_library(system))
    if system == "win32":
        seen["os"] = _Less(
            os, NOT_ON_WINDOWS["os"], name="nt", O_BINARY=0, O_TEMPORARY=_TEMPORARY, open=_open
        )
    seen["importlib"] = _Less(importlib, (), import_module=_importer(NO_MODULES[system]))
    _hide_proc()
    _import_for_penstock(seen, NO_MODULES[system])


_TEMPORARY = 1 << 40
"""Stands for Windows' flag: the file is gone with its last handle."""


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """As Windows' `os.open`: no folders, no names beside folders' handles."""
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    descriptor = os.open(path, flags & ~_TEMPORARY, mode)
    if flags & _TEMPORARY:
        os.unlink(path)
    return descriptor


def _library(system: str) -> Callable[..., Any]:
    """`ctypes.CDLL` of a system whose C library knows none of Linux's own calls."""

    def load(name: str | None, *given: Any, **more: Any) -> Any:
        if name is not None:
            return ctypes.CDLL(name, *given, **more)
        if system == "win32":
            raise TypeError("argument of type 'NoneType' is not iterable")
        return object()

    return load


def _hide_proc() -> None:
    """No file below /proc or /sys can be opened."""
    whole = io.open

    def opened(file: Any, *given: Any, **more: Any) -> Any:
        if str(file).startswith(("/proc/", "/sys/")) and "penstock" in _caller():
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return whole(file, *given, **more)

    builtins.open = io.open = opened


def _caller() -> str:
    """The first module above this one that is not of the standard library's paths and files."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"] in ("pathlib", "io"):
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


def _importer(absent: Collection[str]) -> Callable[[str], ModuleType]:
    """`importlib.import_module` without some modules."""

    def load(name: str) -> ModuleType:
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return importlib.import_module(name)

    return load


def _import_for_penstock(seen: dict[str, ModuleType], absent: Collection[str]) -> None:
    whole = builtins.__import__

    def load(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        own = str((globals or {}).get("__name__", "")).startswith("penstock")
        if own and name in seen:
            return seen[name]
        if own and name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return whole(name, globals, locals, fromlist, level)

    builtins.__import__ = load
