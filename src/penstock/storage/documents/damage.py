"""Damage: what of a stored document is not what was stored, found by reading all of it."""

import contextlib
import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.core.errors import DocumentDamagedError, FetchError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.documents.manifest import Shape
from penstock.storage.file import KVFile, Ticket

_READ_BYTES = 2 << 20
_MEDIUM = {errno.EIO, *(getattr(errno, name, errno.EIO) for name in ("EBADMSG", "ENODATA"))}
"""What a medium says of bytes that it has lost; btrfs and XFS say EBADMSG or EIO of bad sums."""
_BUFFERS = 4
"""One is checked while the others are read into."""


@dataclass
class Damage:
    """Damaged parts; false when there are none.

    Attributes:
        units: layer -> numbers of its damaged units, ascending
        blobs: names of the damaged blobs
        seals: the file with the seals was changed since the document was opened
    """

    units: dict[int, list[int]] = field(default_factory=dict)
    blobs: list[str] = field(default_factory=list)
    seals: bool = False

    def __bool__(self) -> bool:
        return bool(self.units or self.blobs or self.seals)

    @property
    def num_units(self) -> int:
        """Damaged units of all layers."""
        return sum(map(len, self.units.values()))


def find_damage(
    files: Sequence[KVFile], shape: Shape, num_units: int, blobs: Mapping[str, int],
    read_blob: Callable[[str], bytes], check_seals: Callable[[], object],
    progress: Callable[[int, int], None],
) -> Damage:  # fmt: skip
    """Read every unit and blob; the next reads are under way while one is checked.

    Args:
        files: verified, one a layer.
        blobs: name -> bytes.
        check_seals: raises DocumentDamagedError when they are not what was stored.
        progress: called with the bytes checked so far and all bytes.

    Raises:
        FetchError: the document was closed meanwhile.
    """
    damage = Damage()
    total = shape.layers * num_units * shape.padded_bytes + sum(blobs.values())
    done = 0
    progress(done, total)
    step = max(1, _READ_BYTES // shape.padded_bytes)
    reader = _Reader(shape.padded_bytes, min(step, max(1, num_units)))
    spans = [
        (layer, first, min(step, num_units - first))
        for layer in range(shape.layers)
        for first in range(0, num_units, step)
    ]
    tickets: list[Ticket] = []
    try:
        for i, (layer, first, count) in enumerate(spans):
            for later in spans[len(tickets) : i + _BUFFERS]:
                turn = len(tickets) % _BUFFERS
                tickets.append(reader.start(files[later[0]], later[1], later[2], turn))
            if wrong := reader.damaged(tickets[i], files[layer], first, count, i % _BUFFERS):
                damage.units.setdefault(layer, []).extend(wrong)
            done += count * shape.padded_bytes
            progress(done, total)
    finally:
        for ticket in tickets[-_BUFFERS:]:
            _settle(ticket)  # the buffers must outlive the reads
    for name, num_bytes in blobs.items():
        try:
            read_blob(name)
        except DocumentDamagedError:
            damage.blobs.append(name)
        done += num_bytes
        progress(done, total)
    try:
        check_seals()
    except DocumentDamagedError:
        damage.seals = True
    return damage


class _Reader:
    """Some buffers, read into by turns."""

    def __init__(self, padded_bytes: int, num_slots: int) -> None:
        self._padded_bytes = padded_bytes
        self._buffers = [AlignedBuffer(num_slots, padded_bytes) for _ in range(_BUFFERS)]

    def start(self, file: KVFile, first: int, count: int, turn: int) -> Ticket:
        """Start reading `count` units from `first` on."""
        buffer = self._buffers[turn]
        offset = np.array([first * self._padded_bytes])
        length = np.array([count * self._padded_bytes])
        return file.submit_reads(offset, length, np.array([buffer.address]), buffer.array)

    def damaged(self, ticket: Ticket, file: KVFile, first: int, count: int, turn: int) -> list[int]:
        """Units of a read that are damaged; one that failed is done again unit by unit."""
        try:
            ticket.wait()
        except DocumentDamagedError as error:
            if error.__cause__ is None:
                return list(error.units)
        except FetchError as error:
            _require_damage(error)
        else:
            return []
        wrong = []
        for unit in range(first, first + count):
            again = self.start(file, unit, 1, turn)  # raises when the document is closed
            try:
                again.wait()
            except FetchError as error:
                _require_damage(error)
                wrong.append(unit)
        return wrong


def _require_damage(error: FetchError) -> None:
    """Raise what says nothing of the bytes: a server or a disk that has gone, say."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno and cause.errno not in _MEDIUM:
        raise error


def _settle(ticket: Ticket) -> None:
    with contextlib.suppress(FetchError):
        ticket.wait()
