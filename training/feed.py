"""Batches on their way to the device: packed by a thread, a few ahead of the training.

A GPU's step is as long as the Python that launches it, so that the training's own thread must not
spend its time on taking batches. Seen on an H200: with the data's processes at work a step took
41 to 54 ms that took 27 with batches made before. Most of it is thought to be the copies into
pinned memory: torch divides them among as many threads as there are cores, and they wait for
each other while other processes use the cores. On two busy cores such copies of one batch took
10 to 30 ms, against 0.2 ms on one thread. So numpy, which has no threads, does the copying, and
a batch goes to the device in one block. With this feed four runs took 26 to 30 ms a short step.
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.data import Batch

AHEAD = 2
"""Packed batches that wait for the training, besides those that the processes have made."""
_FIELDS = ("weights", "positions", "places", "tokens", "targets", "codes", "groups")
"""Wider elements first, so that each array starts where its elements may."""
_LEAST_ROOM = 1024
_LOOK_S = 0.1
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A batch on the device; shapes as in `Batch`."""

    tokens: Tensor
    """int32"""
    positions: Tensor
    """int32"""
    places: Tensor
    """int64"""
    targets: Tensor
    """int64"""
    weights: Tensor
    """float32"""
    groups: Tensor
    """int64"""
    codes: Tensor
    """int64"""
    grid: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch in one block of memory."""

    content: Tensor
    """uint8; pinned if it goes to a GPU. [bytes]"""
    rows: int
    length: int
    guesses: int
    """Those that pad the batch are counted."""
    weight: float
    """Of all guesses."""
    grid: tuple[int, int] = (0, 0)
    """See `Batch`."""

    @classmethod
    def of(cls, batch: Batch, *, pin: bool, padded: bool = False) -> "Packed":
        """Copy a batch's arrays, into pinned memory if `pin`.

        Args:
            padded: with guesses that weigh nothing, so that batches come in few shapes.
        """
        arrays = [getattr(batch, name) for name in _FIELDS]
        guesses = len(batch.places)
        if padded:
            guesses = room_for(guesses, batch.tokens.size)
            last = batch.tokens.size - 1
            filler = {
                "places": np.arange(last, last - guesses + len(batch.places), -1),
                "targets": 0, "weights": 0, "groups": -1,
            }  # fmt: skip
            arrays = [
                _filled(array, guesses, filler[name]) if name in filler else array
                for name, array in zip(_FIELDS, arrays, strict=True)
            ]
        content = torch.empty(
            sum(array.nbytes for array in arrays), dtype=torch.uint8, pin_memory=pin
        )
        block, at = content.numpy(), 0
        for array in arrays:
            part = block[at : at + array.nbytes].view(array.dtype)
            np.copyto(part, array.reshape(-1))
            at += array.nbytes
        rows, length = batch.tokens.shape
        return cls(content, rows, length, guesses, float(batch.weights.sum()), batch.grid)

    def on(self, device: torch.device) -> OnDevice:
        """The batch's arrays on a device; the copy to a GPU is in the order of its stream, and
        torch keeps the pinned block until it is done."""
        block = self.content
        if device.type != "cpu":
            block = block.to(device, non_blocking=True)
        return self.unpacked(block)

    def unpacked(self, block: Tensor) -> OnDevice:
        """The arrays of a batch of this shape.

        Args:
            block: its content, anywhere. uint8 [bytes]
        """
        tokens, guesses, at = self.rows * self.length, self.guesses, 0

        def part(count: int, dtype: torch.dtype) -> Tensor:
            nonlocal at
            start, at = at, at + count * dtype.itemsize
            return block[start:at].view(dtype)

        weights = part(guesses, torch.float32)
        positions = part(tokens, torch.int32)
        places = part(guesses, torch.int32)
        ids = part(tokens, torch.int16).int() & 0xFFFF  # they are unsigned
        targets = part(guesses, torch.int16).long() & 0xFFFF
        frames, side = self.grid
        codes = part(self.rows * frames * side * side, torch.int16).long() & 0xFFFF
        groups = part(guesses, torch.int8)
        shape = (self.rows, self.length)
        return OnDevice(
            ids.view(shape), positions.view(shape), places.long(), targets, weights, groups.long(),
            codes, self.grid,
        )  # fmt: skip


def room_for(guesses: int, tokens: int) -> int:
    """A power of two, or all of a batch's tokens but one, or as many as there are."""
    return max(guesses, min(max(_LEAST_ROOM, 1 << (guesses - 1).bit_length()), tokens - 1))


def _filled(array: npt.NDArray[Any], count: int, rest: Any) -> npt.NDArray[Any]:
    """With `rest` behind it, `count` in all."""
    out = np.empty(count, dtype=array.dtype)
    out[: len(array)] = array
    out[len(array) :] = rest
    return out


class Feed:
    """Packed batches in the order of the batches.

    Args:
        batches: taken one by one.
        pin: whether they go to a GPU.
        ahead: how many are packed before they are asked for, by a thread; 0: each is taken and
            packed when it is asked for.
        padded: see `Packed.of`.
    """

    def __init__(
        self, batches: Iterable[Batch], *, pin: bool, ahead: int, padded: bool = False
    ) -> None:
        self._batches, self._pin, self._padded = batches, pin, padded
        self._packed: queue.Queue[Packed | BaseException | None] = queue.Queue(max(1, ahead))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True) if ahead else None

    def __iter__(self) -> Iterator[Packed]:
        """The batches, once. What taking one raises is raised here."""
        if self._thread is None:
            for batch in self._batches:
                yield self._of(batch)
            return
        self._thread.start()
        while (packed := self._packed.get()) is not None:
            if isinstance(packed, BaseException):
                raise packed
            yield packed

    def close(self) -> None:
        """End the thread. The maker of batches must still be there: it may wait for one."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_PATIENCE_S)

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _of(self, batch: Batch) -> Packed:
        return Packed.of(batch, pin=self._pin, padded=self._padded)

    def _work(self) -> None:
        try:
            for batch in self._batches:
                if not self._put(self._of(batch)):
                    return
            self._put(None)
        except BaseException as error:  # it is raised where the batch was to be taken
            self._put(error)

    def _put(self, packed: Packed | BaseException | None) -> bool:
        """Hand over; False when the reader takes no more."""
        while not self._stop.is_set():
            try:
                self._packed.put(packed, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False
