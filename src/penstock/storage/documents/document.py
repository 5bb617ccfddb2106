"""StoredDocument: a committed generation of a document, open for reading and checked as it goes."""

import contextlib
import errno
import hashlib
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from penstock.core.closing import DeferredInterrupts, close_all
from penstock.core.errors import DocumentBusyError, DocumentDamagedError, DocumentError
from penstock.storage.documents.blobs import damaged_blob, read_blob
from penstock.storage.documents.damage import Damage, find_damage
from penstock.storage.documents.disk import Disk, DiskFile, Folder, typed_errors
from penstock.storage.documents.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    blob_file,
    read_manifest,
    seals_file,
    units_file,
)
from penstock.storage.documents.real_disk import REAL_DISK
from penstock.storage.documents.sealing import Sealer
from penstock.storage.documents.verified_file import SealedUnits, VerifiedFile
from penstock.storage.file import ByteArray, KVFile
from penstock.storage.open_files import FileSet

LOCK = "lock"
_ATTEMPTS = 100
"""Each one that fails means that another writer committed meanwhile."""


def _unchanged(file: KVFile) -> KVFile:
    return file


class StoredDocument:
    """The units and blobs of one generation; a writer may append to the document meanwhile.

    Everything that the generation needs is opened at once, so that later commits take nothing
    away. A document that is dropped closes itself.

    Attributes:
        shape: layers and bytes of a unit
        num_units: in each layer
        generation: 1 for the first commit
        identity: the fields that were committed with it, dict[str, str]
        about: the JSON values that were committed with it
        document_id: 32 hex digits, random
        encrypted: a key was needed
        opened_bytes: bytes that opening read
        files: one a layer, read-only; reads that land are checked and decrypted before `wait` ends
        is_direct: reads come from a device, never from the page cache
        description: where and how the units are read, for people
    """

    def __init__(
        self, manifest: Manifest, sealer: Sealer, seals: ByteArray, opened: "_Opened",
        wrap: Callable[[KVFile], KVFile], close: Callable[[], None],
    ) -> None:  # fmt: skip
        """Take over what `open` has opened; use that."""
        assert manifest.identity is not None
        assert manifest.about is not None
        self.shape = manifest.shape
        self.num_units = manifest.num_units
        self.generation = manifest.generation
        self.identity: Mapping[str, str] = manifest.identity
        self.about: Mapping[str, Any] = manifest.about
        self.document_id = manifest.document_id
        self.encrypted = manifest.encrypted
        self.opened_bytes = opened.manifest_bytes + seals.nbytes
        self.description = opened.units.description
        self._manifest = manifest
        self._sealer = sealer
        self._opened = opened
        committed = manifest.num_units * manifest.shape.padded_bytes
        self.files: list[VerifiedFile] = []
        for layer, file in enumerate(opened.units.files):
            is_short = opened.sizes.get(units_file(layer), 0) < committed
            units = SealedUnits(layer, self.shape.padded_bytes, seals[layer], sealer, is_short)
            self.files.append(VerifiedFile(wrap(file), units))
        self.is_direct = all(file.is_direct for file in self.files)
        self._close = weakref.finalize(self, close)

    @classmethod
    def open(
        cls, folder: Path, *, key: bytes | None = None, disk: Disk = REAL_DISK,
        wrap: Callable[[KVFile], KVFile] = _unchanged,
    ) -> "StoredDocument":  # fmt: skip
        """Open the newest committed generation.

        Args:
            key: 32 bytes, of an encrypted document.
            wrap: applied to the file of each layer below the checks: a simulated device.

        Raises:
            DocumentError: there is no document, or it is unfinished: nothing was committed.
            DocumentBusyError: it is being removed.
            DocumentKeyError: no key, the wrong key, or a key for a document without one.
            DocumentFormatError: a newer format, or not a document.
            DocumentDamagedError: what opening needs is not what was stored.
            StorageError: the disk failed.
        """
        what = f"open the document in {folder}"
        with DeferredInterrupts(), contextlib.ExitStack() as stack, typed_errors(what):
            opened_folder = open_document_folder(disk, folder)
            stack.callback(opened_folder.close)
            stack.callback(lock_document(opened_folder, folder, exclusive=False))
            manifest, sealer, opened = _open_generation(opened_folder, folder, key)
            stack.callback(opened.close)
            seals = load_seals(opened.seals, manifest, sealer)
            closing = stack.pop_all().close
            try:
                return cls(manifest, sealer, seals, opened, wrap, closing)
            except BaseException:
                closing()
                raise

    @property
    def blob_names(self) -> tuple[str, ...]:
        """Names of the blobs, sorted."""
        return tuple(sorted(self._manifest.blobs))

    def blob(self, name: str) -> bytes:
        """The bytes of a blob, checked.

        Raises:
            DocumentDamagedError: they are missing or not what was stored.
            DocumentError: there is no such blob, or the document is closed.
        """
        side = self._manifest.blobs.get(name)
        if side is None or not self._close.alive:
            why = "has no blob of this name" if side is None else "is closed"
            raise DocumentError(f"the document {why}: {name!r}")
        file = self._opened.blobs[name]
        if file is None:
            raise damaged_blob(name)
        with typed_errors(f"read the blob {name!r} of the document"):
            return read_blob(file, name, side, self._sealer)

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Damage:
        """Read everything and check it; goes on behind damage.

        Args:
            progress: called with the bytes checked so far and all bytes.

        Raises:
            FetchError: the document was closed meanwhile, or the disk has gone.
            StorageError: the disk failed otherwise than by lost bytes.
        """
        blobs = {name: side.num_bytes for name, side in self._manifest.blobs.items()}
        files, shape, num_units = self.files, self.shape, self.num_units

        def check_seals() -> None:
            with typed_errors("read the seals of the document"):
                load_seals(self._opened.seals, self._manifest, self._sealer)

        return find_damage(files, shape, num_units, blobs, self.blob, check_seals, progress)

    def close(self) -> None:
        """End the reads under way and let the document go; a second call does nothing."""
        close_all(*(file.close for file in self.files), self._close)

    def __enter__(self) -> "StoredDocument":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Opened:
    """The open files of one generation.

    Attributes:
        sizes: length of every file in the folder
        manifest_bytes: that were read
        blobs: None for one that is missing
    """

    def __init__(
        self, sizes: dict[str, int], manifest_bytes: int, seals: DiskFile,
        blobs: dict[str, DiskFile | None], units: FileSet,
    ) -> None:  # fmt: skip
        self.sizes = sizes
        self.manifest_bytes = manifest_bytes
        self.seals = seals
        self.blobs = blobs
        self.units = units

    def close(self) -> None:
        """Close them all."""
        blobs = (file for file in self.blobs.values() if file is not None)
        close_all(self.units.close, self.seals.close, *(file.close for file in blobs))


