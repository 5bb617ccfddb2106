"""Sessions: what answered requests have stored, for requests that begin with the same tokens."""

import contextlib
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import (
    DocumentBusyError,
    DocumentDamagedError,
    DocumentKeyError,
    PenstockError,
)
from penstock.documents.contents import About
from penstock.documents.creating import shared_tokens
from penstock.documents.opened import OpenDocument
from penstock.documents.settings import DocumentSettings, Reader, stored_fields, unit_tokens
from penstock.documents.storing import document_shape, store_cache
from penstock.documents.tails import Tail
from penstock.engine.index_fit import SAMPLE_TOKENS
from penstock.engine.stored_past import SECTOR_BYTES
from penstock.generation.prompts import TokenIds
from penstock.methods import SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_settings import named_policy
from penstock.models.loader import LoadedModel, lasting_name
from penstock.models.model_shape import inspect_model
from penstock.storage.documents import DocumentWriter, is_unfinished, read_summary, remove
from penstock.storage.documents.document_library import make_own_folder

_LOG = logging.getLogger(__name__)
LEAST_TOKENS = 64
"""A shorter beginning is read as fast as it is opened."""
_TITLE = "a conversation"
_NAME = re.compile(r"[0-9a-f]{24}-[0-9a-f]{32}")


@dataclass(slots=True)
class _Session:
    """One stored conversation."""

    path: Path
    salt: str
    tokens: TokenIds
    num_bytes: int
    used_s: float
    busy: int = 0
    """Caches that read it."""

    def use(self) -> None:
        """Note that it is used now; its folder says so after a restart."""
        self.used_s = time.time()
        with contextlib.suppress(OSError):
            os.utime(self.path)


