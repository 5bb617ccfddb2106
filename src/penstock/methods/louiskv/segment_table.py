"""SegmentTable: where each sequence's temporal segments begin and end (LouisKV)."""

import numpy as np
from numpy.typing import NDArray


class SegmentTable:
    """Runs of output tokens between semantic boundaries, for every sequence of a batch.

    All sequences grow by the same tokens and are cut each at boundaries of their own. A segment is
    [starts, ends); the last one of a sequence is open. When there is no room for another one,
    neighbours are merged two by two (`merge`).
    """

    def __init__(self, sequences: int, capacity: int) -> None:
        self.capacity = capacity
        self.starts = np.zeros((sequences, capacity), dtype=np.int32)
        self.ends = np.zeros((sequences, capacity), dtype=np.int32)
        self.counts = np.zeros(sequences, dtype=np.int64)
        self._rows = np.arange(sequences)

    @staticmethod
    def num_bytes(sequences: int, capacity: int) -> int:
        """Bytes of a table of this size, for the ledger."""
        return sequences * (8 * capacity + 16)

    @property
    def columns(self) -> int:
        """Segments of the sequence that has most."""
        return int(self.counts.max())

    def cut(self, boundary: NDArray[np.bool_], position: int) -> None:
        """Close the open segments of some sequences and begin new, empty ones.

        Args:
            boundary: which sequences; each must have room. [sequences]
            position: cache position of the token that the new segments begin with.
        """
        which = boundary.nonzero()[0]
        at = self.counts[which]
        self.starts[which, at] = self.ends[which, at] = position
        self.counts[which] += 1

    def grow(self, end: int) -> None:
        """The open segment of every sequence now ends at `end`."""
        self.ends[self._rows, self.counts - 1] = end

    def sizes(self, first: NDArray[np.int64], end: int) -> tuple[NDArray[np.int32], ...]:
        """First token of each segment that may be selected, and how many there are.

        Args:
            first: first position that may be, per sequence. [sequences]
            end: positions from here on are in the window.

        Returns:
            Two arrays, int32 [sequences, columns].
        """
        columns = np.arange(self.columns)
        start = np.maximum(self.starts[:, : len(columns)], first[:, None])
        stop = np.minimum(self.ends[:, : len(columns)], end)
        size = np.where(columns < self.counts[:, None], stop - start, 0).clip(0)
        return start.astype(np.int32), size.astype(np.int32)

    def merge(self) -> NDArray[np.int64]:
        """Merge neighbours two by two where they touch; the open segments stay as they are.

        Returns:
            The new number of each segment, or the sequence's first where there is none.
            [sequences, capacity]
        """
        target = np.zeros((len(self.counts), self.capacity), dtype=np.int64)
        for row, count in enumerate(self.counts.tolist()):
            starts, ends = self.starts[row].copy(), self.ends[row].copy()
            new, alone = -1, False
            for i in range(count):
                joins = alone and i + 1 < count and ends[i - 1] == starts[i]
                if not joins:
                    new += 1
                    self.starts[row, new] = starts[i]
                self.ends[row, new] = ends[i]
                target[row, i], alone = new, not joins
            self.counts[row] = new + 1
        return target

    def crop(self, length: int) -> None:
        """Forget the tokens at and after `length`."""
        columns = np.arange(self.capacity) < self.counts[:, None]
        self.counts = (columns & (self.starts < length)).sum(axis=1)
        np.minimum(self.ends, length, out=self.ends)

    def take_rows_from(self, other: "SegmentTable", sequences: NDArray[np.int64]) -> None:
        """Become a copy of `other` (perhaps itself) with sequence i taken from `sequences[i]`."""
        self.starts[:] = other.starts[sequences]
        self.ends[:] = other.ends[sequences]
        self.counts = other.counts[sequences]
