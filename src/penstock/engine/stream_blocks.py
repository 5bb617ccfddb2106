"""StreamBlocks: two halves of memory that units pass through between a store and attention."""

from abc import ABC, abstractmethod
from concurrent.futures import CancelledError, Future
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.engine.slot_transfer import PendingRead, SlotTransfer
from penstock.engine.tiers.token_pool import TokenPool
from penstock.storage.aligned_buffer import AlignedBuffer

STREAM_BLOCK_TOKENS = 2048
"""Most tokens of one streamed block: larger ones are no faster and delay the first."""


class StreamBlocks(ABC):
    """One half is read into, or written from, while the other is attended to.

    Attributes:
        units: most units of a row in a half
    """

    units: int

    @abstractmethod
    def read(self, transfer: SlotTransfer, unit_ids: NDArray[np.int64], half: int) -> PendingRead:
        """Submit the read of a block.

        Args:
            transfer: of the layer that reads; its own writes have ended.
            unit_ids: places in the store. [rows, units]
        """

    @abstractmethod
    def tokens(self, half: int, units: int) -> Tensor:
        """What a half holds, as attention takes it; good until the half is used again.

        Returns:
            [rows, tokens, *shape.token_size]
        """

    @abstractmethod
    def target(self, transfer: SlotTransfer, half: int, units: int) -> Tensor:
        """A half to fill, free of earlier writes. [rows, units, G, *shape.token_size]"""

    @abstractmethod
    def write(self, transfer: SlotTransfer, unit_ids: NDArray[np.int64], half: int) -> None:
        """Queue what was filled; errors come up when the transfer is drained.

        Args:
            unit_ids: as for `read`.
        """


class SlotHalves(StreamBlocks):
    """A layer's own slots, which hold nothing else meanwhile."""

    def __init__(self, pool: TokenPool, most_units: int | None, rows: int) -> None:
        """Halve the slots of `pool`.

        Args:
            most_units: of one transfer, all rows together; None for no limit.
        """
        self._pool, self._rows = pool, rows
        self._half = max(1, pool.num_slots // 2)
        size = min(self._half, max(1, STREAM_BLOCK_TOKENS // pool.group_tokens))
        if most_units is not None:
            size = max(1, min(size, most_units // rows))
        self.units = size

    def _slots(self, half: int, units: int) -> NDArray[np.int64]:
        slots = np.arange(half * self._half, half * self._half + units)
        numbers = np.arange(self._rows)[:, None] * self._pool.slots_per_row + slots
        return numbers.reshape(-1)

    @override
    def read(self, transfer: SlotTransfer, unit_ids: NDArray[np.int64], half: int) -> PendingRead:
        return transfer.read(unit_ids.reshape(-1), self._slots(half, unit_ids.shape[1]))

    @override
    def tokens(self, half: int, units: int) -> Tensor:
        first = half * self._half * self._pool.group_tokens
        return self._pool.tokens[:, first : first + units * self._pool.group_tokens]

    @override
    def target(self, transfer: SlotTransfer, half: int, units: int) -> Tensor:
        transfer.drain(keep=1)  # the other half may still be on its way to the disk
        tokens = self.tokens(half, units)
        size = (self._rows, units, self._pool.group_tokens)
        return tokens.view(*size, *tokens.shape[2:])

    @override
    def write(self, transfer: SlotTransfer, unit_ids: NDArray[np.int64], half: int) -> None:
        transfer.write(unit_ids.flatten(), self._slots(half, unit_ids.shape[1]))


class BlockBuffer(StreamBlocks):
    """Memory of its own in which blocks lie as they lie in the store.

    Where units are padded to sectors they are put side by side when they are attended to.
    """

    def __init__(
        self, shape: KVShape, rows: int, units: int, group_tokens: int, padded_bytes: int,
        memory: AlignedBuffer | None = None,
    ) -> None:  # fmt: skip
        """Lay out both halves; `num_bytes` says how much memory that is.

        Args:
            shape: of a row.
            units: of a row in a half.
            padded_bytes: a unit's place in the store.
            memory: to use; None: memory of its own.
        """
        self.units, self._rows = units, rows
        count, unit_bytes = 2 * rows * units, group_tokens * shape.token_bytes
        more = rows * units * unit_bytes if padded_bytes > unit_bytes else 0
        if memory is None:
            self._buffer = AlignedBuffer(count, padded_bytes)
            spare = torch.empty(more, dtype=torch.uint8)
        else:
            self._buffer = memory.in_slots_of(padded_bytes)
            spare = memory.tensor.flatten()[count * padded_bytes :][:more]
            assert self._buffer.num_slots >= count, "too little memory"
        self._lay_out(shape, group_tokens, spare)
        self._writes: tuple[list[Future[int]], list[Future[int]]] = ([], [])

    def _lay_out(self, shape: KVShape, group_tokens: int, spare: Tensor) -> None:
        rows, units, padded_bytes = self._rows, self.units, self._buffer.slot_bytes
        unit_bytes = group_tokens * shape.token_bytes
        places = self._buffer.tensor[: 2 * rows * units, :unit_bytes]
        places = places.view(2, rows, units, unit_bytes)
        size = (group_tokens, *shape.token_size)
        self._places: Tensor = places.view(shape.dtype).view(2, rows, units, *size)
        self._together: Tensor | None = None
        if padded_bytes > unit_bytes:
            self._together = spare.view(shape.dtype).view(rows, units, *size)

    @staticmethod
    def num_bytes(rows: int, units: int, unit_bytes: int, padded_bytes: int) -> int:
        """Bytes of a buffer of this size, for the ledger."""
        together = unit_bytes if padded_bytes > unit_bytes else 0
        return rows * units * (2 * padded_bytes + together)

    def _slots(self, half: int, units: int) -> NDArray[np.int64]:
        rows = (half * self._rows + np.arange(self._rows)) * self.units
        return (rows[:, None] + np.arange(units)).reshape(-1)

    @override
    def read(self, transfer: SlotTransfer, unit_ids: NDArray[np.int64], half: int) -> PendingRead:
        self.wait(half)
        slots = self._slots(half, unit_ids.shape[1])
        return transfer.read_into(self._buffer, unit_ids.reshape(-1), slots)

    @override
    def tokens(self, half: int, units: int) -> Tensor:
        found = self._places[half, :, :units]
        if self._together is not None:
            found = self._together[:, :units].copy_(found)
        return found.flatten(1, 2)

    @override
    def target(self, transfer: SlotTransfer, half: int, units: int) -> Tensor:
        self.wait(half)
        return self._places[half, :, :units]

    @override
    def write(self, transfer: SlotTransfer, unit_ids: NDArray[np.int64], half: int) -> None:
        slots = self._slots(half, unit_ids.shape[1])
        done = transfer.write_from(self._buffer, unit_ids.flatten(), slots)
        self._writes[half].append(done)

    def wait(self, half: int) -> None:
        """Until nothing is written from a half; what failed is said where its layer is drained."""
        while self._writes[half]:
            with suppress(CancelledError):  # the cache is closed
                self._writes[half].pop().exception()
