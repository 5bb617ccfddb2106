"""The disk KV store: bytes in, bytes out; knows nothing about attention."""

from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import KVFile, Ticket
from penstock.storage.store import KVStore
from penstock.storage.unit_region import UnitRegion

__all__ = ["AlignedBuffer", "KVFile", "KVStore", "Ticket", "UnitRegion"]
