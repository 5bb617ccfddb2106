"""A chat as a document: saved in one commit, opened again, and a cache over it."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.core.errors import ConfigError, DocumentDamagedError, DocumentFormatError
from penstock.documents.chat_history import CHAT, ChatHistory, shared_beginning
from penstock.documents.contents import About
from penstock.documents.document import Document
from penstock.documents.opened import OpenDocument
from penstock.documents.recovery import OnTokens
from penstock.documents.settings import Memory, Reader, stored_fields, unit_tokens
from penstock.documents.stored_states import former_states
from penstock.documents.storing import OnBytes, document_shape, store_cache
from penstock.engine.index_fit import SAMPLE_TOKENS
from penstock.engine.stored_past import SECTOR_BYTES
from penstock.generation.prompts import TokenIds, first_tokens
from penstock.methods import SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.loader import lasting_name
from penstock.models.model_shape import inspect_model
from penstock.storage.documents import DocumentWriter
from penstock.storage.store import Sealing

_TITLE = "a chat"


class ChatCache(NamedTuple):
    """A saved chat, open, and the cache that goes on with it."""

    opened: OpenDocument
    cache: TieredCache


def open_chat(
    reader: Reader, path: Path, history: ChatHistory, on_tokens: OnTokens, *,
    max_tokens: int | None, **options: Any,
) -> ChatCache:  # fmt: skip
    """Open a saved chat; what is damaged of its beginning is prefilled again, and stored.

    Args:
        history: becomes the chat's.
        max_tokens: in place of what the chat was begun for.
        options: of `cache_of`.

    Raises:
        As for `Conversation.resume`.
    """
    require_documents()
    opened = _open(reader, path, history, max_tokens)
    try:
        return ChatCache(opened, cache_of(opened, max_tokens=history.max_tokens, **options))
    except DocumentDamagedError:
        with Document(opened) as document:
            document.recover(on_tokens=on_tokens)
    except BaseException:
        opened.stored.close()
        raise
    opened = _open(reader, path, history, max_tokens)
    try:
        return ChatCache(opened, cache_of(opened, max_tokens=history.max_tokens, **options))
    except BaseException:
        opened.stored.close()
        raise


def _open(reader: Reader, path: Path, history: ChatHistory, max_tokens: int | None) -> OpenDocument:
    opened = OpenDocument.open(reader, path)
    try:
        if CHAT not in opened.stored.blob_names:
            raise DocumentFormatError(
                f"the document in {path} is a text and no chat: ask it with penstock doc ask, or "
                "begin a chat and read the text in"
            )
        tokens = [*opened.tokens, *opened.about.pending]
        history.load(opened.stored.blob(CHAT), TokenIds(tokens, visuals=opened.tokens.visuals))
        if max_tokens is not None:
            history.max_tokens = max_tokens
    except BaseException:
        opened.stored.close()
        raise
    return opened


def require_documents() -> None:
    """Refuse a system without what documents need.

    Raises:
        ConfigError: it is Windows.
    """
    if not hasattr(os, "O_DIRECTORY"):
        raise ConfigError("chats cannot be saved or resumed on Windows; use Linux, macOS or WSL")


def cache_of(
    opened: OpenDocument, *, memory: Memory, max_tokens: int, exact: bool,
    sealed: Sealing, progress: Callable[[int], None], index_progress: Callable[[float], None],
) -> TieredCache:  # fmt: skip
    """A cache that holds a saved chat, with room for more; where the budget holds all of it, all of
    it is in memory, as it would be if the chat had gone on.

    Raises:
        As for `TieredCache`.
    """
    model, settings = opened.loaded.model, opened.settings
    if max_tokens <= opened.about.tokens:
        raise ConfigError(
            f"the chat holds {opened.about.tokens:,} tokens; give a max_tokens above that, not "
            f"{max_tokens:,}"
        )
    policy: SelectionPolicy | str = opened.policy
    memory = opened.budget(memory)
    given: dict[str, Any] = {
        "exact": exact,
        "adapter": settings.adapter,
        "sealed": sealed,
        "sector_bytes": SECTOR_BYTES,
        "checkpoints": 1,
        "known": opened.loaded.known,
    }
    with TieredCache(model, policy, memory, settings.store, max_tokens=max_tokens, **given) as bare:
        if bare.plan.is_resident:
            policy = "full"
    cache = TieredCache(
        model, policy, memory, settings.store, max_tokens=max_tokens,
        past=opened.past(with_index=policy is opened.policy and not exact), progress=progress,
        index_progress=index_progress, **given,
    )  # fmt: skip
    opened.restore_beside(cache)
    return cache


def save_chat(
    reader: Reader, cache: TieredCache, history: ChatHistory, path: Path, *,
    former: OpenDocument | None, policy: SelectionPolicy, memory: Memory, keeps_units: bool,
    on_bytes: OnBytes,
) -> tuple[OpenDocument, int]:  # fmt: skip
    """Commit what a cache holds of a chat.

    Args:
        former: as it was saved last, or opened; extended where it lies in `path`.
        policy: that the chat was begun with.
        keeps_units: take over units that the document has already.

    Returns:
        The new generation, open, and the bytes written.

    Raises:
        As for `Conversation.save`.
    """
    require_documents()
    length = cache.get_seq_length()
    tokens, pending = first_tokens(history.tokens, length), history.tokens[length:]
    if former is not None and _is_same(former.folder, path):
        about, held = former.about, former.groups
        same = shared_beginning(former.tokens, tokens) if keeps_units else 0
        held = held[: same // about.group_tokens]
        states = former_states(former.stored.blob_names, same)
        writer = DocumentWriter.extend(
            former.folder, key=reader.settings.key, generation=former.stored.generation
        )
    else:
        if path.exists() or path.is_symlink():
            raise ConfigError(
                f"{path} is there already, and this chat was not saved there; give another path, "
                "or resume the chat that is in it"
            )
        shape = inspect_model(reader.loaded.model).kv
        group_tokens = unit_tokens(policy, shape)
        about = About(
            model=lasting_name(reader.loaded.name), title=_TITLE, created=max(0.0, time.time()),
            tokens=length, group_tokens=group_tokens, policy=policy.name, policy_fields={},
            memory=memory, has_index=False, has_windows=False, pending=[],
        )  # fmt: skip
        held, states = np.empty(0, dtype=np.int64), []
        writer = DocumentWriter.create(
            path, document_shape(shape, group_tokens), key=reader.settings.key
        )
    made = cache.policy if type(cache.policy) is type(policy) else policy  # all may be in memory
    about = replace(
        about, tokens=length, pending=pending, policy_fields=stored_fields(policy, made),
        # What is fitted to few tokens ranks more badly: it is made again from the keys.
        has_index=policy.index_fields != () and length >= SAMPLE_TOKENS,
        has_windows=any(layer.is_sliding for layer in cache.layers),
    )  # fmt: skip
    with writer:
        store_cache(
            cache, writer, tokens, held, identity=reader.identity(policy, about.group_tokens),
            about=about, progress=on_bytes, more_blobs={CHAT: history.as_bytes()},
            keep_blobs=states,
        )  # fmt: skip
        written = writer.written_bytes
    return OpenDocument.open(reader, path), written


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
