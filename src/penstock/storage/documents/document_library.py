"""Library: a folder of stored documents by name, what each is and when it was last asked."""

import contextlib
import difflib
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from penstock.core.errors import (
    ConfigError,
    DocumentBusyError,
    DocumentKeyError,
    PenstockError,
    StorageError,
)
from penstock.storage.documents.disk import typed_errors
from penstock.storage.documents.document import LOCK, lock_document, open_document_folder
from penstock.storage.documents.folder import (
    Summary,
    is_unfinished,
    read_summary,
    remove,
    remove_all,
    size_bytes,
)
from penstock.storage.documents.manifest import MANIFEST
from penstock.storage.documents.names import SETTINGS_FILE, WRITES_FILE, check_name, is_name
from penstock.storage.documents.quota import LibrarySettings, read_settings, write_settings
from penstock.storage.documents.real_disk import REAL_DISK
from penstock.storage.documents.small_files import (
    PARTIAL_SUFFIX,
    is_count,
    locked,
    read_object,
    replace_object,
)
from penstock.storage.documents.write_budget import Clock, WriteBudget

USAGE_FILE = "usage.json"
_PARTIAL = re.compile(
    rf"({re.escape(SETTINGS_FILE)}|{re.escape(WRITES_FILE)}|{re.escape(USAGE_FILE)})"
    rf"\.[0-9a-f]{{16}}{re.escape(PARTIAL_SUFFIX)}"
)
_NEAR_NAMES = 5
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One document of a library, as its manifest and its usage file say."""

    name: str
    state: str
    """"ready", "unfinished" (no commit yet, or killed before it), or "unreadable: why"."""
    size_bytes: int
    """On disk."""
    encrypted: bool | None = None
    """None where the manifest cannot say."""
    generation: int | None = None
    title: str | None = None
    tokens: int | None = None
    model: str | None = None
    policy: str | None = None
    created: float | None = None
    """Epoch seconds; the manifest's own time where it does not say, or only to who has the key."""
    last_asked: float | None = None
    """Epoch seconds; None if never."""
    asks: int = 0
    written_bytes: int = 0
    """Ever written to it."""


class _Usage(NamedTuple):
    last_asked: float | None = None
    asks: int = 0
    written_bytes: int = 0


class Collected(NamedTuple):
    """What a collection of garbage did."""

    removed: list[str]
    """Unfinished documents without a writer."""
    stray_files: list[str]
    """Half-written files of the library, relative to its root; they are gone."""
    freed_bytes: int
    busy: list[str]
    """Unfinished documents that a process writes, or has just finished."""
    failed: list[str]
    """What could not be removed, with the reason."""
    left_alone: list[str]
    """Names in the root that are not ours."""


def make_own_folder(path: Path, what: str) -> None:
    """Make a folder that its owner alone may read, unless it is there.

    Args:
        what: it is for, in errors.

    Raises:
        ConfigError: there is something else than a folder, or no folder for it.
        StorageError: the folder cannot be made.
    """
    if not (os.path.exists(path) or os.path.exists(path.parent)):
        raise ConfigError(
            f"there is no folder {path.parent} for {what}; make it first (mkdir -p), or give "
            "another"
        )
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{path} is not a folder; give another for {what}") from None
    except OSError as error:
        raise StorageError(f"cannot make {what} {path}: {error.strerror}") from error