class Sessions:
    """Conversations of an `Engine`, each a document in one folder; later requests go on from them.

        with Sessions(llm.loaded, "sessions", max_bytes=8 << 30) as sessions, \\
                Engine(llm, sessions=sessions) as engine:
            ...

    A request begins with the stored tokens that it shares with the conversation that shares most,
    and only the rest is read: the next turn, and a history whose middle was edited. Storing happens
    behind the answer, in a thread; what is not whole on the disk is not there after a restart.
    Conversations of different salts never meet. Those that were not used for longest go first.
    Several processes may share a folder: each finds what the others have stored.

    Of a conversation behind a document, what follows the document is stored. It is found behind
    that generation of the document alone.

    Prompts with pictures, several answers to one prompt and models with recurrent layers are not
    stored.
    """

    def __init__(
        self, loaded: LoadedModel, folder: str | Path, *, max_bytes: int,
        policy: str | SelectionPolicy = "kvswap", settings: DocumentSettings | None = None,
    ) -> None:  # fmt: skip
        """Find what is there; of other models, keys and settings, or damaged, is left alone.

        With a key, conversations that were stored without one are removed: they could be read on
        the disk, and no request goes on from them. `notices` says so.

        Args:
            folder: theirs alone; made if need be, for its owner alone.
            max_bytes: most bytes on the disk.
            policy: of the engine's LLM.
            settings: key, store and adapter; without a key, tokens and KV can be read on the disk.

        Raises:
            ConfigError: there is something else than a folder, or no folder for it.
            StorageError: the folder cannot be made.
        """
        self._folder, self._max_bytes = Path(folder), max_bytes
        make_own_folder(self._folder, "the conversations")
        self._policy = named_policy(policy)
        self._reader = Reader(loaded, settings or DocumentSettings())
        self._lock = threading.RLock()
        self._sessions: list[_Session] = []
        self._unreadable: set[str] = set()
        self._pending: list[tuple[str, Future[None]]] = []
        self._open: list[tuple[TieredCache, OpenDocument, _Session]] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-sessions")
        self._stores = not (self._policy.drops or inspect_model(loaded.model).states)
        self._unsealed = self._foreign = 0
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name) is not None:
                _clear(path)
        self._look("")
        self._make_room()

    def _look(self, salt: str) -> None:
        """Find what has come since, of a salt; "" is of all."""
        with self._lock:
            known = {each.path.name for each in self._sessions} | self._unreadable
            for path in sorted(self._folder.iterdir()):
                if path.name.startswith(salt) and path.name not in known:
                    self._find(path)

    def _find(self, path: Path) -> None:
        try:
            opened = OpenDocument.open(self._reader, path)
        except PenstockError as error:
            if isinstance(error, DocumentKeyError):
                if self._remove_unsealed(path):
                    return
                self._foreign += 1
            if not (path.is_dir() and is_unfinished(path)):  # which another process stores now
                self._unreadable.add(path.name)
                _LOG.info("%s is no session: %s", path.name, error)
            return
        try:
            tokens, salt = opened.tokens, path.name.partition("-")[0]
            size, used = _size(path), path.stat().st_mtime
            self._sessions.append(_Session(path, salt, tokens, size, used))
        except PenstockError as error:
            _LOG.warning("the session %s is damaged: %s", path.name, error)
        finally:
            opened.stored.close()

    def _remove_unsealed(self, path: Path) -> bool:
        """Remove a conversation that sessions without a key have stored; whether it was one."""
        if self._reader.settings.key is None or not _NAME.fullmatch(path.name):
            return False
        try:
            about = None if path.is_symlink() else read_summary(path).about  # None: encrypted
            if about is None or about.get("title") != _TITLE:
                return False
            remove(path)
        except PenstockError as error:
            _LOG.warning("%s can be read on the disk, and was not removed: %s", path.name, error)
            return False
        self._unsealed += 1
        return True

    @property
    def notices(self) -> list[str]:
        """What a user should know of the folder, a line each."""
        found = []
        if self._unsealed:
            found.append(
                f"removed {_counted(self._unsealed)} from {self._folder}, stored without a key: "
                "new ones are encrypted"
            )
        if self._foreign:
            found.append(
                f"{_counted(self._foreign)} in {self._folder} are of another key, and count to "
                "no limit: give that key, or delete them"
            )
        return found

    @property
    def num_bytes(self) -> int:
        """On the disk, of all that are whole."""
        with self._lock:
            return sum(each.num_bytes for each in self._sessions)

    def __len__(self) -> int:
        """Conversations that are whole on the disk."""
        return len(self._sessions)

    # Going on ---------------------------------------------------------------------------------

    def open(
        self, salt: str, tokens: Sequence[int], *, behind: object = None, max_tokens: int,
        batch_size: int, memory: Any, **options: Any,
    ) -> TieredCache | None:  # fmt: skip
        """A cache that holds the longest stored beginning of some tokens; None: there is none.

        Waits for what is being stored of the same salt.

        Args:
            behind: the `Document` that the tokens begin with.
            options: as for `TieredCache`; behind a document, as for `Document.cache`.

        Raises:
            BudgetError: the memory is too little.
        """
        self._close_unread()
        tail = Tail.behind(behind)
        if tail is None and behind is not None:
            return None
        name, given = self._digest(salt, tail), 0
        for writing in self._storing(name):
            writing.result()
        self._look(name)
        if tail is not None:
            tokens, given = tokens[tail.start :], tail.opened.about.tokens - tail.start
        found = self._longest(name, tokens)
        if found is None:
            return None
        session, _ = found
        try:
            opened = OpenDocument.open(self._reader, session.path)
        except PenstockError as error:
            self._forget(session, error)
            return None
        try:
            shared = shared_tokens(opened, tokens)
            if shared == len(tokens):  # something must be left to read, more than a decode step
                shared = 0 if opened.about.has_windows else shared - 2
            if shared < given + LEAST_TOKENS:
                opened.stored.close()
                return None
            options |= {"max_tokens": max_tokens, "batch_size": batch_size, "memory": memory}
            if tail is None:
                cache = self._cache(opened, shared, **options)
            else:
                cache = self._behind(tail, opened, shared, **options)
        except BaseException as error:
            opened.stored.close()
            if isinstance(error, OSError):  # damaged: the prompt is read anew
                self._forget(session, error)
                return None
            raise
        with self._lock:
            session.use()
            session.busy += 1
            self._open.append((cache, opened, session))
        return cache

    def _cache(
        self, opened: OpenDocument, shared: int, *, memory: Any, **given: Any
    ) -> TieredCache:
        settings, policy = self._reader.settings, opened.policy
        given |= {"adapter": opened.settings.adapter, "sealed": settings.sealed}
        given["known"] = opened.loaded.known
        model = opened.loaded.model
        with TieredCache(model, policy, memory, settings.store, **given) as bare:
            if bare.plan.is_resident:  # as it would be if the conversation had gone on
                policy = named_policy("full")
        whole = shared == opened.about.tokens and policy is opened.policy
        cache = TieredCache(
            model, policy, memory, settings.store, past=opened.past(with_index=whole),
            past_tokens=shared, sector_bytes=SECTOR_BYTES, **given,
        )  # fmt: skip
        opened.restore_beside(cache)
        return cache

    def _behind(
        self, tail: Tail, opened: OpenDocument, shared: int, *, max_tokens: int, **given: Any
    ) -> TieredCache:
        policy = given.get("policy") or tail.opened.policy
        is_own = named_policy(policy) == tail.opened.policy and not given.get("exact")
        whole = shared == opened.about.tokens
        return tail.document.cache(
            new_tokens=max_tokens - tail.opened.about.tokens, past_tokens=tail.start + shared,
            past=tail.past(opened, with_index=whole and is_own), sector_bytes=SECTOR_BYTES,
            **given,
        )  # fmt: skip

    def _longest(self, salt: str, tokens: Sequence[int]) -> tuple[_Session, int] | None:
        wanted = np.asarray(tokens)
        with self._lock:
            lengths = [
                (_common(wanted, each.tokens), each) for each in self._sessions if each.salt == salt
            ]
        most, session = max(lengths, key=lambda each: each[0], default=(0, None))
        return None if session is None or most < LEAST_TOKENS else (session, most)

    def _close_unread(self) -> None:
        """Let go of the documents of caches that are closed; one they found damaged is given up."""
        with self._lock:
            done = [each for each in self._open if not each[0].is_open]
            self._open = [each for each in self._open if each[0].is_open]
            for _, opened, session in done:
                session.busy -= 1
                opened.stored.close()
                if any(file.has_damage for file in opened.stored.files):
                    self._forget(session, "an answer found units that are not what was stored")

    # Storing ----------------------------------------------------------------------------------

    def keep(
        self, salt: str, tokens: Sequence[int], cache: TieredCache, *, behind: object = None
    ) -> "Future[None] | None":
        """Begin to store what a cache holds of some tokens; it stays as it is until that is done.

        Args:
            behind: the `Document` that the tokens begin with; only what follows it is stored.

        Returns:
            What is done when the cache is free again, whether it was stored or not; None: it is not
            stored, and free now.
        """
        length = cache.get_seq_length()
        drops = cache.policy.drops or not cache.tiers.layers[0].reads_back
        tail = Tail.behind(behind)
        if tail is None and behind is not None:
            return None
        start, given = (0, 0) if tail is None else (tail.start, tail.opened.about.tokens)
        if not self._stores or drops or length < given + LEAST_TOKENS or cache.batch_size != 1:
            return None
        kept, name = TokenIds(tokens[start:length]), self._digest(salt, tail)
        with self._lock:
            future = self._writer.submit(self._store, name, kept, cache, tail)
            self._pending = [each for each in self._pending if not each[1].done()]
            self._pending.append((name, future))
        return future

    def is_storing(self, salt: str, *, behind: object = None) -> bool:
        """Whether something of a salt is on its way to the disk; `open` would wait for it."""
        tail = Tail.behind(behind)
        if tail is None and behind is not None:
            return False
        name = self._digest(salt, tail)
        return any(not each.done() for each in self._storing(name))

    def _storing(self, salt: str) -> "list[Future[None]]":
        with self._lock:
            return [future for name, future in self._pending if name == salt]

    def _store(self, salt: str, tokens: TokenIds, cache: TieredCache, tail: Tail | None) -> None:
        try:
            self._store_whole(salt, tokens, cache, tail)
        except Exception as error:
            _LOG.warning("a conversation of %d tokens was not stored: %s", len(tokens), error)

    def _store_whole(
        self, salt: str, tokens: TokenIds, cache: TieredCache, tail: Tail | None
    ) -> None:
        former = self._former(salt, tokens)
        if former is not None and len(former.tokens) == len(tokens):
            former.use()
            return
        about = self._about(tokens, cache) if tail is None else tail.about(cache, _TITLE)
        if former is not None and self._extend(former, cache, tokens, about, tail):
            return
        path = self._folder / f"{salt}-{uuid.uuid4().hex}"
        layout = document_shape(inspect_model(self._reader.loaded.model).kv, about.group_tokens)
        none = np.empty(0, dtype=np.int64)
        try:
            with DocumentWriter.create(path, layout, key=self._reader.settings.key) as writer:
                self._write(writer, cache, tokens, about, none, tail)
        except BaseException:
            _clear(path)
            raise
        with self._lock:
            self._sessions.append(_Session(path, salt, tokens, _size(path), time.time()))
            self._make_room()

    def _about(self, tokens: TokenIds, cache: TieredCache) -> About:
        """What a whole conversation says of itself."""
        reader, policy = self._reader, self._policy
        group_tokens = unit_tokens(policy, inspect_model(reader.loaded.model).kv)
        made = cache.policy if type(cache.policy) is type(policy) else policy
        return About(
            model=lasting_name(reader.loaded.name), title=_TITLE, created=time.time(),
            tokens=len(tokens), group_tokens=group_tokens, policy=policy.name,
            policy_fields=stored_fields(policy, made), memory="auto", pending=[],
            # What is fitted to few tokens ranks badly: it is made again from the keys.
            has_index=policy.index_fields != () and len(tokens) >= SAMPLE_TOKENS
            and type(cache.policy) is type(policy) and not cache.plan.is_resident,
            has_windows=any(layer.is_sliding for layer in cache.layers),
        )  # fmt: skip

    def _extend(
        self, former: _Session, cache: TieredCache, tokens: TokenIds, about: About,
        tail: Tail | None,
    ) -> bool:  # fmt: skip
        """Append a turn to what is stored of its conversation; false where that cannot be."""
        try:
            opened = OpenDocument.open(self._reader, former.path)
        except PenstockError as error:
            self._forget(former, error)
            return False
        try:
            if opened.about.group_tokens != about.group_tokens:
                return False
            if _common(np.asarray(opened.tokens), tokens) < opened.about.tokens:
                return False  # another process has stored a turn of its own there
            held = opened.groups[: opened.about.tokens // about.group_tokens]
            with DocumentWriter.extend(
                former.path, key=self._reader.settings.key, generation=opened.stored.generation
            ) as writer:
                self._write(writer, cache, tokens, about, held, tail)
        except DocumentBusyError:
            return False
        except DocumentDamagedError as error:
            self._forget(former, error)
            return False
        finally:
            opened.stored.close()
        with self._lock:
            former.tokens = tokens
            former.use()
            former.num_bytes = _size(former.path)
            self._make_room()
        return True

    def _write(
        self, writer: DocumentWriter, cache: TieredCache, tokens: TokenIds, about: About,
        held: NDArray[np.int64], tail: Tail | None,
    ) -> None:  # fmt: skip
        if tail is None:
            start, identity = 0, self._reader.identity(self._policy, about.group_tokens)
        else:
            start, identity = tail.start, dict(tail.opened.identity)
        store_cache(
            cache, writer, tokens, held, about=about, progress=_unseen, identity=identity,
            start_token=start,
        )  # fmt: skip

    def _former(self, salt: str, tokens: TokenIds) -> _Session | None:
        """A session that is a beginning of these tokens, or all of them."""
        found = self._longest(salt, tokens)
        return found[0] if found is not None and found[1] == len(found[0].tokens) else None

    def _make_room(self) -> None:
        """Remove what was not used for longest, until the rest is within bounds."""
        for each in sorted(self._sessions, key=lambda each: each.used_s):
            if self.num_bytes <= self._max_bytes:
                return
            if not each.busy:
                self._remove(each)

    def _forget(self, session: _Session, error: object) -> None:
        _LOG.warning("the session %s is given up: %s", session.path.name, error)
        with self._lock:
            if session in self._sessions:
                self._remove(session)
            if session in self._sessions:
                self._sessions.remove(session)
                self._unreadable.add(session.path.name)

    def _remove(self, session: _Session) -> None:
        try:
            remove(session.path)
        except DocumentBusyError:  # another process reads it
            return
        except PenstockError:
            shutil.rmtree(session.path, ignore_errors=True)
        self._sessions.remove(session)

    def _digest(self, salt: str, tail: Tail | None = None) -> str:
        """Names a salt, and the document that its conversations stand behind, without saying it."""
        said, kind = salt.encode(errors="surrogatepass"), b""
        if tail is not None:
            said, kind = f"{tail.name}:".encode() + said, b"behind"
        key = self._reader.settings.key or b""
        return blake2b(said, key=key[:32], digest_size=12, person=kind).hexdigest()

    # The end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is being stored; caches that read it must be closed."""
        self._writer.shutdown(wait=True)
        self._close_unread()

    def __enter__(self) -> "Sessions":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _common(wanted: NDArray[np.int64], tokens: Sequence[int]) -> int:
    """How many first tokens are the same."""
    count = min(len(wanted), len(tokens))
    other = np.asarray(tokens[:count])
    differ = np.flatnonzero(wanted[:count] != other)
    return int(differ[0]) if len(differ) else count


def _counted(count: int) -> str:
    return f"{count} conversation{'s' * (count != 1)}"


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def _clear(path: Path) -> None:
    """Remove what a crash or a full disk left of storing a conversation, if it is that."""
    try:
        if is_unfinished(path):
            remove(path)
    except PenstockError as error:  # another server stores it just now
        _LOG.info("%s stays: %s", path.name, error)


def _unseen(done: int, total: int) -> None:
    pass
