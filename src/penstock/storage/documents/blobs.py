"""Named byte strings of a document: files of 1 MiB chunks, each followed by its seal."""

import errno
import hashlib

from penstock.core.errors import DocumentDamagedError
from penstock.storage.documents.disk import DiskFile, Folder
from penstock.storage.documents.manifest import SideFile, blob_file
from penstock.storage.documents.sealing import Sealer

CHUNK_BYTES = 1 << 20


def stored_bytes(num_bytes: int, sealer: Sealer) -> int:
    """Length of the file of a blob of `num_bytes`."""
    return num_bytes + -(-num_bytes // CHUNK_BYTES) * sealer.seal_bytes


def write_blob(
    folder: Folder, name: str, generation: int, payload: bytes, sealer: Sealer
) -> SideFile:
    """Write and sync a blob's file; its name is not synced.

    Raises:
        OSError: the file is there, or could not be written.
    """
    file = folder.create(blob_file(name, generation))
    try:
        checksum, offset = hashlib.sha256(), 0
        for number, begin in enumerate(range(0, len(payload), CHUNK_BYTES)):
            chunk = payload[begin : begin + CHUNK_BYTES]
            stored, seal = sealer.seal_chunk(_place(name, generation, number), chunk)
            checksum.update(seal)
            file.write_at(offset, stored + seal)
            offset += len(stored) + len(seal)
        file.sync()
    finally:
        file.close()
    return SideFile(generation, len(payload), checksum.hexdigest())


def read_blob(file: DiskFile, name: str, side: SideFile, sealer: Sealer) -> bytes:
    """The payload of a blob, checked.

    Raises:
        DocumentDamagedError: it is not what was written.
        OSError: the disk failed otherwise.
    """
    try:
        if file.size_bytes() != stored_bytes(side.num_bytes, sealer):
            raise damaged_blob(name)
        parts, checksum, offset = [], hashlib.sha256(), 0
        for number, begin in enumerate(range(0, side.num_bytes, CHUNK_BYTES)):
            num_bytes = min(CHUNK_BYTES, side.num_bytes - begin)
            whole = file.read_at(offset, num_bytes + sealer.seal_bytes)
            stored, seal = whole[:num_bytes], whole[num_bytes:]
            chunk = sealer.open_chunk(_place(name, side.generation, number), stored, seal)
            if chunk is None or len(whole) != num_bytes + sealer.seal_bytes:
                raise damaged_blob(name)
            checksum.update(seal)
            parts.append(chunk)
            offset += len(whole)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise damaged_blob(name) from error
    if checksum.hexdigest() != side.checksum:
        raise damaged_blob(name)
    return b"".join(parts)


def damaged_blob(name: str) -> DocumentDamagedError:
    """The error for a blob that is missing or not what was written."""
    return DocumentDamagedError(
        f"the blob {name!r} of the document is damaged; restore it, or store the document anew",
        what=name,
    )


def _place(name: str, generation: int, number: int) -> bytes:
    """What a chunk's seal is bound to."""
    return generation.to_bytes(8, "little") + number.to_bytes(8, "little") + name.encode("ascii")