class Library:
    """A folder with one folder per document; more than one process may use it at once.

    Attributes:
        root: where it is
        clock: gives epoch seconds
    """

    def __init__(self, root: Path, *, clock: Clock = time.time) -> None:
        """Open a library, or make an empty one that its owner alone may read.

        Raises:
            ConfigError: there is something else than a folder, or no folder for it.
            StorageError: the folder cannot be made.
        """
        self.root, self.clock = root, clock
        make_own_folder(root, "the library")

    # Documents --------------------------------------------------------------------------------

    def folder(self, name: str) -> Path:
        """Where a document of this name is, or would be.

        Raises:
            ConfigError: the name cannot be, or there is a link or a file of that name.
        """
        path = self.root / check_name(name)
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return path
        except OSError as error:
            raise StorageError(f"cannot look at {path}: {error.strerror}") from error
        if not stat.S_ISDIR(mode):
            what = "a symbolic link" if stat.S_ISLNK(mode) else "not a folder"
            raise ConfigError(f"{path} is {what}; move it away, or give another name")
        return path

    def find(self, name: str) -> Path:
        """The folder of a document that there is, finished or not.

        Raises:
            ConfigError: there is none; names the nearest.
        """
        folder = self.folder(name)
        if _is_ours(folder):
            return folder
        if folder.exists():
            raise ConfigError(f"{folder} is no stored document; move it away, or take another name")
        names = self._names()
        near = difflib.get_close_matches(name, names, _NEAR_NAMES, cutoff=0.4)
        near = near or names[:_NEAR_NAMES]
        more = f" and {len(names) - len(near)} more" if len(names) > len(near) else ""
        there = f"it has {', '.join(near)}{more}" if names else "it has none yet"
        raise ConfigError(f"there is no document {name!r} in {self.root}; {there}")

    def entries(self, key: bytes | None = None) -> list[Entry]:
        """What there is, sorted by name, each as far as it (with `key`, if encrypted) can be read.

        Raises:
            StorageError: the library cannot be read.
        """
        found = (self._entry(name, key) for name in self._names())
        return [entry for entry in found if entry is not None]

    def remove(self, name: str) -> None:
        """Remove a document.

        Raises:
            ConfigError: there is none; names the nearest.
            DocumentBusyError: a process has it open.
            StorageError: it cannot be removed.
        """
        folder = self.find(name)
        with locked(self.root):
            remove(folder)

    def is_open(self, name: str) -> bool:
        """Whether a process has a document open, so that it cannot be removed now.

        Raises:
            ConfigError: the name cannot be.
        """
        folder = self.folder(name)
        with contextlib.ExitStack() as stack:
            try:
                opened = REAL_DISK.open_folder(folder)
                stack.callback(opened.close)
                opened.lock(LOCK, exclusive=True)()
            except BlockingIOError:
                return True
            except OSError:  # no folder, or no lock in it that could be held
                return False
        return False

    # Usage ------------------------------------------------------------------------------------

    def touch(self, name: str) -> None:
        """Note that a document was asked now; one that cannot be noted is not.

        Raises:
            ConfigError: the name cannot be.
        """
        now = self.clock()

        def asked(usage: _Usage) -> _Usage:
            # A clock that went back does not make it older; one that was far ahead is forgotten.
            last = usage.last_asked
            is_later = last is not None and now < last < now + _DAY_S
            return usage._replace(last_asked=last if is_later else now, asks=usage.asks + 1)

        with contextlib.suppress(StorageError):
            self._change_usage(self.folder(name), asked)

    def add_written(self, name: str, num_bytes: int) -> None:
        """Count bytes written to a document, and to the library today.

        Raises:
            ConfigError: the name cannot be.
            StorageError: the counts cannot be written.
        """
        assert num_bytes >= 0, num_bytes
        folder = self.folder(name)
        WriteBudget(self.root, clock=self.clock).add(num_bytes)
        self._change_usage(
            folder, lambda usage: usage._replace(written_bytes=usage.written_bytes + num_bytes)
        )

    def _change_usage(self, folder: Path, change: Callable[[_Usage], _Usage]) -> None:
        with locked(self.root):
            if _is_ours(folder):
                path = folder / USAGE_FILE
                replace_object(path, change(_read_usage(path))._asdict(), sync=False)

    # Limits -----------------------------------------------------------------------------------

    @property
    def settings(self) -> LibrarySettings:
        """The limits that were last set.

        Raises:
            ConfigError: the file is damaged.
            StorageError: it cannot be read.
        """
        return read_settings(self.root)

    def set_limits(self, settings: LibrarySettings) -> None:
        """Keep limits for this command and later ones.

        Raises:
            ConfigError: a limit is not positive.
            StorageError: they cannot be written.
        """
        write_settings(self.root, settings)

    @property
    def write_budget(self) -> WriteBudget:
        """Counts of bytes written, with the limit that is set.

        Raises:
            ConfigError: the settings are damaged.
            StorageError: they cannot be read.
        """
        return WriteBudget(self.root, self.settings.writes_per_day_bytes, clock=self.clock)

    # Garbage ----------------------------------------------------------------------------------

    def collect_garbage(self) -> Collected:
        """Remove unfinished documents without a writer, and half-written files of the library.

        What is not ours is reported and left alone; so are finished documents, damaged ones too.

        Raises:
            StorageError: the library cannot be read.
        """
        done = Collected([], [], 0, [], [], [])
        names = self._names()
        freed_bytes = 0
        for name in names:
            folder = self.root / name
            try:
                if is_unfinished(folder):
                    freed_bytes += self._remove_unfinished(folder)
                    done.removed.append(name)
            except DocumentBusyError:
                done.busy.append(name)
            except OSError as error:
                done.failed.append(f"{name}: {error}")
        # Under the lock no such file is being written.
        with locked(self.root), typed_errors(f"clear up {self.root}"):
            for folder in (self.root, *(self.root / name for name in names)):
                for path in sorted(folder.glob(f"*{PARTIAL_SUFFIX}")):
                    if _PARTIAL.fullmatch(path.name):
                        freed_bytes += path.lstat().st_size
                        path.unlink()
                        done.stray_files.append(str(path.relative_to(self.root)))
        ours = {*names, SETTINGS_FILE, WRITES_FILE}
        done.left_alone.extend(path.name for path in self._listed() if path.name not in ours)
        return done._replace(freed_bytes=freed_bytes)

    def _remove_unfinished(self, folder: Path) -> int:
        """Remove a document if it is unfinished still and has no writer; returns its bytes."""
        what = f"remove {folder}"
        with locked(self.root), contextlib.ExitStack() as stack, typed_errors(what):
            opened = open_document_folder(REAL_DISK, folder)
            stack.callback(opened.close)
            stack.callback(lock_document(opened, folder, exclusive=True))
            names = opened.sizes()
            if MANIFEST in names:
                raise DocumentBusyError(f"{folder} was finished just now")
            remove_all(REAL_DISK, opened, folder, names)
            return sum(names.values())

    def _listed(self) -> list[Path]:
        try:
            return sorted(self.root.iterdir())
        except OSError as error:
            raise StorageError(f"cannot list the library {self.root}: {error.strerror}") from error

    def _names(self) -> list[str]:
        """Documents that there are, readable or not."""
        return [path.name for path in self._listed() if is_name(path.name) and _is_ours(path)]

    def _entry(self, name: str, key: bytes | None) -> Entry | None:
        """None where it has gone meanwhile."""
        folder = self.root / name
        usage, num_bytes, created = _Usage(), 0, None
        with contextlib.suppress(OSError):
            usage = _read_usage(folder / USAGE_FILE)
        with contextlib.suppress(OSError):
            num_bytes = size_bytes(folder)
        with contextlib.suppress(OSError):
            created = (folder / MANIFEST).lstat().st_mtime
        state, summary = _read_state(folder, key)
        if not _is_ours(folder):
            return None
        known = {**usage._asdict(), "created": created}
        entry = Entry(name=name, state=state, size_bytes=num_bytes, **known)
        if summary is None:
            return entry
        about = summary.about or {}
        return replace(
            entry,
            encrypted=summary.encrypted, generation=summary.generation,
            title=_text(about.get("title")), model=_text(about.get("model")),
            policy=_text(about.get("policy")),
            tokens=about["tokens"] if is_count(about.get("tokens")) else None,
            created=about["created"] if _is_time(about.get("created")) else created,
        )  # fmt: skip


def _read_state(folder: Path, key: bytes | None) -> tuple[str, Summary | None]:
    try:
        if is_unfinished(folder):
            return "unfinished", None
        try:
            return "ready", read_summary(folder, key)
        except DocumentKeyError:
            return "ready", read_summary(folder)
    except (PenstockError, OSError) as error:
        return f"unreadable: {error}", None


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder, not a link to one, with a manifest or a lock."""
    try:
        return stat.S_ISDIR(folder.lstat().st_mode) and any(
            stat.S_ISREG((folder / name).lstat().st_mode)
            for name in (MANIFEST, LOCK) if os.path.lexists(folder / name)
        )  # fmt: skip
    except OSError:
        return False


def _read_usage(path: Path) -> _Usage:
    """A damaged file counts as none."""
    content, _ = read_object(path)
    last, asks, written = (content.get(name) for name in _Usage._fields)
    return _Usage(
        last if _is_time(last) else None,
        asks if is_count(asks) else 0,
        written if is_count(written) else 0,
    )


def _is_time(value: object) -> bool:
    """Whether it may be epoch seconds: a number up to the year 5138."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e11


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
