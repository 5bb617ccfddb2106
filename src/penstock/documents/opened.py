"""OpenDocument: a committed generation of a stored text, and what caches over it are made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import DocumentDamagedError
from penstock.core.shape import KVShape
from penstock.documents.contents import (
    GROUPS,
    About,
    read_groups,
    read_index,
    read_tokens,
    restore_windows,
)
from penstock.documents.settings import STORED, DocumentSettings, Memory, Reader
from penstock.documents.stored_states import restore_states, state_lengths
from penstock.documents.stored_visuals import StoredVisuals, hold_positions, read_visuals
from penstock.engine.stored_past import StoredPast
from penstock.generation.prompts import TokenIds
from penstock.methods import SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.identity import require_same
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.storage.documents import StoredDocument

UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class OpenDocument:
    """One generation, checked to be of this model. Its caches hold on to it."""

    reader: Reader
    folder: Path
    stored: StoredDocument
    about: About
    policy: SelectionPolicy
    """That the text was prefilled under, its index's choices made."""
    identity: Mapping[str, str]
    groups: NDArray[np.int64]
    """Which unit holds a group; `UNKNOWN` where that is lost. [groups]"""

    @classmethod
    def open(cls, reader: Reader, folder: Path) -> "OpenDocument":
        """Open the newest generation: manifest, seals and the table of units, nothing else.

        Raises:
            DocumentMismatchError: another model, tokenizer or adapter; names the fields.
            DocumentError: see `StoredDocument.open`.
            DocumentDamagedError: its manifest or seals are damaged.
        """
        settings = reader.settings
        stored = StoredDocument.open(folder, key=settings.key, wrap=settings.wrap)
        try:
            about = About.of(stored)
            policy = about.make_policy()
            reader = reader.as_stored(stored.identity, policy, about.group_tokens)
            identity = reader.identity(policy, about.group_tokens)
            require_same(stored.identity, identity, f"the document in {folder}")
            _check_shape(stored, inspect_model(reader.loaded.model).kv, about)
            try:
                groups = read_groups(stored, about.num_groups)
            except DocumentDamagedError:  # a question prefills everything again
                groups = np.full(about.num_groups, UNKNOWN)
            return cls(
                reader=reader, folder=folder, stored=stored, about=about, policy=policy,
                identity=identity, groups=groups,
            )  # fmt: skip
        except BaseException:
            stored.close()
            raise

    @property
    def loaded(self) -> LoadedModel:
        """The model that reads it."""
        return self.reader.loaded

    @property
    def settings(self) -> DocumentSettings:
        """How it is read."""
        return self.reader.settings

    @cached_property
    def tokens(self) -> TokenIds:
        """Token ids of the text, and its pictures; read when they are first asked for."""
        vocabulary = self.loaded.model.get_input_embeddings().weight.shape[0]
        ids = read_tokens(self.stored, self.about.tokens, vocabulary)
        return TokenIds(ids, visuals=self.pictures.visuals)

    @cached_property
    def pictures(self) -> StoredVisuals:
        """The pictures of the text, and where they stand.

        Raises:
            DocumentDamagedError: they are not what was stored.
            DocumentMismatchError: the model sees otherwise.
        """
        return read_visuals(self.stored, self.loaded.model, self.about.tokens)

    @property
    def state_lengths(self) -> list[int] | None:
        """Tokens behind which recurrent states are stored; None for a model without such."""
        if not inspect_model(self.loaded.model).states:
            return None
        return state_lengths(self.stored.blob_names)

    @property
    def opened_bytes(self) -> int:
        """Bytes that opening read."""
        return self.stored.opened_bytes + self.groups.nbytes

    def past(self, *, with_index: bool, groups: NDArray[np.int64] | None = None) -> StoredPast:
        """The stored KV, for caches.

        Args:
            groups: in place of the stored table.

        Raises:
            DocumentDamagedError: its place is lost.
        """
        units = self.groups if groups is None else groups
        if (units == UNKNOWN).any():
            raise DocumentDamagedError("the document's table of units is damaged", what=GROUPS)

        def index_state(layer: int) -> Mapping[str, Tensor] | None:
            return read_index(self.stored, layer) if with_index else None

        return StoredPast(
            shape=inspect_model(self.loaded.model).kv, files=self.stored.files,
            unit_of_group=units, num_units=self.stored.num_units,
            group_tokens=self.about.group_tokens, length=self.about.tokens, index_state=index_state,
        )  # fmt: skip

    def budget(self, memory: Memory) -> Memory:
        """What a cache's `memory` means here."""
        if memory != STORED:
            return memory
        own = self.settings.memory
        return self.about.memory if own == STORED else own

    def restore_beside(self, cache: TieredCache) -> None:
        """Give a cache that holds tokens of the text what is not in tiers: sliding windows behind
        all of it, recurrent states where there are some, and where its tokens stand; closes it if
        that fails."""
        try:
            hold_positions(cache, self.pictures.blocks)
            if self.about.has_windows:
                restore_windows(self.stored, cache, self.about.tokens)
            restore_states(self.stored, cache, cache.get_seq_length())
        except BaseException:
            cache.close()
            raise


def _check_shape(stored: StoredDocument, shape: KVShape, about: About) -> None:
    """Refuse units that do not hold this model's tokens.

    Raises:
        DocumentDamagedError: they do not.
    """
    wanted = (shape.num_layers, about.group_tokens * shape.token_bytes)
    found = (stored.shape.layers, stored.shape.unit_bytes)
    if found != wanted:
        raise DocumentDamagedError(
            f"the document has {found[0]} layers with units of {found[1]} bytes, and its model "
            f"{wanted[0]} of {wanted[1]}; add the text anew",
            what="manifest",
        )
