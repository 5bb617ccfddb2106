"""create_document(): prefill a text, or the part of it that is not stored yet, and store it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from penstock.core.errors import ConfigError
from penstock.documents.contents import About
from penstock.documents.opened import OpenDocument
from penstock.documents.recovery import OnTokens
from penstock.documents.settings import (
    Memory,
    Reader,
    stored_fields,
    unit_tokens,
)
from penstock.documents.storing import OnBytes, document_shape, store_cache
from penstock.generation.chunked_prefill import prefill as read
from penstock.generation.prompts import Prompt, make_batch, padded, single_prompt, visuals_in
from penstock.methods import SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.identity import require_same
from penstock.models.loader import LoadedModel, lasting_name
from penstock.models.model_shape import inspect_model
from penstock.models.visuals import common_beginning
from penstock.storage.documents import DocumentWriter


def create_document(
    reader: Reader, text: Prompt, folder: Path, *, policy: SelectionPolicy, memory: Memory,
    title: str, name: str | None, base: OpenDocument | None, on_tokens: OnTokens, on_bytes: OnBytes,
    before_storing: Callable[[], object],
) -> int:  # fmt: skip
    """Read a text and store it; `Document.create` calls this.

    Args:
        base: a document whose beginning may be the text's.

    Returns:
        Bytes written.
    """
    loaded, settings = reader.loaded, reader.settings
    if policy.drops:
        raise ConfigError(f"{policy.name} forgets tokens and a document keeps all; take another")
    batch = make_batch(loaded, [single_prompt(text)], new_tokens=0, pad_token_id=0)
    [tokens] = batch.token_ids
    shape = inspect_model(loaded.model).kv
    group_tokens = unit_tokens(policy, shape)
    identity = reader.identity(policy, group_tokens)
    shared = 0
    if base is not None:
        same = reader.as_stored(base.identity, base.policy, base.about.group_tokens)
        known = same.identity(base.policy, base.about.group_tokens)
        require_same(base.identity, known, f"the document in {base.folder}")
        shared = shared_tokens(base, tokens)
    layout = document_shape(shape, group_tokens)
    with DocumentWriter.create(folder, layout, key=settings.key) as writer:
        with TieredCache(
            loaded.model, policy, memory, settings.store, max_tokens=len(tokens),
            adapter=settings.adapter, must_tier=True, prompt_tokens=len(tokens),
            past=None if base is None or not shared else base.past(with_index=False),
            past_tokens=shared, sealed=settings.sealed, known=loaded.known,
        ) as cache:  # fmt: skip
            if base is not None and shared:
                base.restore_beside(cache)
            prefill(loaded, cache, tokens, settings.prefill_chunk_size, on_tokens)
            about = About(
                model=lasting_name(loaded.name), title=title, name=name,
                created=max(0.0, time.time()), tokens=len(tokens),
                group_tokens=group_tokens, policy=policy.name,
                memory=memory, pending=[],
                policy_fields=stored_fields(policy, cache.policy),
                has_index=policy.index_fields != (),
                has_windows=any(layer.is_sliding for layer in cache.layers),
            )  # fmt: skip
            before_storing()
            none = np.empty(0, dtype=np.int64)
            store_cache(
                cache,
                writer,
                tokens,
                none,
                identity=identity,
                about=about,
                progress=on_bytes,
            )
        return writer.written_bytes


def shared_tokens(base: OpenDocument, tokens: Sequence[int]) -> int:
    """How many tokens of a text to take over from a stored one that begins with them too.

    Raises:
        DocumentDamagedError: the stored tokens are not what they were.
    """
    known = base.tokens
    shared = common_beginning(tokens, visuals_in(tokens), known, known.visuals)
    if base.state_lengths is not None:
        places = {each for each in base.state_lengths if each <= shared} - {len(tokens) - 1}
        shared = max(places, default=0)
    if 0 < shared == len(tokens) - 1:
        shared -= 1  # one token alone would be a decode step
    # Windows are stored at the text's end alone.
    return shared if not base.about.has_windows or shared == base.about.tokens else 0


def prefill(
    loaded: LoadedModel, cache: TieredCache, tokens: Sequence[int], chunk: int, progress: OnTokens
) -> None:
    """Prefill what the cache does not hold yet."""
    done, total = cache.get_seq_length(), len(tokens)
    progress(done, total)
    if done < total:
        chunk = max(2, chunk)  # a single token would be a decode step over a selection
        batch = padded([None], [tokens if isinstance(tokens, list) else list(tokens)], 0)
        read(loaded.model, cache, batch, chunk, on_chunk=lambda done: progress(done, total))
