"""WriteBudget: bytes written to a library per UTC day, counted over processes, and their limit."""

import contextlib
import importlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError, StorageError
from penstock.storage.documents.names import WRITES_FILE
from penstock.storage.file import write_error

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ImportError:  # Windows: no such locks; two commands at once may lose a count
    fcntl = None

KEPT_DAYS = 30
PARTIAL_SUFFIX = ".partial"
"""Ends the name of a file that was being written when its process died."""
_OBJECT_BYTES_MAX = 1 << 20
Clock = Callable[[], float]
"""Gives epoch seconds."""


class StoredObject(NamedTuple):
    """What a small JSON file holds."""

    content: dict[str, Any]
    """Empty where there is no file, or a damaged one."""
    damage: str | None
    """What is wrong with the file, or None."""


class _Counts(NamedTuple):
    days: dict[str, int]
    total_bytes: int


class WriteBudget:
    """Counts the bytes written to a library and holds them to a limit per UTC day.

    A damaged file is begun anew. A day that a wrong clock put far away is dropped from the days;
    its bytes stay in the total.

    Attributes:
        limit_bytes: per UTC day; None for none
        notice: what was wrong with the file when it was last read; None if nothing
    """

    def __init__(
        self, root: Path, limit_bytes: int | None = None, *, clock: Clock = time.time
    ) -> None:
        assert limit_bytes is None or limit_bytes >= 0, limit_bytes
        self.limit_bytes = limit_bytes
        self.notice: str | None = None
        self._root, self._path, self._clock = root, root / WRITES_FILE, clock

    @property
    def today_bytes(self) -> int:
        """Bytes written on this UTC day."""
        return self._read().days.get(self._today().isoformat(), 0)

    @property
    def total_bytes(self) -> int:
        """Bytes ever written."""
        return self._read().total_bytes

    def days(self) -> dict[str, int]:
        """Bytes written on each of the last days ("2026-01-31"), oldest first."""
        return dict(sorted(self._read().days.items()))

    def add(self, num_bytes: int) -> None:
        """Count bytes that were written.

        Raises:
            StorageError: the count cannot be written.
        """
        assert num_bytes >= 0, num_bytes
        with locked(self._root):
            days, total_bytes = self._read()
            today = self._today()
            days[today.isoformat()] = days.get(today.isoformat(), 0) + num_bytes
            kept = {
                day: count for day, count in sorted(days.items())
                if abs(date.fromisoformat(day) - today) < timedelta(days=KEPT_DAYS)
            }  # fmt: skip
            replace_object(
                self._path, {"total_bytes": total_bytes + num_bytes, "days": kept}, sync=True
            )

    def require(self, num_bytes: int) -> None:
        """Refuse a write that would pass the day's limit; counts nothing.

        Raises:
            ConfigError: it would; says when it may be tried again.
            StorageError: the counts cannot be read.
        """
        assert num_bytes >= 0, num_bytes
        if self.limit_bytes is None:
            return
        limit = format_bytes(self.limit_bytes)
        if num_bytes > self.limit_bytes:
            raise ConfigError(
                f"writing {format_bytes(num_bytes)} passes a whole day's budget of {limit}; raise "
                "the library's budget of writes per day"
            )
        today_bytes = self.today_bytes
        if today_bytes + num_bytes > self.limit_bytes:
            again = self._today() + timedelta(days=1)
            raise ConfigError(
                f"writing {format_bytes(num_bytes)} would pass the day's budget of {limit} "
                f"({format_bytes(today_bytes)} are written); try again from {again} 00:00 UTC on, "
                "or raise the library's budget of writes per day"
            )

    def _today(self) -> date:
        return datetime.fromtimestamp(self._clock(), UTC).date()

    def _read(self) -> _Counts:
        content, damage = read_object(self._path)
        counts = _counts_in(content)
        if content and counts is None:
            damage = "it does not hold counts"
        self.notice = damage and (
            f"{self._path} was damaged ({damage}) and is begun anew: what was written so far is "
            "not known"
        )
        return counts or _Counts({}, 0)


def _counts_in(content: Mapping[str, Any]) -> _Counts | None:
    days, total_bytes = content.get("days"), content.get("total_bytes")
    if not isinstance(days, dict) or not is_count(total_bytes):
        return None
    for day, count in days.items():
        try:
            date.fromisoformat(day)
        except ValueError:
            return None
        if not is_count(count):
            return None
    return _Counts(days, max(total_bytes, sum(days.values())))


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value out of a file can be a number of things or bytes."""
    return type(value) is int and 0 <= value < 1 << 63


# Small JSON files, the library's other ones too ---------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other threads and processes out of the small files of `folder` for a moment.

    Raises:
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
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise StorageError(f"cannot lock the library {folder}: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)


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
