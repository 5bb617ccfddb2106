"""DocumentLibrary: documents of a library by name, within its limits of room and writing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from penstock.core.errors import (
    ConfigError,
    DocumentDamagedError,
    DocumentError,
    DocumentKeyError,
    PenstockError,
    StoreFullError,
)
from penstock.documents.creating import shared_tokens
from penstock.documents.document import Document
from penstock.documents.opened import OpenDocument
from penstock.documents.recovery import OnTokens
from penstock.documents.settings import (
    DocumentSettings,
    Memory,
    Reader,
    as_loaded,
    unit_tokens,
)
from penstock.documents.storing import OnBytes, document_shape
from penstock.generation.prompts import Prompt, make_batch, single_prompt
from penstock.methods import SelectionPolicy
from penstock.models.cache_settings import named_policy
from penstock.models.identity import weights_of
from penstock.models.loader import CausalLM, LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.storage.documents import DocumentWriter, read_summary
from penstock.storage.documents.document_library import Library
from penstock.storage.documents.quota import check_room, make_room

_INDEX_SHARE = 8
"""The rows of an index take about one part in so many of what keys and values take."""
_SIDE_BYTES = 64 << 10

OnRemoved: TypeAlias = Callable[[str], None]
"""Called with the name of a document that had to go."""


@dataclass(frozen=True, kw_only=True)
class Added:
    """A document that has come to a shelf, and what that took."""

    document: Document
    evicted: list[str]
    """Documents that had to go, the least recently asked first."""
    shared_tokens: int
    """Taken over from another document instead of prefilled."""
    shared_with: str | None


class DocumentLibrary:
    """A library's documents for one way of reading them."""

    def __init__(self, root: str | Path, settings: DocumentSettings | None = None) -> None:
        """Open a library's folder, or make it.

        Raises:
            ConfigError: it is no folder.
            StorageError: it cannot be made.
        """
        self.documents = Library(Path(root))
        self.settings = settings or DocumentSettings()

    def add(
        self, model: str | Path | LoadedModel | CausalLM, text: Prompt, name: str, *,
        policy: str | SelectionPolicy = "kvswap", memory: Memory = "auto", title: str = "",
        shares: bool = True, on_tokens: OnTokens = lambda done, total: None,
        on_bytes: OnBytes = lambda done, total: None,
        on_removed: OnRemoved = lambda name: None,
    ) -> Added:  # fmt: skip
        """Prefill a text and store it under a name.

        Where another document of the same model begins with the same tokens, only the rest is
        prefilled. Where the library would pass its limit, the documents that were asked least
        recently go; not before everything is prefilled and about to be stored.

        Args:
            shares: look for such a document.
            on_removed: called with the name of each document that had to go, as soon as it has
            gone: also
                where storing fails behind it.

        Raises:
            ConfigError: the name cannot be or is taken, or today's writes would pass their limit.
            StoreFullError: the library cannot hold the document within its limit.
            As for `Document.create`.
        """
        folder = self.require_free(name)
        loaded, chosen = as_loaded(model), named_policy(policy)
        batch = make_batch(loaded, [single_prompt(text)], new_tokens=0, pad_token_id=0)
        [tokens] = batch.token_ids
        need = _need_bytes(loaded, chosen, len(tokens))
        self.documents.write_budget.require(need)
        limit = self.documents.settings.max_disk_bytes
        base_name, shared, base = self._longest(loaded, tokens) if shares else (None, 0, None)
        evicted: list[str] = []

        def note(gone: str) -> None:
            evicted.append(gone)
            on_removed(gone)

        def create(base: Document | None, keep: set[str]) -> Document:
            return Document.create(
                loaded, tokens, folder, policy=chosen, memory=memory, title=title, name=name,
                begins_as=base, settings=self.settings, on_tokens=on_tokens, on_bytes=on_bytes,
                before_storing=lambda: make_room(self.documents, need, limit, keep, note),
            )  # fmt: skip

        document = None
        if base is not None and base_name is not None:
            keep = {name, base_name}
            with base, suppress(DocumentDamagedError):  # then without it
                if self._can_make_room(need, limit, keep):
                    document = create(base, keep)
        if document is None:
            base_name, shared = None, 0
            check_room(self.documents, need, limit, {name})
            document = create(None, {name})
        try:
            self.documents.add_written(name, document.written_bytes)
            # The need was an estimate; what came may be more.
            make_room(self.documents, 0, limit, {name}, note)
        except BaseException as error:
            document.close()
            if isinstance(error, StoreFullError):
                self.documents.remove(name)
            raise
        return Added(
            document=document, evicted=evicted, shared_tokens=shared, shared_with=base_name
        )

    def _can_make_room(self, need_bytes: int, limit_bytes: int | None, keep: set[str]) -> bool:
        """Whether there is room beside what is kept, or would be if others went."""
        try:
            check_room(self.documents, need_bytes, limit_bytes, keep)
        except StoreFullError:
            return False
        return True

    def require_free(self, name: str) -> Path:
        """The folder for a new document.

        Raises:
            ConfigError: the name cannot be, or is taken.
        """
        folder = self.documents.folder(name)
        if folder.exists():
            raise ConfigError(
                f"there is a document {name!r} already; remove it with `penstock doc rm {name}`, "
                "or give another name"
            )
        return folder

    @contextmanager
    def open(
        self, name: str, model: str | Path | LoadedModel | CausalLM, *, asks: bool = True
    ) -> Iterator[Document]:
        """A document to ask; that it was asked, and what was written to it, is noted at the end.

        Args:
            asks: false: it is opened for something else.

        Raises:
            ConfigError: there is none of that name; says which there are.
            DocumentError: the folder of that name holds another document.
            As for `Document.open`.
        """
        folder, loaded = self.documents.find(name), as_loaded(model)
        try:
            document = Document.open(loaded, folder, settings=self.settings)
        except DocumentDamagedError as error:
            if not error.what.startswith("kv-"):
                raise
            # A file of units is missing. With its length back, its units are prefilled again.
            DocumentWriter.extend(folder, key=self.settings.key, repair=True).close()
            document = Document.open(loaded, folder, settings=self.settings)
        with document:
            _require_name(document, name)
            try:
                yield document
            finally:
                if asks:
                    self.documents.touch(name)
                if document.written_bytes:
                    self.documents.add_written(name, document.written_bytes)

    def require_room(
        self, name: str, tokens: int, on_removed: OnRemoved = lambda name: None
    ) -> list[str]:
        """Make room for keeping so many more tokens in a document, as `add` does.

        Args:
            on_removed: as for `add`.

        Returns:
            Documents that had to go.

        Raises:
            ConfigError: there is no such document, or today's writes would pass their limit.
            StoreFullError: the library cannot hold that much within its limit.
        """
        summary = read_summary(self.documents.find(name), self.settings.key)
        group_tokens = (summary.about or {}).get("group_tokens", 1)
        units = summary.shape.layers * (-(-tokens // group_tokens) + 1)
        # A commit writes index and checksums anew; the former ones go when it is done.
        need = summary.side_bytes + units * summary.shape.padded_bytes
        self.documents.write_budget.require(need)
        limit = self.documents.settings.max_disk_bytes
        return make_room(self.documents, need, limit, {name}, on_removed)

    def model_of(self, name: str) -> str:
        """What the model of a document was called when the document was added.

        Raises:
            ConfigError: there is no such document, or it says nothing of its model.
            DocumentKeyError, DocumentDamagedError, DocumentFormatError: as for opening.
        """
        about = read_summary(self.documents.find(name), self.settings.key).about
        if about is None:
            raise DocumentKeyError(f"the document {name!r} is encrypted; give its key")
        model = about.get("model")
        if not isinstance(model, str):
            raise ConfigError(f"the document {name!r} does not say its model; give --model")
        return model

    def dtype_of(self, name: str) -> str | None:
        """Type of a document's keys and values; None where it is encrypted and there is no key.

        Raises:
            As for `model_of`.
        """
        identity = read_summary(self.documents.find(name), self.settings.key).identity
        return None if identity is None else identity.get("dtype")

    def weights_of(self, name: str) -> str | None:
        """The bits of the weights that a document was read with, as `load` takes them; None: as
        stored, or it is encrypted and there is no key.

        Raises:
            As for `model_of`.
        """
        identity = read_summary(self.documents.find(name), self.settings.key).identity
        return None if identity is None else weights_of(identity)

    def _longest(
        self, loaded: LoadedModel, tokens: Sequence[int]
    ) -> tuple[str | None, int, Document | None]:
        """The stored document that shares most with a text: name, tokens, and it, open."""
        best: tuple[str | None, int, Document | None] = (None, 0, None)
        reader = Reader(loaded, self.settings)
        for entry in self.documents.entries(self.settings.key):
            if entry.state != "ready" or bool(entry.encrypted) != (self.settings.key is not None):
                continue
            try:  # another model's, a damaged one: none to begin with
                opened = OpenDocument.open(reader, self.documents.find(entry.name))
            except PenstockError:
                continue
            try:
                shared = shared_tokens(opened, tokens)
            except PenstockError:
                shared = 0
            if shared > best[1] and shared >= opened.about.group_tokens:
                if best[2] is not None:
                    best[2].close()
                best = (entry.name, shared, Document(opened))
            else:
                opened.stored.close()
        return best


def _require_name(document: Document, name: str) -> None:
    """Refuse a document that was stored under another name; older ones do not say theirs."""
    stored = document.about.name
    if stored is not None and stored != name:
        raise DocumentError(
            f"the folder {name!r} holds the document that was stored as {stored!r}; give the "
            "folder that name back, or add the text anew"
        )


def _need_bytes(loaded: LoadedModel, policy: SelectionPolicy, tokens: int) -> int:
    """About what a document will take, rather more."""
    shape = inspect_model(loaded.model).kv
    group_tokens = unit_tokens(policy, shape)
    layout = document_shape(shape, group_tokens)
    data = layout.layers * -(-tokens // group_tokens) * layout.padded_bytes
    basis = layout.layers * (shape.num_kv_heads * shape.head_dim) ** 2  # a byte each
    return data + data // _INDEX_SHARE + basis + _SIDE_BYTES
