"""store_cache(): what a cache holds of a text, as the next generation of a document."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from penstock.core.shape import KVShape
from penstock.documents.contents import (
    GROUPS,
    TOKENS,
    About,
    groups_blob,
    index_blobs,
    tokens_blob,
    windows_blob,
)
from penstock.documents.stored_states import states_blob
from penstock.documents.stored_visuals import visuals_blob
from penstock.engine.stored_past import READ_BYTES, padded_units
from penstock.generation.prompts import visuals_in
from penstock.models.cache_adapter import TieredCache
from penstock.storage.documents import DocumentWriter, Shape

OnBytes = Callable[[int, int], None]
"""Called with the bytes written so far and all of them."""


def document_shape(shape: KVShape, group_tokens: int) -> Shape:
    """What a document's units are for this cache."""
    return Shape(shape.num_layers, group_tokens * shape.token_bytes)


def store_groups(
    cache: TieredCache, writer: DocumentWriter, first_group: int, end_token: int,
    group_tokens: int, progress: OnBytes, start_token: int = 0,
) -> NDArray[np.int64]:  # fmt: skip
    """Append the groups from `first_group` on, as far as `end_token`, in every layer.

    Args:
        start_token: of the cache, which groups and tokens are counted from; where a group begins.

    Returns:
        Their units. [groups]

    Raises:
        CacheStateError: the cache's policy forgets tokens, or keeps them on a device.
        FetchError: the cache cannot read them.
        StorageError: they cannot be written.
    """
    layers, padded_bytes = writer.shape.layers, writer.shape.padded_bytes
    start = first_group * group_tokens
    step = max(1, READ_BYTES // padded_bytes) * group_tokens
    spans = [(first, min(first + step, end_token)) for first in range(start, end_token, step)]
    total = layers * -(-(end_token - start) // group_tokens) * padded_bytes
    done, units = 0, np.empty(0, dtype=np.int64)
    for layer in range(layers):
        parts = [np.empty(0, dtype=np.int64)]
        for first, end in spans:
            tokens = cache.tiers.read_tokens(layer, start_token + first, start_token + end)[0]
            padded = padded_units(tokens, group_tokens, padded_bytes)
            parts.append(writer.append(layer, padded))
            done += padded.nbytes
            progress(done, total)
        units = np.concatenate(parts)
    return units


def store_cache(
    cache: TieredCache, writer: DocumentWriter, tokens: Sequence[int],
    held: NDArray[np.int64], *, identity: Mapping[str, str], about: About, progress: OnBytes,
    more_blobs: Mapping[str, bytes] = MappingProxyType({}), keep_blobs: Sequence[str] = (),
    start_token: int = 0,
) -> None:  # fmt: skip
    """Commit what a cache holds of `tokens`, units, index, windows, recurrent states and pictures.

    Args:
        tokens: all of the text; the cache holds as many behind `start_token`.
        held: units of the first groups, which the document has already. [groups]
        more_blobs: that the generation has beside those of every document.
        keep_blobs: that it takes over from the one before.

    Raises:
        CacheStateError: the cache's policy forgets tokens, or keeps them on a device.
        StorageError: they cannot be written; nothing is committed.
    """
    assert about.tokens == len(tokens) == cache.get_seq_length() - start_token
    fresh = store_groups(
        cache, writer, len(held), len(tokens), about.group_tokens, progress, start_token
    )
    blobs = {TOKENS: tokens_blob(tokens), GROUPS: groups_blob(np.concatenate([held, fresh]))}
    if about.has_index:
        blobs |= index_blobs(cache, writer.shape.layers)
    blobs |= windows_blob(cache) | states_blob(cache)
    blobs |= visuals_blob(cache, visuals_in(tokens), len(tokens)) | dict(more_blobs)
    kept = [name for name in keep_blobs if name not in blobs]
    writer.commit(identity=identity, about=about.as_json(), blobs=blobs, keep_blobs=kept)
