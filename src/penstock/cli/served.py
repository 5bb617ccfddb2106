"""open_app(): the application of one server, from options that may travel to another process."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.console import PlainConsole
from penstock.cli.doc_options import open_shelf
from penstock.cli.generate import in_home
from penstock.cli.loading import ModelSource, load_model
from penstock.core.byte_size import parse_bytes
from penstock.core.errors import StorageError

if TYPE_CHECKING:
    from penstock.documents.document_library import DocumentLibrary
    from penstock.documents.sessions import Sessions
    from penstock.models.loader import LoadedModel
    from penstock.server.app import Application
    from penstock.server.settings import ServerSettings

_DOCUMENT_SHARE = 4
"""Of --memory, one part in so many reads new documents."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Options of `penstock serve` that say what is loaded, and what its engine may take."""

    model: str
    source: ModelSource
    device: str
    dtype: str | None
    weights: str | None
    config: Path | None
    policy: str | None
    memory: str
    disk: str
    exact: bool
    adapter: Path | None
    seal: bool | None
    max_context: int | None
    max_running: int
    max_waiting: int
    chunk: int
    documents: Path | None
    key: str | None
    sessions: Path | None
    max_disk: str


@contextmanager
def open_app(served: ServedModel, settings: "ServerSettings") -> Iterator["Application"]:
    """Load the model and yield an application over its engine; both close at the end."""
    from penstock.engine.adapter import LowRankAdapter
    from penstock.generation.engine import LLM
    from penstock.generation.serving.engine import Engine
    from penstock.server.app import make_app

    for_requests, for_documents = _divided(served.memory)
    adapter, console = served.adapter, PlainConsole(stderr=True)
    loaded = load_model(
        console, served.model, dtype=served.dtype, device=served.device,
        weights=served.weights, source=served.source,
    )  # fmt: skip
    llm = LLM(
        loaded, policy=served.policy, memory=served.memory, store=served.disk,
        exact=served.exact, adapter=adapter, config=served.config,
        seal="auto" if served.seal is None else served.seal, max_model_len=served.max_context,
    )  # fmt: skip
    if adapter is not None and str(adapter) != "none":
        LowRankAdapter.load(adapter)  # each request would find out by itself
    shelf = open_shelf(
        served.documents, served.key, adapter=adapter, prefill_chunk_size=served.chunk
    )
    kept = kept_sessions(console, loaded, shelf, served.sessions, served.max_disk, served.policy)
    with kept as stored, Engine(
        llm, memory=for_requests, max_running=served.max_running, max_waiting=served.max_waiting,
        prefill_chunk_size=served.chunk, sessions=stored,
    ) as engine:  # fmt: skip
        app = make_app(engine, settings, shelf, for_documents)
        with closing(app.state.backend.shelf):
            yield app


def kept_sessions(
    console: PlainConsole, loaded: "LoadedModel", shelf: "DocumentLibrary",
    folder: Path | None, max_disk: str, policy: str | None,
) -> "AbstractContextManager[Sessions | None]":  # fmt: skip
    """Conversations that are stored in a folder, if one is given.

    They are encrypted: with the library's key, else with one in a file beside the folder.

    Raises:
        ConfigError: there is something else than a folder, or no folder for it.
        StorageError: the folder or the key cannot be made.
    """
    from penstock.documents.sessions import Sessions
    from penstock.storage.documents.document_library import make_own_folder
    from penstock.storage.documents.key_sources import own_key

    if folder is None:
        return nullcontext()
    place, settings = in_home(folder, "--sessions"), shelf.settings
    if settings.key is None:
        make_own_folder(place, "the conversations")
        try:
            key = own_key(Path(f"{os.path.realpath(place)}.key"))
        except StorageError as error:
            raise StorageError(f"{error}; give --key, or another folder to --sessions") from error
        settings = replace(settings, key=key)
    kept = Sessions(
        loaded, place, max_bytes=parse_bytes(max_disk), policy=policy or "kvswap",
        settings=settings,
    )  # fmt: skip
    for notice in kept.notices:
        console.print(f"note: {notice}", markup=False, soft_wrap=True)
    return kept


def _divided(memory: str) -> tuple[int | None, str | int]:
    """Memory of all requests together, and of the cache that reads a new document.

    A size is divided between them; a share of the full cache, or "auto", is for each cache.
    """
    if memory == "auto" or set("/%") & set(memory):
        return None, memory
    total = parse_bytes(memory)
    for_documents = total // _DOCUMENT_SHARE
    return total - for_documents, for_documents
