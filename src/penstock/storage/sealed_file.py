"""SealedFile: a private file whose bytes are worthless once its process is gone."""

import ctypes
import os
import threading

import numpy as np

from penstock.core.errors import StorageError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.documents.sealing import KEY_BYTES, Encryption
from penstock.storage.documents.verified_file import VerifiedTicket
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket

SECTOR_BYTES = 4096
"""Sealed one by one, so that whatever is written in whole sectors can be read in whole sectors."""
_ID_BYTES = 16


class SealedFile(KVFile):
    """Another file, encrypted with a key that only this object has (AES-256-GCM by sector).

    What caches over an encrypted document keep beside it must not lie on the disk in the open.
    Nonces and tags are in memory, 28 bytes for each 4,096; the key is never written.
    """

    sector_bytes = SECTOR_BYTES

    def __init__(self, inner: KVFile) -> None:
        """Wrap `inner`, which must be empty; closing this closes it.

        Raises:
            DocumentKeyError: `cryptography` is not installed.
            StorageError: its sectors are larger than those that are sealed.
        """
        if SECTOR_BYTES % inner.sector_bytes:
            raise StorageError(f"sectors of {inner.sector_bytes} bytes cannot be sealed one by one")
        self._inner = inner
        self.is_direct, self.simulated = inner.is_direct, inner.simulated
        self._sealer = Encryption(os.urandom(KEY_BYTES), os.urandom(_ID_BYTES))
        self._seals = np.zeros((0, self._sealer.seal_bytes), dtype=np.uint8)
        self._growing = threading.Lock()  # a thread writes while another one reads

    def reserve(self, num_bytes: int) -> None:
        """Reserve in the wrapped file."""
        self._inner.reserve(num_bytes)

    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Start the reads; what was written is decrypted when they are waited for."""
        firsts, counts = offsets // SECTOR_BYTES, lengths // SECTOR_BYTES
        inner = self._inner.submit_reads(offsets, lengths, addresses, keep_alive)

        def check() -> list[int]:
            damaged: list[int] = []
            for first, count, address in zip(
                firsts.tolist(), counts.tolist(), addresses.tolist(), strict=True
            ):
                memory = (ctypes.c_uint8 * (count * SECTOR_BYTES)).from_address(address)
                rows = np.frombuffer(memory, np.uint8).reshape(count, SECTOR_BYTES)
                seals = self._seals_of(first, count).copy()
                for i in np.flatnonzero(seals.any(axis=1)).tolist():  # the others mean nothing
                    part = slice(i, i + 1)
                    damaged += self._sealer.open_units(0, first + i, rows[part], seals[part])
            return damaged

        return VerifiedTicket(inner, check, 0, keep_alive, is_short=False, beyond=None)

    def write_at(self, offset: int, data: ByteArray) -> None:
        """Encrypt and write."""
        assert offset % SECTOR_BYTES == 0 == len(data) % SECTOR_BYTES, (offset, len(data))
        first, count = offset // SECTOR_BYTES, len(data) // SECTOR_BYTES
        rows = np.ascontiguousarray(data).reshape(count, SECTOR_BYTES)
        stored, seals = self._sealer.seal_units(0, first, rows)
        buffer = AlignedBuffer(count, SECTOR_BYTES)
        buffer.array[:] = stored
        self._inner.write_at(offset, buffer.array.reshape(-1))
        with self._growing:
            self._seals_of(first, count, locked=True)[:] = seals

    def _seals_of(self, first: int, count: int, *, locked: bool = False) -> ByteArray:
        """Seals of some sectors; zeros where nothing was written."""
        if first + count > len(self._seals):
            if not locked:
                with self._growing:
                    return self._seals_of(first, count, locked=True)
            size = max(first + count, len(self._seals) * 5 // 4)
            grown = np.zeros((size, self._seals.shape[1]), dtype=np.uint8)
            grown[: len(self._seals)] = self._seals
            self._seals = grown
        return self._seals[first : first + count]

    def sync(self) -> None:
        """Flush the wrapped file."""
        self._inner.sync()

    def close(self) -> None:
        """Close the wrapped file."""
        self._inner.close()
