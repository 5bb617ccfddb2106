"""PinnedTier and DiskTier: blocks in pinned host memory or on a disk, fast memory on a GPU."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.closing import close_all
from penstock.core.errors import StoreFullError
from penstock.core.trace import Tracer
from penstock.engine.beams.file_tier import GrowingRegion, MoveThread
from penstock.engine.beams.slow_tier import Move, SlowTier
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.store import KVStore

_SLAB_BYTES = 512 << 20
"""Pinned memory is taken in pieces of this size: pinning is slow, and never given back early."""
_STAGING_BYTES = 64 << 20


class _Copied(Move):
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @override
    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class PinnedTier(SlowTier):
    """Blocks in pinned host memory, copied on a stream of their own."""

    def __init__(self, num_slots: int, block_bytes: int, device: torch.device) -> None:
        """Take the device memory for the slots; host memory follows as blocks are saved."""
        self.slots = torch.zeros(num_slots, block_bytes, dtype=torch.uint8, device=device)
        self.description = "pinned host memory"
        self._block_bytes = block_bytes
        self._slab_blocks = max(1, _SLAB_BYTES // block_bytes)
        self._slabs: list[Tensor] = []
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @override
    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> Move:
        """Copy to the device behind what was computed and moved so far."""
        pairs = [(self.slots[slot], self._place(b)) for b, slot in zip(blocks, slots, strict=True)]
        return self._copy(pairs)

    @override
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> Move:
        """Copy to the host behind what was computed and moved so far.

        Raises:
            StoreFullError: there is not so much host memory.
        """
        pairs = [(self._place(b), self.slots[slot]) for b, slot in zip(blocks, slots, strict=True)]
        return self._copy(pairs)

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Move:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _Copied(event)

    def _place(self, block: int) -> Tensor:
        self.reserve(block + 1)
        slab, row = divmod(block, self._slab_blocks)
        return self._slabs[slab][row]

    @override
    def reserve(self, num_blocks: int) -> None:
        """Have pinned memory for blocks below this number.

        Raises:
            StoreFullError: there is not so much host memory.
        """
        size = (self._slab_blocks, self._block_bytes)
        while len(self._slabs) * self._slab_blocks < num_blocks:
            try:
                self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:  # torch names no better one
                raise StoreFullError(
                    f"no pinned host memory for {num_blocks} blocks of {size[1]} bytes; "
                    "take fewer beams, or a store on disk"
                ) from error

    @override
    def close(self) -> None:
        """Let the copies end and give the memory back."""
        self._stream.synchronize()
        self._slabs = []
        self.slots = torch.empty(0)


class DiskTier(SlowTier):
    """Blocks in a store on a disk, on their way through a little pinned host memory."""

    def __init__(
        self, location: str, num_slots: int, block_bytes: int, device: torch.device,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        """Open the store and take the memory for the slots.

        Args:
            location: see `KVStore.create`.

        Raises:
            ConfigError: the location makes no sense.
            StorageError: the directory cannot be used.
        """
        self._store = KVStore.create(location, num_layers=1, unit_bytes=block_bytes)
        self._blocks = GrowingRegion(self._store.region(0))
        slot_bytes, self._block_bytes = self._blocks.region.padded_bytes, block_bytes
        self._staging = AlignedBuffer(max(1, _STAGING_BYTES // slot_bytes), slot_bytes, pinned=True)
        self._thread = MoveThread(tracer)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.slots = torch.zeros(num_slots, block_bytes, dtype=torch.uint8, device=device)
        self.description = self._store.describe()
        self.simulated = self._store.simulated

    @override
    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> Move:
        """Read and copy in the background, behind what was computed so far."""
        computed = self._computed()

        def job() -> None:
            for units, targets in self._parts(blocks, slots):
                places = np.arange(len(units))
                self._blocks.region.submit_read(units, self._staging, places).wait()
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(computed)
                    for slot, place in zip(targets.tolist(), places.tolist(), strict=True):
                        source = self._staging.tensor[place, : self._block_bytes]
                        self.slots[slot].copy_(source, non_blocking=True)
                self._stream.synchronize()

        return self._thread.submit("load", len(blocks), job)

    @override
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> Move:
        """Copy and write in the background, as computed so far."""
        computed = self._computed()

        def job() -> None:
            for units, targets in self._parts(blocks, slots):
                places = np.arange(len(units))
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(computed)
                    for slot, place in zip(targets.tolist(), places.tolist(), strict=True):
                        target = self._staging.tensor[place, : self._block_bytes]
                        target.copy_(self.slots[slot], non_blocking=True)
                self._stream.synchronize()
                self._blocks.write(units, self._staging, places)

        return self._thread.submit("save", len(blocks), job)

    def _computed(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return event

    def _parts(self, blocks: Sequence[int], slots: Sequence[int]):  # type: ignore[no-untyped-def]
        most = self._staging.num_slots
        for first in range(0, len(blocks), most):
            part = slice(first, first + most)
            yield np.array(blocks[part], dtype=np.int64), np.array(slots[part], dtype=np.int64)

    @override
    def check(self) -> None:
        """Raise the error of a move that failed."""
        self._thread.check()

    @override
    def close(self) -> None:
        """Let the move under way end, and give file, thread and memory back."""
        close_all(self._thread.close, self._store.close)
        self.slots = torch.empty(0)
