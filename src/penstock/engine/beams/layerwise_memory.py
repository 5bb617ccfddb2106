"""LayerwiseMemory: all beams token by token, layers that do not fit streamed in for each token."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.byte_size import format_bytes
from penstock.core.errors import BudgetError
from penstock.core.ledger import MemoryLedger
from penstock.engine.attention_call import AttentionCall
from penstock.engine.beams.beam_memory import BeamMemory, BlockShape
from penstock.engine.beams.block_tree import Path
from penstock.engine.beams.decoding import StepTraffic
from penstock.engine.beams.layer_tier import LayerTier
from penstock.engine.beams.prompt_attention import PromptChunk
from penstock.engine.beams.slow_tier import Move
from penstock.engine.beams.stall_clock import StallClock

Int64Array = NDArray[np.int64]
NUM_STAGES = 2
"""A layer is attended to in one while the next layer comes into the other."""


class LayerwiseMemory(BeamMemory):
    """Layer-wise offloading with prefetch: what the beam schedule is compared with.

    The first layers stay, as many as `L_inGPU` says: `resident_bytes` over what one layer of all
    beams takes, every beam with a copy of its own. Each of the others is loaded for every token,
    again a copy for each beam, while the layer before computes.

    Source: Locality-Aware Beam Scheduling, section 4.1, Eq. 1-3, and 2.4. Departures, all in favour
    of the baseline: the blocks that are written in and the two stages that layers stream through
    come on top of the budget (Eq. 1 knows neither); resident blocks that beams share lie once, so
    that a fork moves nothing; what is loaded are full blocks, up to `block_tokens - 1` tokens less
    than Eq. 2 has it.
    """

    def __init__(
        self, shape: BlockShape, ledger: MemoryLedger, tier: LayerTier, device: torch.device,
        *, beams: int, max_tokens: int, resident_slots: int,
    ) -> None:  # fmt: skip
        """Take over a tier with `num_slots(...)` slots, which its maker has booked."""
        super().__init__(shape, ledger, device)
        self.description, self.simulated = tier.description, tier.simulated
        self._tier, self._beams = tier, beams
        self._max_tokens, self._width = max_tokens, self.tree.blocks_of(max_tokens)
        self._resident_slots = resident_slots
        self._pieces = _pieces(shape, tier.slots)
        self._free = list(range(resident_slots - 1, -1, -1))
        self._slot_of: dict[tuple[int, int], int] = {}
        self._stage = [resident_slots + i * beams * self._width for i in range(NUM_STAGES)]
        self._open_slots = resident_slots + NUM_STAGES * beams * self._width
        self._open_row_of: dict[int, int] = {}
        self._clock = StallClock(device)
        self._paths: list[Path] = []
        self._lengths: list[int] = []
        self._num_tokens = 0
        self._prompt = Path()
        self._kept = shape.kv.num_layers
        self._tables: dict[int, Tensor] = {}
        self._coming: dict[int, Move] = {}
        self._load_blocks = self._load_places = np.empty(0, dtype=np.int64)
        self._unsaved: set[int] = set()
        self._lengthened: set[int] = set()

    @staticmethod
    def num_slots(shape: BlockShape, beams: int, max_tokens: int, resident_slots: int) -> int:
        """Slots of a tier for this memory: resident ones, two stages, and the blocks written in."""
        width = -(-max_tokens // shape.block_tokens)
        return resident_slots + beams * (NUM_STAGES * width + shape.kv.num_layers)

    is_static = False

    @override
    def _slots(self, layer: int) -> Tensor:
        return self._pieces

    # The prompt: blocks of all layers stay -----------------------------------------------------

    @override
    def begin_chunk(self, path: Path, num_tokens: int) -> None:
        """Make room for the next tokens of a prompt, in every layer."""
        self.tree.grow(path, path.length + num_tokens)
        layers = self.shape.kv.num_layers
        new = [block for block in path.blocks if (0, block) not in self._slot_of]
        if len(new) * layers > len(self._free):
            short = (len(new) * layers - len(self._free)) * self.shape.layer_bytes
            raise BudgetError(f"fast memory is too small for the prompt by {format_bytes(short)}")
        for layer in range(layers):
            self._slot_of.update({(layer, block): self._free.pop() for block in new})
        self._unsaved.update(new)
        self._prompt = path
        self._chunk = PromptChunk(self._prompt_table(0), path.length, self.shape.block_tokens)

    def _prompt_table(self, layer: int) -> Tensor:
        slots = [self._slot_of[layer, block] for block in self._prompt.blocks]
        return torch.tensor(slots, device=self.device)

    # A step -----------------------------------------------------------------------------------

    @override
    def begin_step(self, paths: Sequence[Path], num_tokens: int) -> list[list[int]]:
        """All beams are one group."""
        if len(paths) > self._beams:
            raise BudgetError(f"this memory was made for {self._beams} beams, not {len(paths)}")
        self._paths, self.traffic = list(paths), StepTraffic()
        self._num_tokens = num_tokens
        return [list(range(len(paths)))]

    @override
    def begin_group(self, index: int) -> None:
        """Give every beam a block of its own to write in, with what its last block holds."""
        self._lengths = [path.length for path in self._paths]
        ends = [min(n + self._num_tokens, self._max_tokens) for n in self._lengths]
        self._open_blocks()
        for path, end in zip(self._paths, ends, strict=True):
            self.tree.grow(path, end)
        self._keep_layers()
        self._place_lengthened()
        self._group = self._groups.fill(
            np.zeros((len(self._paths), self._width), dtype=np.int32),
            [path.array() for path in self._paths], self._lengths, ends,
            queries_per_kv_head=self.shape.kv.queries_per_kv_head, share=False,
        )  # fmt: skip
        self._make_tables()

    @override
    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        """As `BeamMemory.attend`; the layer comes in before, and the next one is on its way."""
        if self._chunk is not None:
            self._chunk = replace(self._chunk, table=self._prompt_table(layer))
            return super().attend(layer, call)
        if layer == 0:
            self._start(self._kept)
        if layer in self._coming:
            self._start(layer + 1)
            with self._clock.waiting():
                self._coming.pop(layer).wait()
        group = self.group
        table = self._tables[layer]
        self._group = replace(group, work=replace(group.work, table=table))
        try:
            return super().attend(layer, call)
        finally:
            self._group = group

    @override
    def token_done(self, lengths: Sequence[int]) -> None:
        """Blocks that the token has filled go where their layer is: they stay, or are saved."""
        tokens, before = self.shape.block_tokens, self._lengths
        self._lengths = list(lengths)
        rows = [
            row for row, length in enumerate(lengths)
            if length > before[row] and length % tokens == 0
        ]  # fmt: skip
        if not rows:
            return
        self._keep_layers()
        blocks = [self._paths[row].blocks[lengths[row] // tokens - 1] for row in rows]
        for layer in range(self.shape.kv.num_layers):
            open_slots = self._open_slots + layer * self._beams + np.array(rows, dtype=np.int64)
            if layer < self._kept:
                self._keep(layer, blocks, open_slots)
            if self._offloads:
                self._save(layer, blocks, open_slots)
        if not self._offloads:
            self._unsaved.update(blocks)
        self._make_tables()

    @override
    def end_group(self, lengths: Sequence[int]) -> None:
        """Take the new lengths over and the blocks behind them away."""
        for row, (path, length) in enumerate(zip(self._paths, lengths, strict=True)):
            path.length = length
            self._forget(self.tree.trim(path))
            if length % self.shape.block_tokens:
                self._open_row_of[path.blocks[-1]] = row
        self._group = None

    @override
    def end_step(self) -> StepTraffic:
        """What the step moved, and how long it waited."""
        self.traffic.stall_s = self._clock.take()
        return self.traffic

    @override
    def lengthen(self, path: Path, num_tokens: int) -> None:
        """As if so many tokens had been decoded and saved."""
        length = path.length + num_tokens
        assert length % self.shape.block_tokens == 0, "to the end of a block"
        assert not path.length % self.shape.block_tokens, "from the end of a block"
        first = len(path.blocks)
        self.tree.grow(path, length)
        path.length = length
        self._tier.reserve(self.tree.end)
        self._lengthened.update(path.blocks[first:])

    @override
    def release(self, path: Path) -> None:
        """Let a sequence go, and what no other holds."""
        self._forget(self.tree.release(path))

    @override
    def close(self) -> None:
        """Give files and memory back."""
        self._tier.close()
        self._pieces = torch.empty(0)

    # Layers -----------------------------------------------------------------------------------

    @property
    def _offloads(self) -> bool:
        return self._kept < self.shape.kv.num_layers

    def _keep_layers(self) -> None:
        """Eq. 1 for the beams as long as they are; layers above it give their slots up."""
        piece = len(self._paths) * max(1, self.tree.blocks_of(max(self._lengths)))
        kept = min(self._kept, self._resident_slots // piece)
        if kept < self.shape.kv.num_layers and self._unsaved:
            unsaved = sorted(self._unsaved)
            self._unsaved.clear()
            for layer in range(self.shape.kv.num_layers):
                slots = [self._slot_of[layer, block] for block in unsaved]
                self._save(layer, unsaved, np.array(slots, dtype=np.int64))
        for key in [key for key in self._slot_of if key[0] >= kept]:
            self._free.append(self._slot_of.pop(key))
        self._kept = kept

    def _place_lengthened(self) -> None:
        """Slots for blocks that `lengthen` made, in the layers that stay."""
        for layer in range(self._kept if self._lengthened else 0):
            missing = [b for b in self._lengthened if (layer, b) not in self._slot_of]
            self._slot_of.update({(layer, block): self._free.pop() for block in missing})
        self._lengthened.clear()

    def _open_blocks(self) -> None:
        """Bring every beam's partly filled last block to the row that it has in this step."""
        tokens, layers, beams = self.shape.block_tokens, self.shape.kv.num_layers, self._beams
        rows = [row for row, length in enumerate(self._lengths) if length % tokens]
        if not rows:
            return
        source = np.empty((layers, len(rows)), dtype=np.int64)
        for column, row in enumerate(rows):
            block = self._paths[row].blocks[-1]
            for layer in range(layers):
                if block in self._open_row_of:
                    source[layer, column] = (
                        self._open_slots + layer * beams + self._open_row_of[block]
                    )
                else:  # the prompt's
                    source[layer, column] = self._slot_of[layer, block]
        target = self._open_slots + np.arange(layers)[:, None] * beams + np.array(rows)
        self._copy(source.reshape(-1), target.reshape(-1))
        for row in rows:
            self._forget([self._paths[row].blocks[-1]])
        self._open_row_of.clear()

    def _copy(self, source: Int64Array, target: Int64Array) -> None:
        """Copy slots within fast memory, all read before any is written."""
        index = torch.from_numpy(source).to(self.device)
        pieces = self._pieces.index_select(0, index)
        self._pieces.index_copy_(0, torch.from_numpy(target).to(self.device), pieces)
        self.traffic.copied_bytes += len(source) * self.shape.layer_bytes

    def _keep(self, layer: int, blocks: Sequence[int], open_slots: Int64Array) -> None:
        """Copy blocks that were filled to slots that stay."""
        slots = [self._free.pop() for _ in blocks]
        self._slot_of.update(zip(((layer, block) for block in blocks), slots, strict=True))
        self._copy(open_slots, np.array(slots, dtype=np.int64))

    def _save(self, layer: int, blocks: Sequence[int], slots: Int64Array) -> None:
        """Save a layer of blocks; the slots may be written to again when this returns."""
        with self._clock.waiting():
            self._tier.save(layer, np.array(blocks, dtype=np.int64), slots).wait()
        self.traffic.written_bytes += len(blocks) * self.shape.layer_bytes

    def _forget(self, blocks: Sequence[int]) -> None:
        """Give up the slots of blocks that no sequence holds, or that a row writes in its own."""
        for block in blocks:
            self._unsaved.discard(block)
            self._lengthened.discard(block)
            self._open_row_of.pop(block, None)
            for layer in range(self.shape.kv.num_layers):
                slot = self._slot_of.pop((layer, block), None)
                if slot is not None:
                    self._free.append(slot)

    def _make_tables(self) -> None:
        """Slots of every layer's blocks: resident ones, a stage's, or the row's own block."""
        tokens = self.shape.block_tokens
        width, beams = self._width, self._beams
        closed = [length // tokens for length in self._lengths]
        for layer in range(self.shape.kv.num_layers):
            table = np.zeros((len(self._paths), width), dtype=np.int32)
            for row, path in enumerate(self._paths):
                n = closed[row]
                if layer < self._kept:
                    table[row, :n] = [self._slot_of[layer, b] for b in path.blocks[:n]]
                else:
                    first = self._stage[layer % NUM_STAGES] + row * width
                    table[row, :n] = np.arange(first, first + n)
                table[row, n:] = self._open_slots + layer * beams + row
            there = torch.from_numpy(table)
            if layer in self._tables and self._tables[layer].shape == there.shape:
                self._tables[layer].copy_(there)
            else:
                self._tables[layer] = there.to(self.device)
        paths = zip(self._paths, closed, strict=True)
        self._load_blocks = np.array([b for p, n in paths for b in p.blocks[:n]], dtype=np.int64)
        rows = [np.arange(n) + row * width for row, n in enumerate(closed)]
        self._load_places = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)

    def _start(self, layer: int) -> None:
        """Start to load a layer into its stage, which the layer before last is done with."""
        if layer >= self.shape.kv.num_layers or not len(self._load_blocks):
            return
        slots = self._load_places + self._stage[layer % NUM_STAGES]
        self._coming[layer] = self._tier.load(layer, self._load_blocks, slots)
        moved = len(slots) * self.shape.layer_bytes
        self.traffic.loaded_bytes += moved
        self.traffic.prefetched_bytes += moved


def _pieces(shape: BlockShape, rows: Tensor) -> Tensor:
    """Slots of bytes as pieces. [num_slots, 2, kv_heads, block_tokens, head_dim]"""
    one = replace(shape, kv=shape.kv.of_layers(1), windows=(None,))
    return one.layered(rows)[:, 0]
