"""DocumentState: all units and blobs of a stored document, to compare what was and what is."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.documents.disk import Disk
from penstock.storage.documents.document import StoredDocument
from penstock.storage.documents.real_disk import REAL_DISK
from penstock.storage.unit_region import UnitRegion


class DocumentState(NamedTuple):
    """Everything that a committed generation holds."""

    units: tuple[bytes, ...]
    """All rows of each layer, joined."""
    blobs: dict[str, bytes]
    about: dict[str, Any]
    identity: dict[str, str]


def read_state(
    folder: Path, *, key: bytes | None = None, disk: Disk = REAL_DISK
) -> DocumentState:  # fmt: skip
    """Open a document and read all of it.

    Raises:
        PenstockError: as `StoredDocument.open` and its reads.
    """
    with StoredDocument.open(folder, key=key, disk=disk) as document:
        return state_of(document)


def state_of(document: StoredDocument) -> DocumentState:
    """Read all of an open document.

    Raises:
        DocumentDamagedError: something is not what was stored.
    """
    ids = np.arange(document.num_units)
    units = []
    for file in document.files:
        region = UnitRegion(file, document.shape.unit_bytes)
        buffer = AlignedBuffer(len(ids), region.padded_bytes)
        region.submit_read(ids, buffer, ids).wait()
        units.append(buffer.array.tobytes())
    blobs = {name: document.blob(name) for name in document.blob_names}
    return DocumentState(tuple(units), blobs, dict(document.about), dict(document.identity))
