"""LayerTier: blocks layer by layer in the slow tier, for layer-wise offloading."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.closing import close_all
from penstock.core.errors import StoreFullError
from penstock.core.trace import Tracer
from penstock.engine.beams.file_tier import GrowingRegion, MoveThread
from penstock.engine.beams.slow_tier import Move
from penstock.kernels.device.gather_pieces import gather_pieces
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.store import KVStore

Int64Array = NDArray[np.int64]
_SLAB_BYTES = 512 << 20


class LayerTier(ABC):
    """Pieces, a piece being one layer of one block; moves are done in the order of the calls.

    Attributes:
        description: for people; says so when a device is simulated.
        simulated: name of the simulated device, or None.
        slots: fast memory for pieces. uint8 [num_slots, slot_bytes]
    """

    description: str
    simulated: str | None = None
    slots: Tensor

    @abstractmethod
    def load(self, layer: int, blocks: Int64Array, slots: Int64Array) -> Move:
        """Start bringing a layer of `blocks[i]` into `slots[i]`, behind what is computed so far."""

    @abstractmethod
    def save(self, layer: int, blocks: Int64Array, slots: Int64Array) -> Move:
        """Start writing `slots[i]` as a layer of `blocks[i]`, as computed so far."""

    def reserve(self, num_blocks: int) -> None:
        """Have blocks below this number, saved or not, whatever is in them (for benchmarks)."""
        raise NotImplementedError(f"{type(self).__name__} loads only what was saved")

    @abstractmethod
    def close(self) -> None:
        """End what is under way and give everything back."""


class FileLayers(LayerTier):
    """Pieces in one file a layer, read straight into slots in host memory."""

    def __init__(
        self, location: str, num_layers: int, num_slots: int, piece_bytes: int,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        """Open the store and take the memory for the slots.

        Raises:
            ConfigError: the location makes no sense.
            StorageError: the directory cannot be used.
        """
        self._store = KVStore.create(location, num_layers=num_layers, unit_bytes=piece_bytes)
        self._layers = [GrowingRegion(self._store.region(i)) for i in range(num_layers)]
        self._buffer = AlignedBuffer(num_slots, self._store.padded_bytes)
        self._thread = MoveThread(tracer)
        self.slots = self._buffer.tensor
        self.description, self.simulated = self._store.describe(), self._store.simulated

    @override
    def load(self, layer: int, blocks: Int64Array, slots: Int64Array) -> Move:
        """Read in the background; the moves before it have ended then."""
        region = self._layers[layer].region
        return self._thread.submit(
            "load", len(blocks), lambda: region.submit_read(blocks, self._buffer, slots).wait()
        )

    @override
    def save(self, layer: int, blocks: Int64Array, slots: Int64Array) -> Move:
        """Write from the slots in the background."""
        region = self._layers[layer]
        return self._thread.submit(
            "save", len(blocks), lambda: region.write(blocks, self._buffer, slots)
        )

    @override
    def close(self) -> None:
        """Let the move under way end, and give files and thread back."""
        close_all(self._thread.close, self._store.close)


class _Queued(Move):
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @override
    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class PinnedLayers(LayerTier):
    """Pieces in pinned host memory, which a kernel gathers from and scatters to on its own stream.

    One launch moves a whole layer of all beams, however their blocks are scattered.
    """

    def __init__(
        self, num_layers: int, num_slots: int, piece_bytes: int, device: torch.device
    ) -> None:
        """Take the device memory for the slots; host memory follows as blocks are saved."""
        self.slots = torch.zeros(num_slots, piece_bytes, dtype=torch.uint8, device=device)
        self.description = "pinned host memory"
        self._num_layers, self._piece_bytes = num_layers, piece_bytes
        self._slab_blocks = max(1, _SLAB_BYTES // (piece_bytes * num_layers))
        self._slabs: list[Tensor] = []
        self._bases = np.empty(0, dtype=np.int64)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @override
    def load(self, layer: int, blocks: Int64Array, slots: Int64Array) -> Move:
        """Gather on the tier's stream."""
        return self._move(layer, blocks, slots, to_host=False)

    @override
    def save(self, layer: int, blocks: Int64Array, slots: Int64Array) -> Move:
        """Scatter on the tier's stream.

        Raises:
            StoreFullError: there is not so much host memory.
        """
        return self._move(layer, blocks, slots, to_host=True)

    def _move(self, layer: int, blocks: Int64Array, slots: Int64Array, *, to_host: bool) -> Move:
        self.reserve(int(blocks.max(initial=-1)) + 1)
        slab, row = np.divmod(blocks, self._slab_blocks)
        address = self._bases[slab] + (row * self._num_layers + layer) * self._piece_bytes
        device = self.slots.device
        lists = torch.from_numpy(np.stack([address, slots])).pin_memory()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            there = lists.to(device, non_blocking=True)
            gather_pieces(there[0], self.slots, there[1], to_host=to_host)
            event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _Queued(event)

    @override
    def reserve(self, num_blocks: int) -> None:
        """Have pinned memory for blocks below this number.

        Raises:
            StoreFullError: there is not so much host memory.
        """
        size = (self._slab_blocks, self._num_layers * self._piece_bytes)
        while len(self._slabs) * self._slab_blocks < num_blocks:
            try:
                self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:  # torch names no better one
                raise StoreFullError(
                    f"no pinned host memory for {num_blocks} blocks of {size[1]} bytes; take fewer "
                    "beams, or a store on disk"
                ) from error
            self._bases = np.append(self._bases, self._slabs[-1].data_ptr())

    @override
    def close(self) -> None:
        """Let the moves end and give the memory back."""
        self._stream.synchronize()
        self._slabs = []
        self.slots = torch.empty(0)