def open_document_folder(disk: Disk, path: Path) -> Folder:
    """Open the folder of a document.

    Raises:
        DocumentError: there is none, or it is a symbolic link or a file.
    """
    try:
        return disk.open_folder(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        why = "is no folder" if isinstance(error, NotADirectoryError) else "does not exist"
        raise DocumentError(f"there is no document in {path}: it {why}") from error


def lock_document(folder: Folder, path: Path, *, exclusive: bool) -> Callable[[], None]:
    """Hold a document: shared, against its removal; or exclusively, to remove it.

    Raises:
        DocumentBusyError: another process holds it so that this is excluded.
        DocumentError: there is no lock file: not a document.
    """
    try:
        return folder.lock(LOCK, exclusive=exclusive)
    except BlockingIOError as error:
        why = "is in use" if exclusive else "is being removed"
        raise DocumentBusyError(f"the document in {path} {why}; try again later") from error
    except FileNotFoundError as error:
        raise DocumentError(f"there is no document in {path}: it has no {LOCK} file") from error


def load_manifest(folder: Folder, path: Path) -> bytes:
    """The bytes of a document's manifest.

    Raises:
        DocumentError: there is none: nothing was committed.
        DocumentDamagedError: it is too long to be one.
    """
    try:
        file = folder.open(MANIFEST)
    except FileNotFoundError as error:
        raise DocumentError(
            f"the document in {path} is unfinished: nothing was committed; remove it, or store "
            "it anew"
        ) from error
    try:
        raw = file.read_at(0, MANIFEST_BYTES_MAX + 1)
    finally:
        file.close()
    if len(raw) > MANIFEST_BYTES_MAX:
        raise DocumentDamagedError("manifest.json of the document is too long", what="manifest")
    return raw


def load_seals(file: DiskFile, manifest: Manifest, sealer: Sealer) -> ByteArray:
    """Seals of all units, uint8 [layers, num_units, seal_bytes], checked.

    Raises:
        DocumentDamagedError: they are not what was written.
    """
    shape = (manifest.shape.layers, manifest.num_units, sealer.seal_bytes)
    side = manifest.seals
    try:
        fits = file.size_bytes() == side.num_bytes == shape[0] * shape[1] * shape[2]
        raw = file.read_at(0, side.num_bytes) if fits else b""
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise _damaged_seals() from error
    if not fits or hashlib.sha256(raw).hexdigest() != side.checksum:
        raise _damaged_seals()
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _damaged_seals() -> DocumentDamagedError:
    return DocumentDamagedError(
        "the seals of the document are damaged, so that no unit can be checked; restore the "
        "file, or store the document anew",
        what="seals",
    )


def _open_generation(
    folder: Folder, path: Path, key: bytes | None
) -> tuple[Manifest, Sealer, _Opened]:
    """Open all files of the newest generation, again if a commit takes some away meanwhile."""
    raw = load_manifest(folder, path)
    for _ in range(_ATTEMPTS):
        manifest, sealer = read_manifest(raw, key)
        assert sealer is not None
        opened, missing = None, ""
        try:
            opened = _open_files(folder, manifest, len(raw))
            missing = next((name for name, file in opened.blobs.items() if file is None), "")
        except FileNotFoundError as error:
            missing = str(error.filename or "a file")
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            missing = f"a plain file {error.filename or ''}"
        newer = load_manifest(folder, path) if missing else raw
        if newer != raw:
            if opened is not None:
                opened.close()
            raw = newer
        elif opened is not None:
            return manifest, sealer, opened
        else:
            raise DocumentDamagedError(f"the document in {path} lacks {missing}", what=missing)
    raise DocumentBusyError(f"the document in {path} is being changed all the time; try again")


def _open_files(folder: Folder, manifest: Manifest, manifest_bytes: int) -> _Opened:
    """Open everything that a generation needs; a blob may be missing, nothing else."""
    with contextlib.ExitStack() as stack:
        seals = folder.open(seals_file(manifest.seals.generation))
        stack.callback(seals.close)
        blobs: dict[str, DiskFile | None] = {}
        for name, side in manifest.blobs.items():
            blobs[name] = _open_blob(folder, blob_file(name, side.generation), stack)
        sizes = folder.sizes()
        units = folder.kv_files([units_file(layer) for layer in range(manifest.shape.layers)])
        stack.pop_all()
    return _Opened(sizes, manifest_bytes, seals, blobs, units)


def _open_blob(folder: Folder, name: str, stack: contextlib.ExitStack) -> DiskFile | None:
    try:
        file = folder.open(name)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return None
    stack.callback(file.close)
    return file
