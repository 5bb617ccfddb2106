"""Journal: every measurement of a tuning run, on disk as soon as it is made, so that none is lost.

A run that was interrupted finds its own measurements again and makes only those that are missing.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.core.atomic_write import json_kind, require_own
from penstock.core.errors import StorageError
from penstock.core.regular_file import read_regular

FORMAT = "penstock-tuning-1"
JOURNAL = json_kind("journal of penstock", "penstock-tuning-")
_BYTES_MAX = 1 << 30


class Journal:
    """Measurements by what was measured; a line of JSON each. Use `measured` for all of them."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        """Open a journal and read what an interrupted run of the same kind left there.

        Args:
            path: None: nothing is kept.
            about: what must be the same for measurements to hold: model, machine, versions.

        Raises:
            ConfigError: the file is there, and is something else.
            StorageError: the file cannot be written.
        """
        self._path = path
        self._known: dict[str, Any] = {}
        self.made = 0
        """Measurements of this run."""
        self.used: set[str] = set()
        """What was asked for, made now or by an earlier run."""
        if path is None:
            return
        head = json.dumps({"format": FORMAT, **about}, sort_keys=True)
        try:
            require_own(path, JOURNAL, "the measurements' file")
            content = read_regular(path, _BYTES_MAX) if path.exists() else b""
            lines = content.decode("utf-8").splitlines()
            if lines and lines[0] == head:
                self._known = dict(_entries(lines[1:]))
                if not content.endswith(b"\n"):  # a crash cut the last line off
                    with path.open("a", encoding="utf-8") as file:
                        file.write("\n")
            else:
                path.write_text(head + "\n", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StorageError(f"cannot write {path}: {reason}") from error

    def measured(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """What `measure` returns (plain data), or what it returned when it was run before."""
        if self.knows(key):
            return self.recall(key)
        found = measure()
        self.note(key, found)
        return found

    def knows(self, key: Mapping[str, Any]) -> bool:
        """Whether this was measured."""
        return _name(key) in self._known

    def recall(self, key: Mapping[str, Any]) -> Any:
        """What was measured."""
        self.used.add(_name(key))
        return self._known[_name(key)]

    def note(self, key: Mapping[str, Any], found: Any) -> None:
        """Keep a measurement.

        Raises:
            StorageError: the disk is full, or gone.
        """
        self.made += 1
        self.used.add(_name(key))
        self._known[_name(key)] = found
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": _name(key), "found": found}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror or error}") from error

    def remove(self) -> None:
        """The run is over and its result is saved."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _entries(lines: list[str]) -> list[tuple[str, Any]]:
    """What is whole: a line that was cut off by a crash is left out."""
    out = []
    for line in lines:
        try:
            entry = json.loads(line)
            out.append((str(entry["key"]), entry["found"]))
        except (ValueError, KeyError, TypeError):
            continue
    return out
