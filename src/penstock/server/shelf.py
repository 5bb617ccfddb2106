"""Shelf: stored documents by name, open while they are asked, and those that are being read."""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.core.errors import ConfigError
from penstock.documents.document import Document
from penstock.documents.document_library import DocumentLibrary
from penstock.documents.settings import Memory
from penstock.models.loader import LoadedModel
from penstock.server.errors import ApiError, as_api_error
from penstock.storage.documents import is_unfinished
from penstock.storage.documents.names import check_name

_MOST_OPEN = 16
"""Documents that stay open without being asked."""
_MOST_WAITING = 16
_SALT_DIGITS = 16
_SALTED = "--"


class _Cancelled(Exception):
    """Ends the reading of a document from inside."""


@dataclass
class Reading:
    """A document on its way into the library."""

    name: str
    """For clients."""
    text: str
    title: str
    state: Literal["waiting", "reading", "storing", "ready", "failed", "cancelled"] = "waiting"
    processed: int = 0
    total: int = 0
    began_s: float = 0.0
    error: ApiError | None = None
    is_cancelled: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def as_dict(self) -> dict[str, Any]:
        """For clients."""
        took_s = time.monotonic() - self.began_s if self.began_s else 0.0
        eta_s = None
        if self.state == "reading" and self.processed:
            eta_s = took_s / self.processed * (self.total - self.processed)
        return {
            "object": "document", "id": self.name, "title": self.title, "status": self.state,
            "progress": {
                "processed": self.processed, "total": self.total, "time_ms": round(1000 * took_s),
                "eta_ms": None if eta_s is None else round(1000 * eta_s),
            },
            "error": None if self.error is None else self.error.message,
        }  # fmt: skip


@dataclass
class _Open:
    document: Document
    users: int = 0
    asked_s: float = 0.0


