"""LayerCache: one layer's window, slots and store region; exact streaming attention."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.errors import StorageError, StoreFullError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.core.stats import PhaseStats, RunStats
from penstock.core.trace import Tracer
from penstock.engine.attention_call import (
    AttentionCall,
    AttentionSum,
    additive_mask,
    first_visible,
)
from penstock.engine.layer import Layer
from penstock.engine.prompt_indexing import PromptIndexing
from penstock.engine.prompt_workspace import PromptWorkspace
from penstock.engine.slot_transfer import PendingRead, PoolMemory, SlotTransfer, Staging
from penstock.engine.stream_blocks import (
    STREAM_BLOCK_TOKENS,
    BlockBuffer,
    SlotHalves,
    StreamBlocks,
)
from penstock.engine.tiers.rolling_window import RollingWindow
from penstock.engine.tiers.token_pool import CodedPool, TokenPool, copy_rows
from penstock.engine.unit_map import UnitMap
from penstock.engine.writer import Writer
from penstock.kernels.plain_attention import NEGATIVE_INFINITY
from penstock.storage.store import KVStore


@dataclass(kw_only=True)
class LayerSetup:
    """What all layers of one cache share."""

    shape: KVShape
    plan: SlotPlan
    store: KVStore
    units: UnitMap
    writer: Writer
    staging: Staging | None
    device: torch.device
    stats: RunStats
    tracer: Tracer | None
    indexing: PromptIndexing
    workspace: PromptWorkspace
    rows_per_sequence: int = 1
    phase: PhaseStats = field(default_factory=PhaseStats)
    """Counters of the forward pass under way."""
    checks_drafts: bool = False
    """Tokens are drafted, taken back and fed again: what layers have fetched meanwhile stays."""


class LayerCache(Layer):
    """Full KV of one layer on disk, its newest units in a window, a pool of slots to fetch into.

    Tokens of one batch row, by position:

        [0, closed)          whole units, written to the store (closed = length // G * G)
        [closed, length)     the unfinished unit, in the window only

    This class attends exactly, by streaming everything that is on disk through blocks, two halves
    of which one is read into while the other is attended to: the cache's `PromptWorkspace`, or the
    layer's own slots. It serves prefill, exact mode and the flexgen policy; `RetrievalLayer` adds
    selection for decoding.
    """

    def __init__(self, layer_idx: int, setup: LayerSetup, pool_memory: PoolMemory) -> None:
        plan, shape = setup.plan, setup.shape
        self.layer_idx = layer_idx
        self.setup = setup
        self._slot_memory = pool_memory
        self.length = 0
        self._touched = 0
        """Tokens that the window last took places for: more than `length` where that failed."""
        self._reserved_units = 0
        pool_type = CodedPool if plan.is_coded else TokenPool
        self.pool: TokenPool = pool_type(
            pool_memory.tensor, shape, batch=plan.batch, num_slots=plan.num_slots,
            kept_slots=plan.kept_slots, group_tokens=plan.group_tokens,
        )  # fmt: skip
        mask = self.pool.mask[:, self.pool.slot_places :]
        self._window_memory = pool_memory
        if plan.keeps_apart:
            self._window_memory = PoolMemory.allocate(
                plan.batch * plan.kept_slots, plan.unit_bytes,
                setup.store.padded_bytes, setup.device,
            )  # fmt: skip
            size = (plan.batch, plan.kept_slots * plan.group_tokens, *shape.token_size)
            tokens = self._window_memory.tensor.view(shape.dtype).view(size)
        else:
            tokens = self.pool.kept_tokens()
        if plan.shares(layer_idx):
            mask = torch.full_like(mask, NEGATIVE_INFINITY)
        self.window = RollingWindow(
            tokens, mask, group_tokens=plan.group_tokens, sink_slots=plan.sink_slots,
            window_slots=plan.window_slots, shape=shape,
        )  # fmt: skip
        region = setup.store.region(layer_idx)
        args = (setup.staging, setup.writer, setup.tracer)
        self.transfer = SlotTransfer(region, pool_memory, *args)
        self._window_transfer = self.transfer
        if plan.keeps_apart:
            self._window_transfer = SlotTransfer(region, self._window_memory, *args)
        self._own = self._own_blocks(pool_memory)

    def _own_blocks(self, memory: PoolMemory) -> StreamBlocks:
        """The slots' memory as what the past streams through."""
        plan, padded_bytes = self.setup.plan, self.setup.store.padded_bytes
        if not plan.is_coded:
            return SlotHalves(self.pool, self.transfer.max_units, plan.batch)
        assert memory.pages is not None
        each = BlockBuffer.num_bytes(plan.batch, 1, plan.unit_bytes, padded_bytes)
        most = max(1, STREAM_BLOCK_TOKENS // plan.group_tokens)
        return BlockBuffer(
            self.setup.shape, plan.batch, min(most, memory.pages.num_bytes // each),
            plan.group_tokens, padded_bytes, memory.pages,
        )  # fmt: skip

    # Attention ------------------------------------------------------------------------------

    @override
    def attend(self, call: AttentionCall) -> Tensor:
        """Attend to everything, then take the new tokens in.

        Returns:
            [batch, new_tokens, num_heads, head_dim]

        Raises:
            FetchError: a read failed.
            StoreFullError: the disk is full.
        """
        return self.attend_exactly(call)

    def attend_exactly(self, call: AttentionCall) -> Tensor:
        """Stream the past through attention block by block (exact at any budget)."""
        start, count = self.length, call.query.shape[2]
        self._free_halves()
        total = AttentionSum(call)
        closed = start // self.setup.plan.group_tokens
        with self._reading(0, closed) as blocks:
            new_mask = None
            if call.visible is not None:
                new_mask = additive_mask(call.visible[:, start:], call.query.dtype)
            total.add(call.keys, call.values, new_mask, causal=count > 1)
            self._add_unfinished(total)
            self._add_blocks(total, blocks, call.visible)
        self.append(call.keys, call.values, call.visible)
        return total.result()

    def _add_unfinished(self, total: AttentionSum) -> None:
        """Add the tokens of the unit that has not closed, which no disk has yet."""
        group_tokens = self.setup.plan.group_tokens
        unit, count = divmod(self.length, group_tokens)
        if count:
            first = self.window.window_slot(unit) * group_tokens
            self._add_kept(total, slice(first, first + count))

    def _add_window(self, total: AttentionSum) -> None:
        self._add_kept(total, slice(self.window.sink_slots * self.setup.plan.group_tokens, None))

    def _add_kept(self, total: AttentionSum, places: slice) -> None:
        keys, values = self.window.keys[:, places], self.window.values[:, places]
        total.add(keys.transpose(1, 2), values.transpose(1, 2), self.window.mask[:, places])

    def _stream(self, total: AttentionSum, end_unit: int, visible: Tensor | None) -> None:
        """Add the units [0, end_unit) to the softmax, reading one block ahead."""
        self._free_halves()
        with self._reading(0, end_unit) as blocks:
            self._add_blocks(total, blocks, visible)

    def _add_blocks(
        self, total: AttentionSum, blocks: Iterable[tuple[int, Tensor]], visible: Tensor | None
    ) -> None:
        for first, tokens in blocks:
            mask = None
            if visible is not None:
                shown = visible[:, first : first + tokens.shape[1]]
                mask = additive_mask(shown, self.setup.shape.dtype)
            shape = self.setup.shape
            keys, values = shape.keys_of(tokens), shape.values_of(tokens)
            total.add(keys.transpose(1, 2), values.transpose(1, 2), mask)

    # Blocks -----------------------------------------------------------------------------------

    @property
    def _halves(self) -> StreamBlocks:
        """What blocks pass through now; own slots must hold nothing (`forget_slots`)."""
        return self.setup.workspace.blocks or self._own

    def _free_halves(self) -> None:
        """Blocks are about to pass through."""
        if self._halves is self._own or not self.keeps_slots:
            self.forget_slots()

    def _blocks(self, first: int, end: int) -> list[tuple[int, int]]:
        """Cut the units [first, end) into blocks, each a first and an end unit."""
        size = self._halves.units
        return [(at, min(at + size, end)) for at in range(first, end, size)]

    @contextlib.contextmanager
    def _reading(self, first: int, end: int) -> Iterator[Iterator[tuple[int, Tensor]]]:
        """Read the units [first, end), one block ahead; the first one is on its way at once.

        Yields:
            Blocks, each as its first token's number and [rows, tokens, *token_size], good
            until the next one is asked for.
        """
        blocks, pending = self._blocks(first, end), list[PendingRead]()
        if blocks:
            self.drain_writes()
            pending.append(self._read_block(self.setup.units.table[:, slice(*blocks[0])], 0))

        def landed() -> Iterator[tuple[int, Tensor]]:
            for i, (at, to) in enumerate(blocks):
                self._land(pending[0])
                pending.clear()
                if i + 1 < len(blocks):
                    units = self.setup.units.table[:, slice(*blocks[i + 1])]
                    pending.append(self._read_block(units, (i + 1) % 2))
                tokens = self._halves.tokens(i % 2, to - at)
                yield at * self.setup.plan.group_tokens, tokens

        try:
            yield landed()
        finally:
            for read in pending:
                read.drop()

    def _read_block(self, units: NDArray[np.int64], half: int) -> PendingRead:
        """Submit the read of some units of every row into a half. units: places. [rows, units]"""
        return self._halves.read(self.transfer, units, half)

    def slot_numbers(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers in the pool's memory of the same slots of every row, row after row."""
        numbers = np.arange(self.setup.plan.batch)[:, None] * self.pool.slots_per_row + slots
        return numbers.reshape(-1)

    def _land(self, read: PendingRead) -> None:
        read.land()
        phase = self.setup.phase
        phase.stall_s += read.stall_s
        phase.reads += read.num_reads
        phase.read_bytes += read.read_bytes

    @override
    def forget_slots(self) -> None:
        """Give up what the slots hold; they are about to be used as stream buffers."""
        self.pool.hide_slots()

    @override
    def forget_lent_slots(self, lent: Sequence[PoolMemory]) -> None:
        if not self.keeps_slots or any(each is self._slot_memory for each in lent):
            self.forget_slots()

    @property
    def keeps_slots(self) -> bool:
        """Whether what the slots hold stays, where drafts are checked and a pass does not touch
        it."""
        return False

    def forget_units(self, first: int) -> None:
        """Give up what the slots hold of the units from `first` on; by default all of it."""
        self.forget_slots()

    # Taking tokens in -----------------------------------------------------------------------

    @override
    def append(self, keys: Tensor, values: Tensor, visible: Tensor | None) -> None:
        """Take new tokens in: units that close go to the store and the index, the rest stays.

        Args:
            keys: [batch, kv_heads, new_tokens, head_dim]
            values: [batch, kv_heads, new_tokens, value_width]
            visible: as in `AttentionCall`.
        """
        start, count = self.length, keys.shape[2]
        is_step = count == 1 and start > 0
        if is_step and (visible is None or bool(visible[:, -1].all())):
            self.append_one(keys, values)
            return
        if start == 0 or visible is not None:
            first = first_visible(visible, keys) // self.setup.plan.group_tokens
            self._set_start_units(first)
        if is_step:  # not through the slots, which hold what the step has selected
            self.append_one(keys, values)
            self.window.refresh(self.length, visible)
            return
        self._window_transfer.drain()  # the window changes below
        self._write_units(keys, values)
        self._touched = start + count
        self.window.write_many(keys, values, start)
        self.length = start + count
        self.window.refresh(self.length, visible)

    def _set_start_units(self, start_unit: Tensor) -> None:
        """Say where each row begins (left padding). start_unit: int64 [batch]"""
        if self.window.sink_slots:
            self.window.set_start_units(start_unit)

    def append_one(self, keys: Tensor, values: Tensor) -> None:
        """Take one decoded token in; the unit it closes, if any, is written behind the loop."""
        unit, offset = divmod(self.length, self.setup.plan.group_tokens)
        if offset == 0:
            # The unit that leaves the window now must be on disk before it can be selected.
            self._window_transfer.drain()
        self._touched = self.length + 1
        self.window.write_one(keys, values, self.length)
        self.length += 1
        if offset + 1 == self.setup.plan.group_tokens:
            self._close_unit(unit)

    def _close_unit(self, unit: int) -> None:
        plan, slot = self.setup.plan, self.window.window_slot(unit)
        self._reserve(unit, unit + 1)
        slots = np.arange(plan.batch) * plan.kept_slots + slot
        if not plan.keeps_apart:
            slots = self.slot_numbers(np.array([plan.num_slots + slot]))
        self._window_transfer.write(self.setup.units.table[:, unit].copy(), slots, later=True)
        self._count_write(plan.batch)
        places = slice(slot * plan.group_tokens, (slot + 1) * plan.group_tokens)
        self.on_closed(self.window.keys[:, places], unit)

    def _write_units(self, keys: Tensor, values: Tensor) -> None:
        """Write the units that `keys` and `values` close, half by half."""
        plan, shape, group_tokens = self.setup.plan, self.setup.shape, self.setup.plan.group_tokens
        start, end = self.length, self.length + keys.shape[2]
        first_unit, end_unit = start // group_tokens, end // group_tokens
        if first_unit == end_unit:
            return
        self._free_halves()
        self._reserve(first_unit, end_unit)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if start > first_unit * group_tokens:
            unfinished = torch.arange(first_unit * group_tokens, start, device=keys.device)
            places = self.window.window_places(unfinished)
            keys = torch.cat((self.window.keys[:, places], keys), dim=1)
            values = torch.cat((self.window.values[:, places], values), dim=1)
        for i, (first, last) in enumerate(self._blocks(first_unit, end_unit)):
            half = (i + 1) % 2  # the next layer reads into the other one first
            part = slice((first - first_unit) * group_tokens, (last - first_unit) * group_tokens)
            target = self._halves.target(self.transfer, half, last - first)
            for to, each in ((shape.keys_of(target), keys), (shape.values_of(target), values)):
                to.copy_(each[:, part].reshape(to.shape))
            units = self.setup.units.table[:, first:last].copy()  # the table may change
            self._halves.write(self.transfer, units, half)
            self._count_write(plan.batch * (last - first))
            self.on_closed(keys[:, part], first)
        if plan.shares(self.layer_idx) and self._halves is self._own:
            self.transfer.drain()  # a layer soon uses the same slots

    def _reserve(self, first_unit: int, end_unit: int) -> None:
        num_units = self.setup.units.ensure(first_unit, end_unit)
        if num_units > self._reserved_units:
            # Grow by a quarter at least: growing a file by one unit at a time costs more.
            shared = self.setup.units.shared_units
            own = max(0, self._reserved_units - shared)
            target = max(num_units, shared + own * 5 // 4)
            try:
                self.transfer.region.reserve(target)
            except StoreFullError:
                target = num_units
                self.transfer.region.reserve(target)
            self._reserved_units = target

    def _count_write(self, num_units: int) -> None:
        self.setup.phase.writes += 1
        self.setup.phase.written_bytes += num_units * self.setup.store.padded_bytes

    def on_closed(self, keys: Tensor, first_unit: int) -> None:
        """Units from `first_unit` on have closed; keys: [batch, tokens, kv_heads, head_dim]."""

    # What is on disk already ------------------------------------------------------------------

    @override
    def restore(self, length: int, state: Mapping[str, Tensor] | None = None) -> None:
        """Go on as if the tokens before `length` had been taken in: their units are in the store.

        The units in the window are read; nothing is hidden by padding.

        Raises:
            FetchError: a read failed.
        """
        self.drain()
        self.forget_slots()
        if self.length == 0 and self.window.sink_slots:
            rows = self.setup.plan.batch
            self.window.set_start_units(
                torch.zeros(rows, dtype=torch.int64, device=self.setup.device)
            )
        self.length = self._touched = length
        started = -(-length // self.setup.plan.group_tokens)
        for unit in range(self.window.first_window_unit(length), started):
            self._reload(unit)
        for unit in range(min(self.window.sink_slots, started)):
            self._reload(unit, slot=unit)
        self.window.refresh(length, None)

    @override
    def read_tokens(self, start: int, end: int) -> Tensor:
        """Keys and values of tokens that are held, from the store and the window.

        Args:
            start: a multiple of the unit's tokens.

        Returns:
            [rows, end - start, *shape.token_size]

        Raises:
            FetchError: a read failed.
        """
        group_tokens = self.setup.plan.group_tokens
        assert start % group_tokens == 0, start
        assert end <= self.length, (end, self.length)
        self.drain()
        self.forget_slots()
        closed = max(start, self.length // group_tokens * group_tokens)
        end_unit = -(-min(closed, end) // group_tokens)
        with self._reading(start // group_tokens, end_unit) as blocks:
            parts = [tokens.clone() for _, tokens in blocks]
        if end > closed:
            positions = torch.arange(closed, end, device=self.setup.device)
            parts.append(self.window.tokens[:, self.window.window_places(positions)])
        return torch.cat(parts, dim=1)[:, : end - start]

    # Changes of shape -------------------------------------------------------------------------

    @override
    def crop(self, length: int) -> None:
        """Forget the tokens at and after `length`; the window is read back from the store."""
        touched = max(self._touched, self.length)
        if length >= touched:
            return
        self.drain()
        group_tokens = self.setup.plan.group_tokens
        oldest = self.window.first_window_unit(touched)
        self.length = length = min(length, self.length)
        self._touched = touched
        wanted = self.window.first_window_unit(length)
        started = -(-length // group_tokens)
        for unit in range(wanted, min(oldest, started)):
            self._reload(unit)
        self.forget_units(self.window.first_window_unit(length + 1))
        self.window.refresh_cropped(length)
        self._touched = length

    def _reload(self, unit: int, slot: int | None = None) -> None:
        """Read a unit into its slot of the window, or into another of the kept slots."""
        plan = self.setup.plan
        slot = self.window.window_slot(unit) if slot is None else slot
        slots = np.arange(plan.batch) * plan.kept_slots + slot
        if not plan.keeps_apart:
            slots = self.slot_numbers(np.array([plan.num_slots + slot]))
        self._window_transfer.read(self.setup.units.table[:, unit].copy(), slots).land()

    @override
    def drain(self) -> None:
        """Wait for every write of this layer. Raises what the writes raised."""
        self.drain_writes()

    @override
    def drain_writes(self) -> None:
        """The part of `drain` that is about tokens alone."""
        self.transfer.drain()
        self._window_transfer.drain()

    @override
    def take_rows_from(self, other: Layer, rows: Tensor) -> None:
        """Of another batch the slots are left empty."""
        assert isinstance(other, LayerCache)
        other.drain()
        self.length, self._touched = other.length, other._touched
        copy_rows(self.window.tokens, other.window.tokens, rows)
        copy_rows(self.window.mask, other.window.mask, rows)
        self.window.take_rows_from(other.window, rows)

    @override
    def reset(self) -> None:
        """Forget every token, and errors of writes that will not be read."""
        with contextlib.suppress(StorageError):
            self.drain()
        self.length = self._touched = 0
        self.forget_slots()
        self.window.mask.fill_(NEGATIVE_INFINITY)

    @override
    def close(self) -> None:
        """Let pending transfers end; errors that were not asked for stay unsaid."""
