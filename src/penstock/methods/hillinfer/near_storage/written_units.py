"""WrittenUnits: which units were written, and which of their copies missed it."""

import threading

import numpy as np
from numpy.typing import NDArray

from penstock.methods.hillinfer.near_storage.stripes import Stripes

_WRITTEN, _MISSED = np.uint8(1), (np.uint8(2), np.uint8(4))
"""Bits of a unit; the second: by its own device, the third: by the one with the copy."""


class WrittenUnits:
    """One byte for every unit of every layer, where units have copies."""

    def __init__(self, layers: int, units: int, stripes: Stripes) -> None:
        """Nothing is written. units: of a layer, to make room for; more take more."""
        self._stripes = stripes
        self._marks = [np.zeros(units, dtype=np.uint8) for _ in range(layers)]
        self._lock = threading.Lock()

    def note(self, layer: int, first: int, count: int, missed: list[int]) -> None:
        """Units [first, first + count), of one stripe, were written.

        To be called when the write is over: who copies a unit forgets first that it was missed,
        and reads it then.

        Args:
            missed: copies, 0 or 1, that did not get it; of the others it is known that they did.
        """
        with self._lock:
            marks = self._marks[layer]
            if (end := first + count) > len(marks):
                more = np.zeros(max(end, len(marks) * 5 // 4) - len(marks), dtype=np.uint8)
                marks = self._marks[layer] = np.concatenate([marks, more])
            mark = _WRITTEN
            for copy in missed:
                mark |= _MISSED[copy]
            marks[first:end] = mark

    def miss_all(self, device: int) -> None:
        """A device has lost everything."""
        with self._lock:
            for marks in self._marks:
                written = (marks & _WRITTEN) > 0
                for copy, mine in enumerate(self._of(device, len(marks))):
                    marks[written & mine] |= _MISSED[copy]

    def missed(self, layer: int, device: int, most: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Up to `most` units that a device lacks, by copy, which are held to be there from now on.

        Returns:
            0 or 1, and units, ascending.
        """
        found, left = [], most
        with self._lock:
            marks = self._marks[layer]
            for copy, mine in enumerate(self._of(device, len(marks))):
                units = np.flatnonzero(mine & ((marks & _MISSED[copy]) > 0))[:left]
                marks[units] &= ~_MISSED[copy]
                left -= len(units)
                if len(units):
                    found.append((copy, units))
        return found

    def miss(self, layer: int, copy: int, units: NDArray[np.int64]) -> None:
        """What was held to be there is not."""
        with self._lock:
            self._marks[layer][units] |= _MISSED[copy]

    def num_missed(self, device: int) -> int:
        """Units that a device lacks."""
        with self._lock:
            return sum(
                int((mine & ((marks & _MISSED[copy]) > 0)).sum())
                for marks in self._marks
                for copy, mine in enumerate(self._of(device, len(marks)))
            )

    def _of(self, device: int, count: int) -> list[NDArray[np.bool_]]:
        """Which of the first units a device has as the first, and as the second holder."""
        owner, devices = self._stripes.owner(np.arange(count)), self._stripes.devices
        return [owner == device, owner == (device - 1) % devices]
