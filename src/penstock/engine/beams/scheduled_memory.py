"""ScheduledMemory: groups of beams take turns in fast memory, each for a whole step."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.byte_size import format_bytes
from penstock.core.errors import BudgetError
from penstock.core.ledger import MemoryLedger
from penstock.engine.beams.beam_memory import BeamMemory, BlockShape
from penstock.engine.beams.beam_schedule import (
    ScheduleSettings,
    keep_order,
    prefetch_order,
    schedule_beams,
)
from penstock.engine.beams.block_tree import Path
from penstock.engine.beams.decoding import StepTraffic
from penstock.engine.beams.fast_slots import FastSlots
from penstock.engine.beams.prompt_attention import PromptChunk
from penstock.engine.beams.slow_tier import Move, SlowTier
from penstock.engine.beams.stall_clock import StallClock


class ScheduledMemory(BeamMemory):
    """Locality-aware beam scheduling: a group stays until its step is over.

    Within a step the KV of a beam is loaded once instead of once a token (inter-token locality);
    beams that share blocks run together, and what they share is loaded once (inter-beam locality);
    the next group is loaded into free slots behind the present one.

    Source: Locality-Aware Beam Scheduling, sections 4.1 and 4.2, Algorithm 1. Departures:

    * A block that lies in fast memory already is not loaded again, for whichever beam it came. The
      paper loads each group anew.
    * The beam that is needed latest in this step leaves (the schedule is known), not the one that
      was in the group before.
    * With `share`, a block has one slot for all beams of a group, and attention over it is computed
      once for them; the paper keeps a copy for each (its footnote 2), as we do without `share`.
    """

    def __init__(
        self, shape: BlockShape, ledger: MemoryLedger, slow: SlowTier, device: torch.device,
        *, settings: ScheduleSettings, max_tokens: int, prefetch: bool,
        spare_bytes: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        """Take over a slow tier with its slots, which its maker has booked.

        Args:
            prefetch: load for the next group while one runs; takes `settings.overlap`.
            spare_bytes: asked at each step: how many bytes fast memory may grow by beyond what is
                in use (negative: must shrink by), as the system reports it. None: all slots.
        """
        super().__init__(shape, ledger, device)
        self.description, self.simulated = slow.description, slow.simulated
        self._slow = slow
        self._layers = shape.layered(slow.slots)
        self._fast = FastSlots(len(slow.slots))
        self._settings = settings
        self._prefetches = prefetch and settings.overlap
        self._max_tokens = max_tokens
        self._width = self.tree.blocks_of(max_tokens)
        self._spare_bytes = spare_bytes
        self._moves: dict[int, Move] = {}
        self._clock = StallClock(device)
        self._paths: list[Path] = []
        self._ends: list[int] = []
        self._order: list[list[int]] = []
        self._index = -1

    @override
    def _slots(self, layer: int) -> Tensor:
        return self._layers[:, layer]

    # The prompt -------------------------------------------------------------------------------

    @override
    def begin_chunk(self, path: Path, num_tokens: int) -> None:
        """Make room for the next tokens of a prompt; all of its blocks stay in fast memory."""
        length = path.length + num_tokens
        missing = self.tree.blocks_of(length) - len(path.blocks)
        self._make_room(missing, keep=set(path.blocks))
        self.tree.grow(path, length)
        self._place(block for block in path.blocks if block not in self._fast)
        self._fast.unsaved.update(path.blocks[path.length // self.shape.block_tokens :])
        table = torch.tensor([self._fast.slots_of(b)[0] for b in path.blocks], device=self.device)
        self._chunk = PromptChunk(table, path.length, self.shape.block_tokens)

    # A step -----------------------------------------------------------------------------------

    @override
    def begin_step(self, paths: Sequence[Path], num_tokens: int) -> list[list[int]]:
        """Group the beams by what they share, so that each group fits to the step's end."""
        self._paths = list(paths)
        self._ends = [min(path.length + num_tokens, self._max_tokens) for path in paths]
        self.traffic, self._index = StepTraffic(), -1
        self._read_limit()
        self._order = schedule_beams(
            [path.array() for path in paths],
            [self._growth(path, end) for path, end in zip(paths, self._ends, strict=True)],
            self._fast.limit, self._settings, resident=self._resident(),
        )  # fmt: skip
        if self._fast.num_free < 0:
            for block in [*self._fast.resident()]:
                while len(self._fast.slots_of(block)) > 1:
                    self._fast.drop_copy(block)
            self._make_room(0, keep=())
            empty = self._fast.empty_slots()
            given = self._slow.give_back(empty)
            if given is not None:
                self._moves.update(dict.fromkeys(empty, given))
        return self._order

    def _read_limit(self) -> None:
        """How many slots may be in use in this step (Algorithm 1, `get_budget`); never less than
        the longest beam takes."""
        if self._spare_bytes is not None:
            room = self._fast.num_used + self._spare_bytes() // self._slow.slots.shape[1]
            self._fast.limit = min(self._fast.num_slots, max(room, self._width + 1))

    def _growth(self, path: Path, end: int) -> int:
        """Slots that a path needs besides those of its blocks, until it has `end` tokens."""
        own_copy = not self._settings.share and self.tree.needs_copy(path)
        return self.tree.growth(path, end) - own_copy

    def _resident(self) -> NDArray[np.int64]:
        return np.fromiter(self._fast.resident(), dtype=np.int64)

    @override
    def begin_group(self, index: int) -> None:
        """Bring a group in; then start to load what the next one needs into free slots."""
        self._index = index
        paths = [self._paths[i] for i in self._order[index]]
        ends = [self._ends[i] for i in self._order[index]]
        need = Counter(block for path in paths for block in path.blocks)
        if self._settings.share:
            need = Counter(need.keys())
        if len(self._order) > 1 and not self._settings.overlap:
            self._forget_all()
        growth = sum(self._growth(path, end) for path, end in zip(paths, ends, strict=True))
        self._load(need, growth)
        for path, end in zip(paths, ends, strict=True):
            self._grow(path, end)
        self._fill(paths, ends)
        if self._prefetches and index + 1 < len(self._order):
            self._prefetch(index + 1)

    def _load(self, need: Counter[int], growth: int) -> None:
        """Give every block its copies, and leave room for `growth` more."""
        for block, count in need.items():
            while len(self._fast.slots_of(block)) > count:
                self._fast.drop_copy(block)
        lacking = sum(n - len(self._fast.slots_of(block)) for block, n in need.items())
        self._make_room(lacking + growth, keep=need.keys())
        loads: list[tuple[int, int]] = []
        copies: list[tuple[int, int]] = []
        for block, count in need.items():
            if block not in self._fast:
                copied = 1 if self._settings.overlap else count
                loads += [(block, self._fast.put(block)) for _ in range(copied)]
            while len(self._fast.slots_of(block)) < count:
                copies.append((self._fast.slots_of(block)[0], self._fast.put(block)))
        self._fetch(loads)
        with self._clock.waiting():
            self._settle(slot for block in need for slot in self._fast.slots_of(block))
        self._copy(copies)

    def _grow(self, path: Path, end: int) -> None:
        """Blocks to write into: a shared last block becomes the path's own, new ones follow."""
        copy = self.tree.grow(path, end)
        if copy is not None and self._settings.share:
            source = self._fast.slots_of(copy[0])[0]
            self._place([copy[1]])
            self._copy([(source, self._fast.slots_of(copy[1])[0])])
        elif copy is not None:
            self._save_last_copy(copy[0])
            self._fast.hand_over(*copy)
            with self._clock.waiting():
                self._settle(self._fast.slots_of(copy[1]))
        self._place(block for block in path.blocks if block not in self._fast)
        self._fast.unsaved.update(path.blocks[path.length // self.shape.block_tokens :])

    def _fill(self, paths: Sequence[Path], ends: Sequence[int]) -> None:
        """The tensors that the group's kernels read."""
        table = np.zeros((len(paths), self._width), dtype=np.int32)
        taken: Counter[int] = Counter()
        for row, path in enumerate(paths):
            for column, block in enumerate(path.blocks):
                slots = self._fast.slots_of(block)
                table[row, column] = slots[taken[block] if not self._settings.share else 0]
                taken[block] += 1
        self._group = self._groups.fill(
            table, [path.array() for path in paths], [path.length for path in paths], ends,
            queries_per_kv_head=self.shape.kv.queries_per_kv_head, share=self._settings.share,
        )  # fmt: skip

    @override
    def token_done(self, lengths: Sequence[int]) -> None:
        """Write back the blocks that the token has filled, where another block needs the room."""
        if len(self._order) < 2:
            return
        tokens = self.shape.block_tokens
        full = [
            self._paths[i].blocks[length // tokens - 1]
            for i, length in zip(self._order[self._index], lengths, strict=True)
            if length % tokens == 0
        ]
        self._save(block for block in full if block in self._fast.unsaved)

    @override
    def end_group(self, lengths: Sequence[int]) -> None:
        """Take the new lengths over and the blocks behind them away."""
        for i, length in zip(self._order[self._index], lengths, strict=True):
            self._paths[i].length = length
            self._drop(self.tree.trim(self._paths[i]))
        self._group = None

    @override
    def end_step(self) -> StepTraffic:
        """What the step moved, and how long it waited.

        Raises:
            StorageError: a block could not be saved.
        """
        self._slow.check()
        self._paths, self._order = [], []
        self.traffic.stall_s = self._clock.take()
        return self.traffic

    @override
    def lengthen(self, path: Path, num_tokens: int) -> None:
        """As if so many tokens had been decoded and saved."""
        length = path.length + num_tokens
        assert length % self.shape.block_tokens == 0, "to the end of a block"
        if path.length % self.shape.block_tokens:
            self._save_last_copy(path.blocks[-1])
        self.tree.grow(path, length)
        path.length = length
        self._slow.reserve(self.tree.end)

    @override
    def release(self, path: Path) -> None:
        """Let a sequence go, and what no other holds out of both tiers."""
        self._drop(self.tree.release(path))

    @override
    def close(self) -> None:
        """Give files and memory back."""
        self._slow.close()
        self._layers = torch.empty(0)

    # Moves ------------------------------------------------------------------------------------

    def _prefetch(self, index: int) -> None:
        """Load what the next group misses into slots that this step needs no more."""
        coming = [i for group in self._order[self._index :] for i in group]
        needed = {block for i in coming for block in self._paths[i].blocks}
        idle = [block for block in self._fast.resident() if block not in needed]
        room = self._fast.num_free + sum(len(self._fast.slots_of(b)) for b in idle)
        resident = self._resident()
        wanted = prefetch_order(
            self._order, [path.array() for path in self._paths], index - 1, free_slots=room,
            resident=resident, share=self._settings.share,
        ).tolist()  # fmt: skip
        self._evict(idle, len(wanted) - self._fast.num_free)
        loads = [(block, self._fast.put(block)) for block in wanted]
        self._fetch(loads)
        self.traffic.prefetched_bytes += len(loads) * self.shape.block_bytes

    def _make_room(self, count: int, keep: Iterable[int]) -> None:
        """Free slots, those of the blocks first that are needed latest; never those of `keep`.

        Raises:
            BudgetError: fast memory does not hold so much.
        """
        if self._fast.num_free >= count:
            return
        kept, blocks = set(keep), [path.array() for path in self._paths]
        order = keep_order(self._order, blocks, max(self._index, 0), self._resident())
        victims = [block for block in reversed(order.tolist()) if block not in kept]
        self._evict(victims, count - self._fast.num_free)
        if self._fast.num_free < count:
            short = (count - self._fast.num_free) * self.shape.block_bytes
            raise BudgetError(f"fast memory is too small for the beams by {format_bytes(short)}")

    def _evict(self, victims: Sequence[int], count: int) -> None:
        """Free at least `count` slots, taking the victims in their order, as far as they go."""
        leaving, freed = [], 0
        for block in victims:
            if freed >= count:
                break
            leaving.append(block)
            freed += len(self._fast.slots_of(block))
        self._save(block for block in leaving if block in self._fast.unsaved)
        self._drop(leaving)

    def _forget_all(self) -> None:
        """Leave nothing in fast memory, so that every beam loads its own (no inter-beam reuse)."""
        resident = [*self._fast.resident()]
        self._evict(resident, self._fast.num_slots)

    def _drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._fast.drop(block)

    def _save_last_copy(self, block: int) -> None:
        """Before its only copy is written over: save a block that others still hold."""
        if len(self._fast.slots_of(block)) == 1 and block in self._fast.unsaved:
            self._save([block])

    def _save(self, blocks: Iterable[int]) -> None:
        chosen = list(blocks)
        if not chosen:
            return
        slots = [self._fast.slots_of(block)[0] for block in chosen]
        move = self._slow.save(chosen, slots)
        self._moves.update(dict.fromkeys(slots, move))
        self._fast.unsaved.difference_update(chosen)
        self.traffic.written_bytes += len(chosen) * self.shape.block_bytes

    def _fetch(self, loads: Sequence[tuple[int, int]]) -> None:
        if not loads:
            return
        move = self._slow.load([b for b, _ in loads], [slot for _, slot in loads])
        self._moves.update(dict.fromkeys((slot for _, slot in loads), move))
        self.traffic.loaded_bytes += len(loads) * self.shape.block_bytes

    def _place(self, blocks: Iterable[int]) -> None:
        """Slots for blocks that the model will write."""
        slots = [self._fast.put(block) for block in blocks]
        with self._clock.waiting():
            self._settle(slots)

    def _settle(self, slots: Iterable[int]) -> None:
        """Let the moves of these slots end before anything is computed."""
        for move in {self._moves.pop(slot) for slot in slots if slot in self._moves}:
            move.wait()

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots within fast memory."""
        if not pairs:
            return
        with self._clock.waiting():
            self._settle(slot for pair in pairs for slot in pair)
        slots = self._slow.slots
        for source, target in pairs:
            slots[target].copy_(slots[source])
        self.traffic.copied_bytes += len(pairs) * self.shape.block_bytes
