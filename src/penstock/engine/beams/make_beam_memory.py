"""make_beam_memory(): the memory of a search, from a budget and a strategy."""

from dataclasses import dataclass

import psutil
import torch

from penstock.core.byte_size import enough_bytes, format_bytes
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.ledger import MemoryLedger
from penstock.core.trace import Tracer
from penstock.engine.beams.beam_memory import BeamMemory, BlockShape
from penstock.engine.beams.beam_schedule import ScheduleSettings
from penstock.engine.beams.cuda_tiers import DiskTier, PinnedTier
from penstock.engine.beams.file_tier import FileTier
from penstock.engine.beams.group_tensors import GroupTensorsCache
from penstock.engine.beams.layer_tier import FileLayers, LayerTier, PinnedLayers
from penstock.engine.beams.layerwise_memory import LayerwiseMemory
from penstock.engine.beams.scheduled_memory import ScheduledMemory
from penstock.engine.beams.slow_tier import SlowTier

STRATEGIES = ("scheduled", "resident", "layerwise")
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRequest:
    """What a search wants to hold, and in how much."""

    shape: BlockShape
    beams: int
    max_tokens: int
    device: torch.device
    store: str
    limit_bytes: int | None
    """Fast memory; None for as much as all beams take."""
    strategy: str
    settings: ScheduleSettings
    prefetch: bool
    follows_system: bool = False
    """Use less than the limit while the host has less to spare (`memory="auto"`)."""
    tracer: Tracer | None = None

    @property
    def blocks_per_beam(self) -> int:
        """Of the longest sequence."""
        return -(-self.max_tokens // self.shape.block_tokens)

    @property
    def slot_bytes(self) -> int:
        """A block's place in fast memory: on the host whole pages, for direct I/O."""
        return self._padded(self.shape.block_bytes)

    def _padded(self, num_bytes: int) -> int:
        if self.device.type == "cuda":
            return num_bytes
        return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def table_bytes(self) -> int:
        """Most bytes of what a running group's kernels read."""
        return GroupTensorsCache.num_bytes(
            self.beams, self.blocks_per_beam, self.shape.block_tokens, self.device
        )


def make_beam_memory(request: MemoryRequest) -> BeamMemory:
    """The memory that a search asks for.

    Raises:
        BudgetError: the limit does not hold one beam ("scheduled"), one prompt ("layerwise"), or
            all beams ("resident"); names the smallest that would do.
        ConfigError: the store makes no sense.
        StorageError: the store cannot be used.
    """
    if request.strategy == "layerwise":
        return _layerwise(request)
    return _scheduled(request)


def _scheduled(request: MemoryRequest) -> BeamMemory:
    resident = request.strategy == "resident"
    # One more than a beam has: the block that it copies its own last block from.
    smallest = request.blocks_per_beam + 1
    # Parents are held beside their children until the children have grown.
    everything = request.beams * smallest
    tables = request.table_bytes
    wanted = everything * request.slot_bytes + tables
    limit = wanted if request.limit_bytes is None else request.limit_bytes
    num_slots = min(everything, (limit - tables) // request.slot_bytes)
    least = everything if resident else smallest
    if num_slots < least:
        needed = least * request.slot_bytes + tables
        whom = f"{request.beams} beams" if resident else "1 beam"
        raise BudgetError(
            f"room for {whom} of {request.max_tokens} tokens is more than {format_bytes(limit)} of "
            f"fast memory; give memory={enough_bytes(needed)} or more, or fewer tokens",
            needed_bytes=needed,
        )
    ledger = MemoryLedger(limit)
    ledger.take("beam slots", num_slots * request.slot_bytes)
    ledger.take("tables", tables)
    return ScheduledMemory(
        request.shape, ledger, _slow_tier(request, num_slots), request.device,
        settings=request.settings, max_tokens=request.max_tokens, prefetch=request.prefetch,
        spare_bytes=_spare_bytes if request.follows_system else None,
    )  # fmt: skip


def _spare_bytes() -> int:
    """What the host has free beyond a sixteenth of its memory, which others keep."""
    memory = psutil.virtual_memory()
    return int(memory.available - memory.total // 16)


def _slow_tier(request: MemoryRequest, num_slots: int) -> SlowTier:
    block_bytes, device = request.shape.block_bytes, request.device
    store = "memory" if request.strategy == "resident" else request.store
    if device.type == "cpu":
        return FileTier(store, num_slots, block_bytes, request.tracer)
    if store in ("auto", "memory", "host"):
        return PinnedTier(num_slots, block_bytes, device)
    return DiskTier(store, num_slots, block_bytes, device, request.tracer)


def _layerwise(request: MemoryRequest) -> BeamMemory:
    shape, layers = request.shape, request.shape.kv.num_layers
    piece_bytes = request._padded(shape.layer_bytes)
    everything = request.beams * request.blocks_per_beam * layers
    limit = request.limit_bytes
    kept = everything if limit is None else min(everything, limit // piece_bytes)
    least = request.blocks_per_beam * layers
    if kept < least:
        needed = least * piece_bytes
        raise BudgetError(
            f"room for 1 beam of {request.max_tokens} tokens is more than "
            f"{format_bytes(limit or 0)} of fast memory; give memory={enough_bytes(needed)} or "
            "more, or fewer tokens",
            needed_bytes=needed,
        )
    slots = LayerwiseMemory.num_slots(shape, request.beams, request.max_tokens, kept)
    tables = request.table_bytes + 4 * layers * request.beams * request.blocks_per_beam
    ledger = MemoryLedger(slots * piece_bytes + tables)
    ledger.take("resident layers", kept * piece_bytes)
    ledger.take("stages and open blocks, on top of the budget", (slots - kept) * piece_bytes)
    ledger.take("tables, on top of the budget", tables)
    return LayerwiseMemory(
        shape, ledger, _layer_tier(request, slots), request.device,
        beams=request.beams, max_tokens=request.max_tokens, resident_slots=kept,
    )  # fmt: skip


def _layer_tier(request: MemoryRequest, num_slots: int) -> LayerTier:
    shape, device = request.shape, request.device
    if device.type == "cpu":
        return FileLayers(
            request.store, shape.kv.num_layers, num_slots, shape.layer_bytes, request.tracer
        )
    if request.store not in ("auto", "memory", "host"):
        raise ConfigError(
            "layer-wise offloading on a GPU streams from host memory; give store=auto or memory"
        )
    return PinnedLayers(shape.kv.num_layers, num_slots, shape.layer_bytes, device)
