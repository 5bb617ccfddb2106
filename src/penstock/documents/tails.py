"""Tail: what conversations behind a document store: the KV behind it, none of its own."""

import time
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.errors import PenstockError
from penstock.documents.contents import About
from penstock.documents.document import Document
from penstock.documents.opened import OpenDocument
from penstock.engine.index_fit import SAMPLE_TOKENS
from penstock.engine.stored_past import StoredPast
from penstock.models.cache_adapter import TieredCache
from penstock.storage.overlay_file import OverlayFile


@dataclass(frozen=True)
class Tail:
    """The place of conversations behind one generation of a document.

    A tail begins with the group of tokens in which the document ends, so that its units are whole.
    """

    document: Document
    opened: OpenDocument

    @classmethod
    def behind(cls, beginning: object) -> "Tail | None":
        """The place behind a beginning; None where tails cannot be stored.

        They cannot behind pictures, nor with sliding windows: those are stored at a text's end
        alone.
        """
        if not isinstance(beginning, Document):
            return None
        opened = beginning.generation_in_use
        try:
            pictures = opened.pictures
        except PenstockError:  # damaged; who reads the document says so
            return None
        if opened.about.has_windows or pictures.visuals or pictures.blocks:
            return None
        return cls(beginning, opened)

    @property
    def name(self) -> str:
        """Of this document in this generation; of no other, whatever replaces it."""
        return f"{self.opened.stored.document_id}-{self.opened.stored.generation}"

    @property
    def start(self) -> int:
        """First token."""
        group = self.opened.about.group_tokens
        return self.opened.about.tokens // group * group

    def about(self, cache: TieredCache, title: str) -> About:
        """What a document of a tail says of itself, with all that a cache holds."""
        about, policy, length = self.opened.about, self.opened.policy, cache.get_seq_length()
        is_same = type(cache.policy) is type(policy) and all(
            getattr(cache.policy, name) == getattr(policy, name) for name in policy.index_fields
        )
        return replace(
            about, title=title, name=None, created=time.time(), tokens=length - self.start,
            memory="auto", pending=[], has_index=policy.index_fields != () and is_same
            and length >= SAMPLE_TOKENS and not cache.plan.is_resident,
        )  # fmt: skip

    def past(self, tail: OpenDocument, *, with_index: bool) -> StoredPast:
        """The document with a tail behind it, for caches.

        Raises:
            DocumentDamagedError: the place of some units is lost.
        """
        base, own = self.opened.past(with_index=False), tail.past(with_index=with_index)
        groups = base.unit_of_group[: self.start // base.group_tokens]
        size = base.num_units * base.padded_bytes
        return replace(
            own, files=[OverlayFile(*each) for each in zip(
                base.files, [size] * len(base.files), own.files, strict=True)],
            unit_of_group=np.concatenate([groups, own.unit_of_group + base.num_units]),
            num_units=base.num_units + own.num_units, length=self.start + own.length,
        )  # fmt: skip
