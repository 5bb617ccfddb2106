"""DocumentWriter: appends units to a document and commits them with its blobs, all or nothing."""

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from penstock.core.closing import DeferredInterrupts, close_all
from penstock.core.errors import (
    ConfigError,
    DocumentBusyError,
    DocumentDamagedError,
    DocumentError,
    StoreFullError,
)
from penstock.storage.documents.blobs import stored_bytes, write_blob
from penstock.storage.documents.disk import Disk, DiskFile, Folder, typed_errors
from penstock.storage.documents.document import (
    LOCK,
    load_manifest,
    load_seals,
    lock_document,
    open_document_folder,
)
from penstock.storage.documents.folder import TEMPORARY, WRITER_LOCK, is_own_name, remove_all
from penstock.storage.documents.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    Shape,
    SideFile,
    is_blob_name,
    read_manifest,
    seals_file,
    units_file,
    write_manifest,
)
from penstock.storage.documents.real_disk import REAL_DISK
from penstock.storage.documents.sealing import Sealer, new_sealer
from penstock.storage.file import ByteArray, Int64Array

_PIECE_BYTES = 8 << 20
"""Appends are sealed and written in pieces of about this size."""


class DocumentWriter:
    """The one writer of a document. Readers of committed generations go on undisturbed.

    A call that raises StoreFullError may be repeated when there is room. After any other error, or
    when a disk finds only while syncing that it is full, the writer refuses all but `close`.

    Attributes:
        shape: layers and bytes of a unit
        document_id: 32 hex digits, random
        generation: of the last commit; 0 before the first
        written_bytes: handed to the disk so far, padding, seals and blobs included
    """

    def __init__(
        self, disk: Disk, path: Path, folder: Folder, manifest: Manifest, sealer: Sealer,
        seals: ByteArray, close: Callable[[], None],
    ) -> None:  # fmt: skip
        """Take over an open, locked folder; use `create` or `extend`.

        Args:
            manifest: of the last commit; generation 0 before the first.
            seals: of the committed units, [layers, num_units, seal_bytes].
        """
        self.shape = manifest.shape
        self.document_id = manifest.document_id
        self.written_bytes = 0
        self._disk = disk
        self._path = path
        self._folder = folder
        self._committed = manifest
        self._sealer = sealer
        self._seals: list[list[ByteArray]] = [[part] for part in seals]
        self._counts = [0] * self.shape.layers  # of appended units, by layer
        self._files: dict[int, DiskFile] = {}
        self._close = close
        self._is_closed = self._has_failed = False

    @classmethod
    def create(
        cls, folder: Path, shape: Shape, *, key: bytes | None = None, disk: Disk = REAL_DISK
    ) -> "DocumentWriter":
        """Begin a new document; it cannot be opened before the first commit.

        Args:
            folder: is made; the folder above it must be there.
            key: 32 bytes to encrypt with.

        Raises:
            ConfigError: the folder is there already, or the one above is not.
            DocumentKeyError: the key's length is wrong, or `cryptography` is not installed.
            StorageError: the disk failed.
        """
        document_id = secrets.token_hex(16)
        sealer = new_sealer(key, document_id)
        what = f"make a document in {folder}"
        with DeferredInterrupts(), contextlib.ExitStack() as stack, typed_errors(what):
            try:
                opened = disk.make_folder(folder)
            except FileExistsError as error:
                raise ConfigError(f"{folder} is there already; remove it first") from error
            except FileNotFoundError as error:
                raise ConfigError(f"the folder above {folder} does not exist; make it") from error
            stack.callback(opened.close)
            try:
                for name, exclusive in ((LOCK, False), (WRITER_LOCK, True)):
                    stack.callback(opened.lock(name, exclusive=exclusive, create=True))
            except BlockingIOError as error:
                raise DocumentBusyError(f"{folder} was taken by another process") from error
            none = SideFile(0, 0, hashlib.sha256(b"").hexdigest())
            manifest = Manifest(document_id, 0, shape, 0, none, {}, key is not None, {}, {})
            seals = np.empty((shape.layers, 0, sealer.seal_bytes), dtype=np.uint8)
            return cls(disk, folder, opened, manifest, sealer, seals, stack.pop_all().close)

    @classmethod
    def extend(
        cls, folder: Path, *, key: bytes | None = None, disk: Disk = REAL_DISK,
        generation: int | None = None, repair: bool = False,
    ) -> "DocumentWriter":  # fmt: skip
        """Go on behind the last commit; what an interrupted one left is dropped.

        Args:
            generation: that the caller has read and goes on from; None: whichever is the last.
            repair: also where files of units are short or missing. They get their length back; the
                units that they lost stay damaged until they are appended anew.

        Raises:
            DocumentBusyError: there is a writer already, the document is being removed, or
                another writer has committed since `generation`.
            DocumentError: there is no document, or it is unfinished.
            DocumentKeyError, DocumentFormatError, DocumentDamagedError: as for opening.
            StorageError: the disk failed.
        """
        what = f"extend the document in {folder}"
        with DeferredInterrupts(), contextlib.ExitStack() as stack, typed_errors(what):
            opened = open_document_folder(disk, folder)
            stack.callback(opened.close)
            stack.callback(lock_document(opened, folder, exclusive=False))
            try:
                stack.callback(opened.lock(WRITER_LOCK, exclusive=True, create=True))
            except BlockingIOError as error:
                raise DocumentBusyError(
                    f"the document in {folder} is being written; try again later"
                ) from error
            raw = load_manifest(opened, folder)
            manifest, sealer = read_manifest(raw, key)
            assert sealer is not None
            if generation is not None and manifest.generation != generation:
                raise DocumentBusyError(
                    f"another process has written to the document in {folder} since it was opened; "
                    "open it again"
                )
            try:
                file = opened.open(seals_file(manifest.seals.generation))
            except FileNotFoundError as error:
                raise DocumentDamagedError("the document lacks its seals", what="seals") from error
            try:
                seals = load_seals(file, manifest, sealer)
            finally:
                file.close()
            _drop_leftovers(opened, manifest, repair=repair)
            return cls(disk, folder, opened, manifest, sealer, seals, stack.pop_all().close)

    @property
    def generation(self) -> int:
        """Of the last commit; 0 before the first."""
        return self._committed.generation

    @property
    def first_unit(self) -> int:
        """Number of committed units of each layer, and so of the first unit of the next commit."""
        return self._committed.num_units

    def append(self, layer: int, padded: ByteArray) -> Int64Array:
        """Write units behind those of this layer.

        Args:
            padded: uint8 [num_units, padded_bytes], whole units, padding included.

        Returns:
            Their numbers, int64 [num_units]: the same in every layer.

        Raises:
            StoreFullError: there is no room; nothing was appended.
            StorageError: the disk failed.
        """
        assert padded.dtype == np.uint8, padded.dtype
        assert padded.shape == (len(padded), self.shape.padded_bytes), padded.shape
        assert 0 <= layer < self.shape.layers, layer
        first = self.first_unit + self._counts[layer]
        step = max(1, _PIECE_BYTES // self.shape.padded_bytes)
        parts = []
        with self._guarded(f"append units to {self._path}"):
            file = self._units(layer)
            for begin in range(0, len(padded), step):
                piece = np.ascontiguousarray(padded[begin : begin + step])
                stored, seals = self._sealer.seal_units(layer, first + begin, piece)
                file.write_at((first + begin) * self.shape.padded_bytes, stored.reshape(-1).data)
                self.written_bytes += stored.nbytes
                parts.append(seals)
        self._seals[layer] += parts
        self._counts[layer] += len(padded)
        return np.arange(first, first + len(padded), dtype=np.int64)

    def commit(
        self, *, identity: Mapping[str, str], about: Mapping[str, Any], blobs: Mapping[str, bytes],
        keep_blobs: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Make what was appended, and these blobs, the document's new generation, for good.

        Args:
            identity: the caller's fingerprint fields.
            about: the caller's JSON values.
            blobs: the new ones, by name: letters, digits, "_", "." and "-", at most 100.
            keep_blobs: names of committed ones that stay; others are dropped.

        Raises:
            StoreFullError: there is no room; the former generation stays, and this may be tried
                again.
            ConfigError: the manifest would be longer than 16 MiB.
            StorageError: the disk failed. The former generation is there, or the new one.
        """
        kept = set(keep_blobs)
        assert len(set(self._counts)) == 1, f"layers of unequal length: {self._counts}"
        assert all(map(is_blob_name, blobs)), sorted(blobs)
        assert kept <= self._committed.blobs.keys() - blobs.keys(), sorted(kept)
        assert all(isinstance(text, str) for pair in identity.items() for text in pair), identity
        assert json.loads(json.dumps(dict(about), allow_nan=False)) == about, "not plain JSON"
        former = self._committed
        with self._guarded(f"commit the document in {self._path}"):
            _drop_strays(self._folder, former)  # of a commit that had no room
            manifest = self._write_side_files(
                replace(
                    former,
                    generation=former.generation + 1,
                    num_units=former.num_units + self._counts[0],
                    blobs={name: former.blobs[name] for name in sorted(kept)},
                    identity=dict(identity),
                    about=dict(about),
                ),
                blobs,
            )
            self._publish(manifest)
        self._committed = manifest
        self._counts = [0] * self.shape.layers
        with contextlib.suppress(OSError):  # the next writer would do it
            _drop_strays(self._folder, manifest)

    def close(self) -> None:
        """Drop what is not committed and let the document go; a second call does nothing.

        The folder of a document that was never committed is removed.
        """
        with DeferredInterrupts():
            if self._is_closed:
                return
            self._is_closed = True
            files = (file.close for file in self._files.values())
            close_all(self._drop_uncommitted, *files, self._close)

    def __enter__(self) -> "DocumentWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write_side_files(self, manifest: Manifest, blobs: Mapping[str, bytes]) -> Manifest:
        """Sync the units; write and sync blobs and seals; returns the manifest with them."""
        for layer in range(self.shape.layers):
            if self._counts[layer] or not self.generation:
                self._sync(self._units(layer))
        generation, sides = manifest.generation, dict(manifest.blobs)
        for name, payload in blobs.items():
            sides[name] = write_blob(self._folder, name, generation, payload, self._sealer)
            self.written_bytes += stored_bytes(len(payload), self._sealer)
        seals = b"".join(part.tobytes() for layer in self._seals for part in layer)
        self._write_file(seals_file(generation), seals)
        side = SideFile(generation, len(seals), hashlib.sha256(seals).hexdigest())
        return replace(manifest, seals=side, blobs=sides)

    def _publish(self, manifest: Manifest) -> None:
        """Put the manifest in place. All that it names is synced; its files' names are not yet."""
        raw = write_manifest(manifest, self._sealer)
        if len(raw) > MANIFEST_BYTES_MAX:
            raise ConfigError(f"the manifest would have {len(raw)} bytes; keep `about` small")
        self._write_file(TEMPORARY, raw)
        self._folder.sync()
        if not self.generation:
            self._disk.sync_parent(self._path)
        self._folder.replace(TEMPORARY, MANIFEST)
        self._has_failed = True  # until it is known to last, either one may be there
        self._folder.sync()
        self._has_failed = False

    def _write_file(self, name: str, data: bytes) -> None:
        file = self._folder.create(name)
        try:
            file.write_at(0, data)
            self.written_bytes += len(data)
            self._sync(file)
        finally:
            file.close()

    def _sync(self, file: DiskFile) -> None:
        """Sync; what a failed sync has lost no second one brings back."""
        failed_before, self._has_failed = self._has_failed, True
        file.sync()
        self._has_failed = failed_before

    def _units(self, layer: int) -> DiskFile:
        file = self._files.get(layer)
        if file is None:
            name = units_file(layer)
            if self.generation:
                file = self._folder.open(name, writable=True)
            else:
                file = self._folder.create(name)
            self._files[layer] = file
        return file

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Errors of the disk as typed ones; all but a full disk end the writer's use."""
        if self._is_closed or self._has_failed:
            why = "is closed" if self._is_closed else "has failed; close it and begin anew"
            raise DocumentError(f"the writer of the document in {self._path} {why}")
        try:
            with typed_errors(what):
                yield
        except (StoreFullError, ConfigError):
            raise
        except BaseException:
            self._has_failed = True
            raise

    def _drop_uncommitted(self) -> None:
        with contextlib.suppress(OSError):  # the next writer, or `remove`, would do it
            names = self._folder.sizes()
            if MANIFEST in names:
                if not self._has_failed:
                    for layer, count in enumerate(self._counts):
                        if count:
                            _truncate(self._files[layer], self._committed)
                    _drop_strays(self._folder, self._committed)
            elif not self.generation and all(map(is_own_name, names)):
                remove_all(self._disk, self._folder, self._path, names)


def _drop_leftovers(folder: Folder, manifest: Manifest, *, repair: bool) -> None:
    """Remove what an interrupted commit left; readers have nothing of it."""
    committed = manifest.num_units * manifest.shape.padded_bytes
    names = folder.sizes()
    for layer in range(manifest.shape.layers):
        name = units_file(layer)
        # Of less than a unit it may be the padding alone; the seals know.
        missing = committed - names.get(name, -1)
        if missing >= manifest.shape.padded_bytes and not repair:
            raise DocumentDamagedError(
                f"{name} of the document is shorter than what was committed", layer=layer, what=name
            )
        if names.get(name) != committed:
            file = folder.open(name, writable=True) if name in names else folder.create(name)
            try:
                _truncate(file, manifest)
            finally:
                file.close()
    _drop_strays(folder, manifest)


def _truncate(file: DiskFile, manifest: Manifest) -> None:
    file.truncate(manifest.num_units * manifest.shape.padded_bytes)


def _drop_strays(folder: Folder, manifest: Manifest) -> None:
    """Remove side files that are not of this generation."""
    needed = manifest.side_names() if manifest.generation else set()
    for name in folder.sizes():
        if name.startswith(("seals-", "blob-", TEMPORARY)) and name not in needed:
            folder.unlink(name)
