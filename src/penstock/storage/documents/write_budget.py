"""WriteBudget: bytes written to a library per UTC day, counted over processes, and their limit."""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError, StorageError
from penstock.storage.documents.names import WRITES_FILE
from penstock.storage.documents.small_files import is_count, locked, read_object, replace_object

KEPT_DAYS = 30
Clock = Callable[[], float]
"""Gives epoch seconds."""


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
        try:
            return datetime.fromtimestamp(self._clock(), UTC).date()
        except (OverflowError, ValueError, OSError) as error:
            raise StorageError(f"the clock tells no date ({error}); set it") from error

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
