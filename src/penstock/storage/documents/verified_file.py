"""VerifiedFile: a layer's units, read-only; what a read brings is checked before it is seen."""

import ctypes
import threading
from collections.abc import Callable
from typing import NamedTuple

from typing_extensions import override

from penstock.core.errors import DocumentDamagedError, FetchError, StorageError
from penstock.storage.documents.manifest import UNIT_ALIGN_BYTES
from penstock.storage.documents.sealing import Sealer
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket, bytes_at, read_error

_SHOWN_UNITS = 8


class SealedUnits(NamedTuple):
    """What the units of one layer must be."""

    layer: int
    padded_bytes: int
    seals: ByteArray
    """[num_units, seal_bytes]"""
    sealer: Sealer
    is_short: bool
    """The file ended before its last unit when the document was opened."""


class VerifiedTicket(Ticket):
    """A batch of reads whose units are checked, and decrypted in place, by the first `wait`."""

    def __init__(
        self, inner: Ticket, check: Callable[[], list[int]], layer: int, keep_alive: object,
        is_short: bool, beyond: FetchError | None,
    ) -> None:  # fmt: skip
        """Wrap `inner`.

        Args:
            check: checks all units that were read, once; returns those that are damaged.
            is_short: the file ends before its last unit.
            beyond: the error for reads beyond the last unit, which were not submitted.
        """
        self.read_bytes = inner.read_bytes
        self.num_reads = inner.num_reads
        self.submitted_ns = inner.submitted_ns
        self.finished_ns = inner.finished_ns
        self._inner = inner
        self._check: Callable[[], list[int]] | None = check
        self._layer = layer
        self._keep_alive = keep_alive
        self._is_short = is_short
        self._error = beyond
        self._checking = threading.Lock()

    @override
    def done(self) -> bool:
        """Whether every read has ended; `wait` then has only the checking left to do."""
        finished = self._inner.done()
        self.finished_ns = self._inner.finished_ns
        return finished

    @override
    def wait(self) -> None:
        """Block until every read has ended, and check what came.

        Raises:
            DocumentDamagedError: some units are not what was stored; their bytes are zeroed.
            FetchError: a read failed for another reason; nothing is known of their bytes then.
        """
        with self._checking:
            if self._check is not None:
                self._finish(self._check)
        if self._error is not None:
            raise self._error

    def _finish(self, check: Callable[[], list[int]]) -> None:
        failure: FetchError | None = None
        try:
            self._inner.wait()
        except FetchError as error:
            failure = error
        self.finished_ns = self._inner.finished_ns
        # Checking decrypts in place, which cannot be begun again once it was interrupted.
        beyond, self._error = self._error, FetchError("the reads were given up: interrupted")
        self._check = None
        if failure is not None and not (isinstance(failure.__cause__, OSError) or self._is_short):
            self._error = failure  # the store was closed, or the reads were given up: no damage
        elif units := check():
            self._error = damaged_units(self._layer, units)
            self._error.__cause__ = failure
        elif failure is not None and isinstance(failure.__cause__, OSError):
            self._error = failure
        else:  # what a short read lacks was padding: every unit is as it was stored
            self._error = beyond
        self._keep_alive = None


class VerifiedFile(KVFile):
    """Wraps the file of a layer. Reads cover whole units; units are padded to a multiple of 4096
    bytes.

    Attributes:
        inner: the file below, encrypted as it is
        has_damage: a read has found units that are not what was stored
    """

    def __init__(self, inner: KVFile, units: SealedUnits) -> None:
        """Wrap `inner`, which stays its maker's to close.

        Raises:
            StorageError: its sectors are larger than a unit's alignment.
        """
        if UNIT_ALIGN_BYTES % inner.sector_bytes:
            raise StorageError(
                f"stored documents need sectors of at most {UNIT_ALIGN_BYTES} bytes, not "
                f"{inner.sector_bytes}"
            )
        self.sector_bytes = UNIT_ALIGN_BYTES  # a region made of this file has the stored units
        self.is_direct = inner.is_direct
        self.simulated = inner.simulated
        self.inner = inner
        self.has_damage = False
        self._units = units
        self._end = len(units.seals) * units.padded_bytes
        self._is_closed = False

    @override
    def reserve(self, num_bytes: int) -> None:
        """Refused: the document is read-only."""
        raise self._refusal()

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Start the reads; they are checked when they are waited for."""
        if self._is_closed:
            raise FetchError("the store is closed")
        padded_bytes = self._units.padded_bytes
        assert not (offsets % padded_bytes).any(), "a read that does not begin with a unit"
        assert not (lengths % padded_bytes).any(), "a read that does not end with a unit"
        beyond = None
        within = (offsets >= 0) & (offsets + lengths <= self._end)
        if not within.all():
            wrong = int((~within).argmax())
            offset, length = int(offsets[wrong]), int(lengths[wrong])
            beyond = read_error(offset, length, max(0, min(self._end - offset, length - 1)))
            offsets, lengths, addresses = offsets[within], lengths[within], addresses[within]
        if self._units.is_short:  # what the file has lost reads as zeros, which padding is
            for length, address in zip(lengths.tolist(), addresses.tolist(), strict=True):
                ctypes.memset(address, 0, length)
        inner = self.inner.submit_reads(offsets, lengths, addresses, keep_alive)

        def check() -> list[int]:
            return self._check(offsets, lengths, addresses)

        layer, is_short = self._units.layer, self._units.is_short
        return VerifiedTicket(inner, check, layer, keep_alive, is_short, beyond)

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Refused: the document is read-only."""
        raise self._refusal()

    @override
    def sync(self) -> None:
        """Nothing to do."""

    @override
    def close(self) -> None:
        """Refuse further reads; the file below is closed with the document."""
        self._is_closed = True

    def _check(self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array) -> list[int]:
        """Check runs of units in memory, in place; returns the damaged ones."""
        _, padded_bytes, seals, sealer, _ = self._units
        damaged: list[int] = []
        firsts, counts = offsets // padded_bytes, lengths // padded_bytes
        for first, count, address in zip(
            firsts.tolist(), counts.tolist(), addresses.tolist(), strict=True
        ):
            padded = bytes_at(address, count * padded_bytes).reshape(count, padded_bytes)
            seals_of = seals[first : first + count]
            damaged += sealer.open_units(self._units.layer, first, padded, seals_of)
        self.has_damage |= bool(damaged)
        return sorted(set(damaged))

    def _refusal(self) -> StorageError:
        what = "the store is closed" if self._is_closed else "a stored document is read-only"
        return StorageError(what)


def damaged_units(layer: int, units: list[int]) -> DocumentDamagedError:
    """The error for units that are not what was stored."""
    shown = ", ".join(map(str, units[:_SHOWN_UNITS])) + ", ..." * (len(units) > _SHOWN_UNITS)
    return DocumentDamagedError(
        f"{len(units)} units of layer {layer} of the document are damaged ({shown}); restore "
        "them, or store the document anew",
        layer=layer,
        units=tuple(units),
    )