class Lease:
    """A document that a request reads; `release` lets it go, once."""

    def __init__(self, document: Document, release: Callable[[], None]) -> None:
        self.document, self._release = document, release
        self._lock, self._is_open = threading.Lock(), True

    def release(self) -> None:
        """Let it go. A second call does nothing."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._release()


class Shelf:
    """A library's documents for one model.

    Names of one salt are apart from those of another: in the library, a name with a salt has the
    beginning of the salt's digest behind it.
    """

    def __init__(
        self, library: DocumentLibrary, loaded: LoadedModel, *, memory: Memory = "auto",
        names: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Begin with what the library has.

        Args:
            memory: of a cache that reads a new document; one is read at a time.
            names: as for `as_api_error`.
        """
        self._library, self._loaded, self._memory = library, loaded, memory
        self._names = names if names is not None else {}
        # Opening reads the model's weights once; requests that end do not wait for it.
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._open: dict[str, _Open] = {}
        self._jobs: dict[str, Reading] = {}
        self._one = threading.Lock()
        self._is_closed = False
        self._asked = self._found_open = 0

    # Asking -----------------------------------------------------------------------------------

    def has(self, name: str, salt: str) -> bool:
        """Whether there is a document of this name that can be asked."""
        try:
            folder = self._library.documents.folder(_stored(name, salt))
        except ConfigError:
            return False
        return folder.exists() and _stored(name, salt) not in self._jobs

    def lease(self, name: str, salt: str) -> Lease:
        """A document to be asked.

        Raises:
            DocumentError, DocumentMismatchError, DocumentDamagedError: it cannot be read.
        """
        stored = _stored(name, salt)
        with self._opening:
            with self._lock:
                opened = self._open.get(stored)
            is_open = opened is not None
            if opened is None:
                folder = self._library.documents.find(stored)
                document = Document.open(self._loaded, folder, settings=self._library.settings)
                opened = _Open(document)
            with self._lock:
                self._asked += 1
                self._found_open += is_open
                self._open[stored] = opened
                opened.users += 1
                opened.asked_s = time.monotonic()
                self._close_idle()
        self._library.documents.touch(stored)
        return Lease(opened.document, lambda: self._let_go(opened))

    def counts(self) -> dict[str, int]:
        """Requests that named a document, and those of them that found it open, for metrics."""
        with self._lock:
            return {"document_queries": self._asked, "document_hits": self._found_open}

    def _let_go(self, opened: _Open) -> None:
        with self._lock:
            opened.users -= 1
            if self._is_closed and not opened.users:
                opened.document.close()

    def _close_idle(self) -> None:
        idle = sorted((each.asked_s, name) for name, each in self._open.items() if not each.users)
        for _, name in idle[: max(0, len(self._open) - _MOST_OPEN)]:
            self._open.pop(name).document.close()

    # Adding -----------------------------------------------------------------------------------

    def add(self, name: str, text: str, salt: str, title: str) -> Reading:
        """Begin to read a text; goes on whether someone waits or not.

        Raises:
            ApiError: there is such a document, or too many wait.
            ConfigError: the name cannot be.
        """
        stored = _stored(name, salt)
        with self._lock:
            if self._is_closed:
                raise ApiError(503, "the server is shutting down")
            if self._is_active(stored) or not self._is_free(stored):
                raise ApiError(409, f"there is a document {name!r} already", param="name")
            if sum(not each.over.is_set() for each in self._jobs.values()) >= _MOST_WAITING:
                raise ApiError(429, "as many documents wait as may", headers={"Retry-After": "30"})
            job = self._jobs[stored] = Reading(name, text, title)
        threading.Thread(
            target=self._read, args=(stored, job), name="penstock-document", daemon=True
        ).start()
        return job

    def _is_free(self, stored: str) -> bool:
        """Whether a name can be taken; what a server left there that was killed goes.

        Raises:
            DocumentBusyError: another process stores it just now.
        """
        folder = self._library.documents.folder(stored)
        if folder.exists() and is_unfinished(folder):
            self._library.documents.remove(stored)
        return not folder.exists()

    def _is_active(self, stored: str) -> bool:
        job = self._jobs.get(stored)
        return job is not None and not job.over.is_set()

    def _read(self, stored: str, job: Reading) -> None:
        def on_tokens(done: int, total: int) -> None:
            job.processed, job.total = done, total
            if job.is_cancelled or self._is_closed:
                raise _Cancelled

        def on_bytes(done: int, total: int) -> None:
            job.state = "storing"
            on_tokens(job.processed, job.total)

        try:
            with self._one:
                if job.is_cancelled or self._is_closed:
                    raise _Cancelled
                job.state, job.began_s = "reading", time.monotonic()
                added = self._library.add(
                    self._loaded, job.text, stored, title=job.title, memory=self._memory,
                    on_tokens=on_tokens, on_bytes=on_bytes,
                )  # fmt: skip
                added.document.close()
            job.state = "ready"
        except _Cancelled:
            job.state = "cancelled"
        except Exception as error:
            job.error = as_api_error(error, {**self._names, stored: job.name})
            job.state = "failed"
        finally:
            job.text = ""
            with self._lock:
                if job.state != "failed":  # which is told until it is deleted
                    self._jobs.pop(stored, None)
            job.over.set()

    # The library ------------------------------------------------------------------------------

    def entries(self, salt: str) -> list[dict[str, Any]]:
        """Documents of a salt, and those that are being read."""
        with self._lock:
            jobs = dict(self._jobs)
        found = [job.as_dict() for stored, job in jobs.items() if _is_of(stored, salt)]
        for entry in self._library.documents.entries(self._library.settings.key):
            if entry.name in jobs or not _is_of(entry.name, salt):
                continue
            state = entry.state if entry.state in ("ready", "unfinished") else "unreadable"
            found.append({
                "object": "document", "id": _shown(entry.name, salt), "title": entry.title or "",
                "status": state, "tokens": entry.tokens, "bytes": entry.size_bytes,
                "created": None if entry.created is None else int(entry.created),
                "last_asked": None if entry.last_asked is None else int(entry.last_asked),
            })  # fmt: skip
        return found

    def entry(self, name: str, salt: str) -> dict[str, Any]:
        """One of them.

        Raises:
            ApiError: there is none.
        """
        for each in self.entries(salt):
            if each["id"] == name:
                return each
        raise ApiError(404, f"there is no document {name!r}", code="document_not_found")

    def remove(self, name: str, salt: str) -> None:
        """Delete a document, or give its reading up.

        Raises:
            ApiError: there is none.
            DocumentBusyError: another process writes to it.
        """
        stored = _stored(name, salt)
        with self._lock:
            job = self._jobs.get(stored)
            if job is not None:
                job.is_cancelled = True
                if job.over.is_set():
                    del self._jobs[stored]
                return
        self.entry(name, salt)
        with self._lock:
            opened = self._open.pop(stored, None)
            if opened is not None and opened.users:
                self._open[stored] = opened
                raise ApiError(409, f"the document {name!r} is being asked; try again later")
            if opened is not None:
                opened.document.close()
        self._library.documents.remove(stored)

    def let_go(self, name: str, salt: str) -> Literal["free", "given up", "asked"]:
        """Close a document that another process is to delete, or give its reading up.

        Returns:
            "asked": a request reads it, so that it stays open.

        Raises:
            ConfigError: the name cannot be one.
        """
        stored = _stored(name, salt)
        with self._lock:
            if self._is_active(stored):
                self._jobs[stored].is_cancelled = True
                return "given up"
            opened = self._open.get(stored)
            if opened is None:
                return "free"
            if opened.users:
                return "asked"
            del self._open[stored]
            opened.document.close()
            return "free"

    def close(self) -> None:
        """Give up what is being read, and close what no request reads."""
        with self._lock:
            self._is_closed = True
            jobs = list(self._jobs.values())
        for job in jobs:
            job.over.wait()
        with self._lock:
            for each in self._open.values():
                if not each.users:
                    each.document.close()
            self._open.clear()


def _stored(name: str, salt: str) -> str:
    """The name in the library.

    Raises:
        ConfigError: it cannot be one.
    """
    if _SALTED in name:
        raise ConfigError(f"the name {name!r} has {_SALTED} in it; give another")
    if not salt:
        return check_name(name)
    digest = hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()[:_SALT_DIGITS]
    return check_name(f"{name}{_SALTED}{digest}")


def _is_of(stored: str, salt: str) -> bool:
    name, mark, _ = stored.partition(_SALTED)
    try:
        return stored == _stored(name, salt) if mark or salt else True
    except ConfigError:
        return False


def _shown(stored: str, salt: str) -> str:
    return stored.partition(_SALTED)[0] if salt else stored
