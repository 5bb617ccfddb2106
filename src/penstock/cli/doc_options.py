"""Options that the commands of `penstock doc` share, and the shelf that they mean."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from penstock.cli.generate import in_home
from penstock.cli.loading import ModelSource, load_model
from penstock.core.errors import ModelLoadError, StorageError

if TYPE_CHECKING:
    from penstock.documents.document_library import DocumentLibrary
    from penstock.models.loader import LoadedModel
    from penstock.storage.documents.document_library import Library

LibraryOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The folder with the documents (default: the user's data).",
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="Of encrypted documents: file:PATH, env:NAME or keyring:SERVICE/USER.",
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A stored document.")]


def library_folder(given: Path | None) -> Path:
    """Where the documents are; the user's own folder is made where it is missing.

    Raises:
        StorageError: it cannot be made.
    """
    if given is not None:
        return in_home(given, "--library")
    data = Path.home() / ".local" / "share" / "penstock"
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make the folder {data}: {error.strerror}") from error
    return data / "documents"


def open_library(given: Path | None) -> "Library":
    """The library, made if it is missing."""
    from penstock.storage.documents.document_library import Library

    return Library(library_folder(given))


def key_of(source: str | None) -> bytes | None:
    """The key that was given, if one was.

    Raises:
        ConfigError: the source makes no sense, or holds no key.
    """
    from penstock.storage.documents.key_sources import read_key

    return None if source is None else read_key(source, environment=os.environ)


def open_shelf(
    library: Path | None, key: str | None, *, disk: str = "auto", adapter: Path | None = None,
    prefill_chunk_size: int = 1024,
) -> "DocumentLibrary":  # fmt: skip
    """The library, and how its documents are read.

    Raises:
        ConfigError: the disk or the key make no sense.
    """
    from penstock.devices.throttle import Throttle
    from penstock.documents.document_library import DocumentLibrary
    from penstock.documents.settings import DocumentSettings
    from penstock.storage.file import KVFile
    from penstock.storage.store import parse_location
    from penstock.storage.throttled_file import ThrottledFile

    profile, place = parse_location(disk)
    throttle = None if profile is None else Throttle(profile)

    def wrap(file: KVFile) -> KVFile:
        return file if throttle is None else ThrottledFile(file, throttle)

    settings = DocumentSettings(
        key=key_of(key), store=disk if profile is None else place, adapter=adapter,
        prefill_chunk_size=prefill_chunk_size, wrap=wrap,
    )  # fmt: skip
    return DocumentLibrary(library_folder(library), settings)


def load_model_of(
    shelf: "DocumentLibrary", name: str, model: str | None, console: Console, *, device: str,
    dtype: str | None, weights: str | None = None, source: ModelSource | None = None,
) -> "tuple[str, LoadedModel]":  # fmt: skip
    """The model of a document, and what it is called.

    Args:
        model: what was given with --model; None: as the document says.
        dtype, weights: what was given with --dtype and --weights; None: as the document says.

    Raises:
        ModelLoadError: it cannot be loaded.
        As for `DocumentLibrary.model_of`.
    """
    called = shelf.model_of(name) if model is None else model
    try:
        return called, load_model(
            console,
            called,
            dtype=dtype or shelf.dtype_of(name),
            weights=weights or shelf.weights_of(name),
            device=device,
            source=source or ModelSource(),
        )
    except ModelLoadError as error:
        if model is not None:
            raise
        raise ModelLoadError(
            f"{error}; the document {name!r} says so: say with --model where its model is now"
        ) from error
