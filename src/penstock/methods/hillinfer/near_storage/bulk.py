"""Where a message's bulk lies: it travels with the message where the two sides share no memory."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.methods.hillinfer.near_storage import protocol
from penstock.methods.hillinfer.near_storage.shared_memory import Division


class Piece(NamedTuple):
    """Bytes [start, start + num_bytes) of the memory of either side."""

    start: int
    num_bytes: int


class Bulk:
    """The memory of one side, divided as the other side's is."""

    def __init__(self, memory: NDArray[np.uint8], division: Division) -> None:
        self.memory, self._division = memory, division
        self._rows = division.rows

    def pieces(self, message: protocol.Message) -> list[Piece]:
        """What a message is about, apart from the bytes that a `Read` is answered with.

        Raises:
            ProtocolError: a piece is not within the memory.
        """
        match message:
            case protocol.Write():
                found = [Piece(message.start, message.num_bytes)]
            case protocol.Read():
                found = [Piece(message.start, 16 * message.count)]
            case protocol.Map():
                found = [Piece(message.start, 8 * self._rows * message.count)]
            case protocol.Score():
                found = [
                    self._part(message.area, "query"),
                    self._part(message.area, "units", 8 * self._rows * message.count),
                    self._part(message.area, "promoted", 8 * message.promoted),
                    self._part(message.area, "demoted", 8 * message.demoted),
                ]
            case protocol.Normalise():
                found = [self._part(message.area, "normalisers")]
            case protocol.Logits():
                found = [self._part(message.area, "log_sums")]
            case _:
                found = []
        return self.checked(found)

    def block(self, area: int, message: protocol.Block) -> list[Piece]:
        """What a score block of an area is about. Raises as `pieces`."""
        first, count = 4 * message.first, 4 * message.count
        parts = (self._part(area, name) for name in ("positions", "scores"))
        found = []
        for start, size in parts:
            if first + count > size:
                raise protocol.ProtocolError("a score block beyond its area")
            found.append(Piece(start + first, count))
        return self.checked(found)

    def read_by(self, message: protocol.Read) -> list[Piece]:
        """What a `Read` is answered with; its lists must be there. Raises as `pieces`."""
        [lists] = self.pieces(message)
        at = lists.start + 8 * message.count
        lengths = self.memory[at : at + 8 * message.count].view(np.int64)
        if (lengths <= 0).any() or int(lengths.max(initial=0)) > len(self.memory):
            raise protocol.ProtocolError("a read of nothing, or of more than fits")
        return self.checked([Piece(message.target, int(lengths.sum()))])

    def _part(self, area: int, name: str, num_bytes: int | None = None) -> Piece:
        start, size = self._division.place(area, name)
        if num_bytes is not None and num_bytes > size:
            raise protocol.ProtocolError(f"{name} beyond the area")
        return Piece(start, size if num_bytes is None else num_bytes)

    def checked(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces that hold anything.

        Raises:
            ProtocolError: one is not within the memory.
        """
        for start, size in pieces:
            if start < 0 or size < 0 or start + size > len(self.memory):
                raise protocol.ProtocolError("a piece beyond the memory")
        return [piece for piece in pieces if piece.num_bytes]

    def views(self, pieces: Sequence[Piece]) -> list[NDArray[np.uint8]]:
        """The pieces themselves."""
        return [self.memory[start : start + size] for start, size in pieces]
