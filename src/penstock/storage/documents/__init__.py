"""One document's KV cache on a disk for good: committed, checked, encrypted if wanted."""

from penstock.storage.documents.damage import Damage
from penstock.storage.documents.disk import Disk
from penstock.storage.documents.document import StoredDocument
from penstock.storage.documents.folder import (
    Summary,
    is_unfinished,
    read_summary,
    remove,
    size_bytes,
)
from penstock.storage.documents.manifest import Shape
from penstock.storage.documents.real_disk import REAL_DISK, RealDisk
from penstock.storage.documents.writer import DocumentWriter

__all__ = [
    "REAL_DISK",
    "Damage",
    "Disk",
    "DocumentWriter",
    "RealDisk",
    "Shape",
    "StoredDocument",
    "Summary",
    "is_unfinished",
    "read_summary",
    "remove",
    "size_bytes",
]
