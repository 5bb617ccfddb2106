"""Pictures in a stored document: where they stand and what they are; their pixels are not kept."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.core.errors import DocumentDamagedError, DocumentMismatchError
from penstock.models.cache_adapter import TieredCache
from penstock.models.loader import CausalLM
from penstock.models.row_positions import Block
from penstock.models.visuals import Visual, encoder_digest
from penstock.storage.documents import StoredDocument

VISUALS = "visuals"
"""Blob of a document whose text has pictures."""
_FORMAT = 1


class StoredVisuals(NamedTuple):
    """What a document knows of its pictures."""

    visuals: tuple[Visual, ...]
    blocks: tuple[Block, ...]
    """Where positions are not places."""


def visuals_blob(cache: TieredCache, visuals: Sequence[Visual], length: int) -> dict[str, bytes]:
    """The pictures in a cache's first row, as one blob; none without such."""
    calls = cache.decoder_calls
    if calls is None:
        return {}
    blocks = calls.positions.blocks(0, length)
    if not visuals and not blocks:
        return {}
    content = {
        "format": _FORMAT, "encoder": encoder_digest(calls.config),
        "visuals": [[each.start, each.end, each.digest] for each in visuals], "blocks": blocks,
    }  # fmt: skip
    return {VISUALS: json.dumps(content).encode()}


def read_visuals(stored: StoredDocument, model: CausalLM, length: int) -> StoredVisuals:
    """The pictures in a document of `length` tokens; none where it has none.

    Raises:
        DocumentDamagedError: they are not what was stored.
        DocumentMismatchError: the model's part that sees is configured otherwise.
    """
    if VISUALS not in stored.blob_names:
        return StoredVisuals((), ())
    try:
        content = json.loads(stored.blob(VISUALS))
        visuals = [Visual(start=a, end=b, digest=digest) for a, b, digest in content["visuals"]]
        blocks = [Block(*each) for each in content["blocks"]]
        spans: list[Any] = [*visuals, *blocks]
        right = content["format"] == _FORMAT and all(
            type(number) is int and 0 <= number <= length
            for each in spans for number in (each.start, each.end)
        )  # fmt: skip
        right = right and all(type(each.digest) is str for each in visuals)
        right = right and all(type(each.text) is int and each.start <= each.end for each in blocks)
        right = right and all(each.start < each.end for each in visuals)
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        raise DocumentDamagedError(
            "what the document says of its pictures makes no sense; restore it, or add the text "
            "anew",
            what=VISUALS,
        )
    if content["encoder"] != encoder_digest(model.config):
        raise DocumentMismatchError(
            "the document's pictures were read by a model whose vision is configured otherwise; "
            "give the model that it was added with, or add the text again"
        )
    return StoredVisuals(tuple(visuals), tuple(blocks))


def require_text(ranges: Sequence[tuple[int, int]], visuals: Sequence[Visual]) -> None:
    """Refuse to prefill tokens of pictures again.

    Args:
        ranges: first and end token of what is to be prefilled.

    Raises:
        DocumentDamagedError: a picture is among them.
    """
    for start, end in ranges:
        for visual in visuals:
            if start < visual.end and visual.start < end:
                raise DocumentDamagedError(
                    f"tokens {visual.start:,} to {visual.end:,} of the document are a picture and "
                    "would be prefilled again, and its pixels are not stored; add the text and its "
                    "pictures anew",
                    what=VISUALS,
                )


def hold_positions(cache: TieredCache, blocks: Sequence[Block]) -> None:
    """Have all rows of a cache stand where the document's text does."""
    if cache.decoder_calls is not None:
        cache.decoder_calls.positions.hold([blocks] * max(1, cache.batch_size))
