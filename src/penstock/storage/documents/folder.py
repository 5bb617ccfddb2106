"""What is done with a document without opening it: its summary, its size, its removal."""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import DocumentError, StorageError
from penstock.storage.documents.disk import Disk, Folder, typed_errors
from penstock.storage.documents.document import (
    LOCK,
    load_manifest,
    lock_document,
    open_document_folder,
)
from penstock.storage.documents.manifest import MANIFEST, Shape, read_manifest
from penstock.storage.documents.real_disk import REAL_DISK

TEMPORARY = "manifest.json.new"
WRITER_LOCK = "lock-writer"
_OWN_NAME = re.compile(
    r"manifest\.json(\.new)?|lock(-writer)?|kv-\d+\.units|seals-\d+|blob-\d+-.+|usage\.json.*"
    r"|\.penstock-[0-9a-f]{16}"  # left by a try of direct I/O where files cannot be nameless
)


@dataclass(frozen=True)
class Summary:
    """What a document's manifest says.

    Attributes:
        document_id: 32 hex digits, random
        generation: 1 for the first commit
        shape: layers and bytes of a unit
        num_units: in each layer
        data_bytes: of the committed units of all layers
        side_bytes: of the blobs and seals
        encrypted: a key is needed to open it
        identity: None when encrypted and read without the key
        about: None likewise
    """

    document_id: str
    generation: int
    shape: Shape
    num_units: int
    data_bytes: int
    side_bytes: int
    encrypted: bool
    identity: Mapping[str, str] | None
    about: Mapping[str, Any] | None


def is_own_name(name: str) -> bool:
    """Whether a file of this name may belong to a document."""
    return _OWN_NAME.fullmatch(name) is not None


def is_unfinished(folder: Path, *, disk: Disk = REAL_DISK) -> bool:
    """Whether nothing was ever committed to the document in `folder`, as far as a look shows.

    A document that a process stores just now is unfinished too; `remove` refuses that one.

    Raises:
        DocumentError: there is no folder.
        StorageError: the disk failed.
    """
    with typed_errors(f"look into {folder}"):
        opened = open_document_folder(disk, folder)
        try:
            names = opened.sizes()
        finally:
            opened.close()
    return MANIFEST not in names and all(map(is_own_name, names))


def size_bytes(folder: Path, *, disk: Disk = REAL_DISK) -> int:
    """Bytes of all files of the document in `folder`, uncommitted ones included.

    Raises:
        DocumentError: there is no folder.
        StorageError: the disk failed.
    """
    with typed_errors(f"look into {folder}"):
        opened = open_document_folder(disk, folder)
        try:
            return sum(opened.sizes().values())
        finally:
            opened.close()


def read_summary(folder: Path, key: bytes | None = None, *, disk: Disk = REAL_DISK) -> Summary:
    """What the manifest of the document in `folder` says; reads nothing else, takes no lock.

    Args:
        key: where the document is encrypted; without it, `identity` and `about` are None. Not
            looked at where it is not.

    Raises:
        DocumentError: there is no document, or it is unfinished.
        DocumentKeyError: the wrong key.
        DocumentFormatError: a newer format, or not a document.
        DocumentDamagedError: the manifest is damaged.
        StorageError: the disk failed.
    """
    with typed_errors(f"read {MANIFEST} in {folder}"):
        opened = open_document_folder(disk, folder)
        try:
            raw = load_manifest(opened, folder)
        finally:
            opened.close()
    manifest, _ = read_manifest(raw, key, peek=True)
    sides = [manifest.seals, *manifest.blobs.values()]
    return Summary(
        document_id=manifest.document_id,
        generation=manifest.generation,
        shape=manifest.shape,
        num_units=manifest.num_units,
        data_bytes=manifest.data_bytes,
        side_bytes=sum(side.num_bytes for side in sides),
        encrypted=manifest.encrypted,
        identity=manifest.identity,
        about=manifest.about,
    )


def remove(folder: Path, *, disk: Disk = REAL_DISK) -> None:
    """Remove a document, finished or not, for good.

    A crash in the middle leaves an unfinished document or none.

    Raises:
        DocumentBusyError: a process has it open; nothing is removed then.
        DocumentError: there is no document, or another's files; nothing is removed then.
        StorageError: the disk failed.
    """
    with contextlib.ExitStack() as stack, typed_errors(f"remove the document in {folder}"):
        opened = open_document_folder(disk, folder)
        stack.callback(opened.close)
        if LOCK in opened.sizes():  # else no process has it open, and a crash came first
            stack.callback(lock_document(opened, folder, exclusive=True))
        names = opened.sizes()
        if disk is REAL_DISK and not os.access(folder.absolute().parent, os.W_OK | os.X_OK):
            raise StorageError(
                f"cannot remove {folder}: the folder above may not be written; nothing was removed"
            )
        if foreign := [name for name in names if not is_own_name(name)]:
            raise DocumentError(f"{folder} is not only a document: it has {foreign[0]!r}")
        remove_all(disk, opened, folder, names)


def remove_all(disk: Disk, opened: Folder, path: Path, names: Mapping[str, int]) -> None:
    """Remove the files of a document and its folder, so that no crash leaves half of it readable.

    Raises:
        OSError: the disk failed.
    """
    if MANIFEST in names:
        opened.unlink(MANIFEST)
    opened.sync()  # before the first byte goes that a manifest, removed now or earlier, vouches for
    for name in sorted(names, key=lambda name: name == LOCK):
        if name != MANIFEST:
            opened.unlink(name)
    disk.remove_folder(path)
    disk.sync_parent(path)
