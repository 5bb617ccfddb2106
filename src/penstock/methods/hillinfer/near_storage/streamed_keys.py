"""BoundedKeys: cold keys whose codes are made from the disk, where memory does not hold them."""

import contextlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from penstock.core.errors import StorageError
from penstock.kernels.key_codes import KeyCodes
from penstock.methods.hillinfer.near_storage.cold_keys import ColdKeys
from penstock.methods.hillinfer.near_storage.device_memory import padded_bytes, read_units
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import Int64Array, KVFile, Ticket


class KeyReader:
    """Reads units back and makes the codes of their keys; one caller at a time.

    Two buffers take turns: the next units are read while the codes of the last are made.
    """

    def __init__(self, settings: DeviceSettings, sector_bytes: int) -> None:
        """Make room for reading, and for the codes of one score block."""
        s = self._settings = settings
        self.padded_bytes = padded_bytes(s, sector_bytes)
        count = read_units(s, sector_bytes)
        self._buffers = [AlignedBuffer(count, self.padded_bytes) for _ in range(2)]
        self._block: KeyCodes | None = None

    def read(
        self, file: KVFile, units: Int64Array
    ) -> Iterator[tuple[Int64Array, NDArray[np.uint8]]]:
        """Places in `units` and the bytes of the units there, a buffer at a time.

        Raises:
            StorageError: a read failed.
        """
        size = self._buffers[0].num_slots
        firsts = range(0, len(units), size)
        following: Ticket | None = None
        try:
            for i, first in enumerate(firsts):
                ticket = following or self._submit(file, units[first : first + size], i)
                following = None
                if i + 1 < len(firsts):
                    following = self._submit(file, units[first + size : first + 2 * size], i + 1)
                ticket.wait()
                places = np.arange(first, min(first + size, len(units)))
                yield places, self._buffers[i % 2].array[: len(places)]
        finally:
            if following is not None:  # what it reads into is for others then
                with contextlib.suppress(StorageError):
                    following.wait()

    def _submit(self, file: KVFile, units: Int64Array, turn: int) -> Ticket:
        buffer = self._buffers[turn % 2]
        lengths = np.full(len(units), self.padded_bytes, dtype=np.int64)
        begins = buffer.address + np.arange(len(units), dtype=np.int64) * self.padded_bytes
        return file.submit_reads(*joined(units * self.padded_bytes, lengths, begins), buffer)

    def codes_of(self, file: KVFile, units: Int64Array) -> KeyCodes:
        """The codes of some units of a block, as units 0, 1, ...; until it is called again."""
        s = self._settings
        if self._block is None:
            most = min(s.block_tokens, s.rows * s.max_tokens)
            self._block = KeyCodes(most, s.kv_heads, s.head_dim, s.dtype, s.bits)
        for places, raw in self.read(file, units):
            self._block.put(places, raw, s.threads)
        return self._block


class BoundedKeys(ColdKeys):
    """Cold keys of a device whose memory is bounded: codes of some units, or of none, are kept.

    Source: HillInfer, section 4.4 (the original keys are streamed from flash and cast on the fly).

    Differences: a token's keys and values are one unit on the disk, so that values are read past;
    a layer whose codes fit is not streamed. Scores are the same either way, bit for bit.
    """

    def __init__(
        self, settings: DeviceSettings, num_units: int, reader: KeyReader, file: KVFile
    ) -> None:
        """Keep the codes of the first `num_units` units; others are read from `file`."""
        super().__init__(settings, num_units)
        self._reader, self._file = reader, file

    @override
    def put(self, unit_ids: NDArray[np.int64], raw: NDArray[np.uint8]) -> None:
        kept = unit_ids < self.codes.num_units
        if not kept.all():
            unit_ids, raw = unit_ids[kept], raw[kept]
        super().put(unit_ids, raw)

    @override
    def _codes_of(self, units: NDArray[np.int64]) -> tuple[KeyCodes, NDArray[np.int64]]:
        if int(units.max(initial=-1)) < self.codes.num_units:
            return self.codes, units
        return self._reader.codes_of(self._file, units), np.arange(len(units))


def joined(
    offsets: Int64Array, lengths: Int64Array, begins: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Reads that follow each other in the file and in memory, as one each."""
    if len(offsets) < 2:
        return offsets, lengths, begins
    apart = (offsets[1:] != offsets[:-1] + lengths[:-1]) | (
        begins[1:] != begins[:-1] + lengths[:-1]
    )
    first = np.flatnonzero(np.concatenate([[True], apart]))
    return offsets[first], np.add.reduceat(lengths, first), begins[first]
