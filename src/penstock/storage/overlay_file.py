"""OverlayFile: a file that others share, read only, and behind its end one of one's own."""

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from penstock.core.errors import AlignmentError, FetchError, StorageError
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket

OVERLAY_SECTOR_BYTES = 4096
"""Units of both parts are multiples of it, whatever the files themselves would take."""


class JoinedTicket(Ticket):
    """One batch of reads that several files took a part of."""

    def __init__(self, parts: Sequence[Ticket]) -> None:
        self._parts = parts
        self.read_bytes = sum(part.read_bytes for part in parts)
        self.num_reads = sum(part.num_reads for part in parts)
        self.submitted_ns = min(part.submitted_ns for part in parts)
        self.finished_ns = 0

    @override
    def done(self) -> bool:
        """Whether every part has ended."""
        return all(part.done() for part in self._parts) and self._note_end()

    @override
    def wait(self) -> None:
        """Block until every part has ended, also when one has failed.

        Raises:
            FetchError: the first that failed.
        """
        failure: FetchError | None = None
        for part in self._parts:
            try:
                part.wait()
            except FetchError as error:
                failure = failure or error
        self._note_end()
        if failure is not None:
            raise failure

    def _note_end(self) -> bool:
        self.finished_ns = max(part.finished_ns for part in self._parts)
        return True


class OverlayFile(KVFile):
    """[0, base_bytes) is a shared file that is never written to; all behind it is private.

    Copy on write for units that never change once they are closed: a fork keeps its own new units
    and reads the shared ones, so that it costs no more than what it adds.
    """

    sector_bytes = OVERLAY_SECTOR_BYTES

    def __init__(self, base: KVFile, base_bytes: int, own: KVFile) -> None:
        """Lay `own` behind the first `base_bytes` of `base`.

        Args:
            base: stays its owner's: `close` leaves it open.
            own: closed with this file.
        """
        for file in (base, own):
            if OVERLAY_SECTOR_BYTES % file.sector_bytes:
                raise AlignmentError(
                    f"sectors of {file.sector_bytes} bytes do not fit {OVERLAY_SECTOR_BYTES}"
                )
        assert base_bytes % OVERLAY_SECTOR_BYTES == 0, base_bytes
        self._base, self._own, self._base_bytes = base, own, base_bytes
        self.is_direct = base.is_direct and own.is_direct
        self.simulated = base.simulated or own.simulated
        self._closed = False

    @override
    def reserve(self, num_bytes: int) -> None:
        """Make room behind the shared part."""
        self._own.reserve(max(0, num_bytes - self._base_bytes))

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Start reading from whichever part holds each range; one across the border is cut."""
        if self._closed:
            raise FetchError("the store is closed")
        ends = offsets + lengths
        if len(offsets) == 0 or int(ends.max()) <= self._base_bytes:
            return self._base.submit_reads(offsets, lengths, addresses, keep_alive)
        behind = offsets >= self._base_bytes
        if behind.all():
            return self._own.submit_reads(
                offsets - self._base_bytes, lengths, addresses, keep_alive
            )
        shared = np.minimum(lengths, self._base_bytes - offsets)[~behind]
        across = ~behind & (ends > self._base_bytes)
        cut = (self._base_bytes - offsets)[across]
        base = self._base.submit_reads(offsets[~behind], shared, addresses[~behind], keep_alive)
        try:
            own = self._own.submit_reads(
                np.concatenate([offsets[behind] - self._base_bytes, np.zeros_like(cut)]),
                np.concatenate([lengths[behind], lengths[across] - cut]),
                np.concatenate([addresses[behind], addresses[across] + cut]),
                keep_alive,
            )
        except BaseException:
            JoinedTicket([base]).wait()
            raise
        return JoinedTicket([base, own])

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Write behind the shared part."""
        if self._closed:
            raise StorageError("the store is closed")
        assert offset >= self._base_bytes, "what is shared is never written to"
        self._own.write_at(offset - self._base_bytes, data)

    @override
    def sync(self) -> None:
        """Return when all that was written is on the device."""
        self._own.sync()

    @override
    def close(self) -> None:
        """Give the private part back; the shared one is not its own."""
        self._closed = True
        self._own.close()
