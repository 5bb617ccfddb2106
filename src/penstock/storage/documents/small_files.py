"""Small JSON files of a library: read whole or not at all, replaced whole, one writer at a time."""

import contextlib
import importlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from penstock.core.errors import DocumentBusyError, StorageError
from penstock.storage.file import write_error

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ImportError:  # Windows: no such locks; two commands at once may lose a count
    fcntl = None

PARTIAL_SUFFIX = ".partial"
"""Ends the name of a file that was being written when its process died."""
LOCK_TIMEOUT_S = 30.0
"""Longer than anything under the lock takes."""
_LOCK_GLANCE_S = 0.02
_OBJECT_BYTES_MAX = 1 << 20


class StoredObject(NamedTuple):
    """What a small JSON file holds."""

    content: dict[str, Any]
    """Empty where there is no file, or a damaged one."""
    damage: str | None
    """What is wrong with the file, or None."""


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value out of a file can be a number of things or bytes."""
    return type(value) is int and 0 <= value < 1 << 63


@contextlib.contextmanager
def locked(folder: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Keep other threads and processes out of the small files of `folder` for a moment.

    Raises:
        DocumentBusyError: another one has kept the lock for `timeout_s`; says who, where known.
        StorageError: there is no such folder, or it cannot be locked.
    """
    if fcntl is None:
        yield
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"cannot open the library {folder}: {error.strerror}") from error
    try:
        _lock(descriptor, folder, timeout_s)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise DocumentBusyError(
                    f"the library {folder} has been locked for {timeout_s:.3g} s by "
                    f"{_holder(descriptor)}; wait for it to end, or end it"
                ) from error
            time.sleep(_LOCK_GLANCE_S)
        except OSError as error:
            raise StorageError(f"cannot lock the library {folder}: {error.strerror}") from error


def _holder(descriptor: int) -> str:
    """Who has a lock on the file, by the list that Linux keeps."""
    with contextlib.suppress(OSError, ValueError), open("/proc/locks", encoding="ascii") as locks:
        inode = str(os.fstat(descriptor).st_ino)
        for line in locks:
            # "1: FLOCK  ADVISORY  WRITE 4711 fe:01:1234 0 EOF"; "->" stands before who waits.
            parts = line.split()
            if parts[1:2] == ["FLOCK"] and parts[5].rpartition(":")[2] == inode:
                return f"process {parts[4]}"
    return "another process"


def read_object(path: Path) -> StoredObject:
    """Read a JSON object of ours; links are not followed, and nothing but a small file is read.

    Raises:
        StorageError: it is there and may not be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    if path.is_symlink():  # said here for systems without O_NOFOLLOW
        return StoredObject({}, "it is a symbolic link")
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return StoredObject({}, None)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return StoredObject({}, "it is not a file")
        text = os.read(descriptor, _OBJECT_BYTES_MAX + 1)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if len(text) > _OBJECT_BYTES_MAX:
        return StoredObject({}, "it is too large")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return StoredObject({}, "it is no JSON")
    if not isinstance(content, dict):
        return StoredObject({}, "it is no JSON object")
    return StoredObject(content, None)


def replace_object(path: Path, content: Mapping[str, Any], *, sync: bool) -> None:
    """Replace a JSON file whole, or leave the old one as it is.

    Args:
        sync: have it on the disk before the old one goes, for a power failure.

    Raises:
        StoreFullError: no room.
        StorageError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    try:
        try:
            with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
                file.write(json.dumps(content, sort_keys=True, allow_nan=False).encode() + b"\n")
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise write_error(error, f"write {path}") from error
