"""TieredRuntime: all tiered layers of one cache, their budget, and the life of a step."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.core.closing import DeferredInterrupts, close_all
from penstock.core.errors import CacheStateError
from penstock.core.ledger import MemoryLedger, MemoryReport, Reservation
from penstock.core.slot_plan import SlotPlan
from penstock.core.stats import RunStats
from penstock.engine.attention_call import AttentionCall
from penstock.engine.cache_health import CacheHealth, OtherLayer
from penstock.engine.device_tier.device_steps import DeviceSteps
from penstock.engine.head_rows import HeadRows
from penstock.engine.layer import Layer
from penstock.engine.layer_cache import LayerSetup
from penstock.engine.make_layers import device_layers, make_layers, resident_layers
from penstock.engine.open_store import open_store
from penstock.engine.planning import plan_cache
from penstock.engine.policy import SelectionPolicy
from penstock.engine.prompt_indexing import PromptIndexing
from penstock.engine.prompt_workspace import PromptWorkspace
from penstock.engine.restoring import copy_past, share_past
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.slot_transfer import Staging
from penstock.engine.step_meter import StepMeter
from penstock.engine.unit_map import UnitMap
from penstock.engine.writer import Writer
from penstock.storage.store import KVStore

LENT_SHARE = 8
"""Of the slots, what a pass that checks drafts may take for its blocks."""


class TieredRuntime:
    """Owns the store, the ledger and the layers; knows nothing of models.

    Layers are numbered 0 .. shape.num_layers - 1 here: the tiered ones alone. Memory is planned at
    construction for `batch` rows and allocated when the first tokens come, for their batch.
    """

    def __init__(self, settings: RuntimeSettings, batch: int) -> None:
        """Plan for `batch` rows.

        Raises:
            BudgetError: the budget is too small for this batch.
            ConfigError: the store's location makes no sense.
            StorageError: the store's location cannot be used.
        """
        self.settings = settings
        self.stats = RunStats()
        self.stats.begin(settings.policy.counters)
        self._health = CacheHealth(settings.device, self._forget_slots)
        self._rows = HeadRows(
            settings.shape, per_head=settings.policy.per_head and not settings.exact
        )
        self._store: KVStore | None = None
        self.layers: list[Layer] = []
        self._setup: LayerSetup | None = None
        self._writer: Writer | None = None
        self._reservations: list[Reservation] = []
        self.device_steps: DeviceSteps | None = None
        """What the layers of the device tier share, once there are some."""
        try:
            self.policy, self.plan = self._plan(batch)
        except BaseException:
            self.close()
            raise
        self.verifying = False
        """Whether passes of several tokens check drafts, and are no prompt's."""
        self._ledger = MemoryLedger(self._limit())
        self._meter = StepMeter(self.stats, settings.tracer)
        self._indexing = PromptIndexing(
            settings.shape.num_layers, settings.prompt_tokens, settings.index_progress
        )

    def _plan(
        self, batch: int, current: tuple[SelectionPolicy, SlotPlan] | None = None
    ) -> tuple[SelectionPolicy, SlotPlan]:
        """Divide the budget for `batch` rows; opens the store, or closes it if none is needed.

        Args:
            current: under which tokens are held that go on; None: there are none.
        """
        settings = self.settings
        stays = settings.device_tier or (settings.policy.stays_resident and not settings.exact)
        if self._store is None and not stays:
            self._store = open_store(settings, self._rows.shape, settings.policy.unit_tokens, batch)
        policy, plan = plan_cache(
            settings, self._rows, batch, current=current,
            sector_bytes=1 if self._store is None else self._store.region(0).sector_bytes,
        )  # fmt: skip
        if plan.is_resident and self._store is not None:
            self._store.close()
            self._store = None
        return policy, plan

    def _limit(self) -> int:
        limit = self.settings.limit_bytes
        return self.plan.total_bytes if limit is None else limit

    # Allocation -------------------------------------------------------------------------------

    def _make_room(self, batch: int) -> None:
        """Have layers for `batch` rows; while no token is held, for others than before too."""
        if self.layers and not self.length and batch * self._rows.per_sequence != self.plan.batch:
            self._give_back()
        if not self.layers:
            self._allocate(batch)

    def _allocate(
        self, batch: int, current: tuple[SelectionPolicy, SlotPlan] | None = None
    ) -> None:
        """Take the plan's memory from the ledger and build the layers; all of it or nothing."""
        try:
            self._build(batch, current)
        except BaseException:
            self._give_back()
            raise

    def _release_memory(self) -> None:
        if self._setup is not None:
            self._setup.workspace.close()
        for reservation in self._reservations:
            reservation.release()
        self._reservations = []

    def _give_back(self) -> None:
        """Close the layers; the store stays for others."""
        layers, self.layers = self.layers, []
        self.device_steps = None
        close_all(*(layer.close for layer in layers), self._release_memory)
        self._setup = None

    def _build(self, batch: int, current: tuple[SelectionPolicy, SlotPlan] | None) -> None:
        if batch * self._rows.per_sequence != self.plan.batch:
            self.policy, self.plan = self._plan(batch, current)
            self._ledger.limit_bytes = self._limit()
        settings, plan = self.settings, self.plan
        for item in plan.items:
            if item[1]:
                self._reservations.append(self._ledger.take(*item))
        if plan.is_resident:
            self.layers = resident_layers(
                settings.shape.num_layers,
                self._rows.shape,
                plan,
                settings.max_tokens,
                settings.device,
            )
            return
        if settings.device_tier:
            self.device_steps = steps = DeviceSteps(plan, settings.device)
            self.layers = device_layers(
                settings, self.policy, plan, self._rows.shape, self._rows.per_sequence, steps.clock
            )
            steps.watch(self.layers)
            return
        assert self._store is not None
        self._writer = self._writer or Writer(settings.tracer)
        staging = None
        if plan.staging_slots:
            staging = Staging(plan.staging_slots, self._store.padded_bytes, settings.device)
        self._setup = LayerSetup(
            shape=self._rows.shape, plan=plan, store=self._store,
            units=UnitMap(plan.batch, plan.max_units), writer=self._writer, staging=staging,
            device=settings.device, stats=self.stats, tracer=settings.tracer,
            rows_per_sequence=self._rows.per_sequence, indexing=self._indexing,
            workspace=PromptWorkspace(
                self._rows.shape, plan, self._store.padded_bytes, self._ledger
            ),
        )  # fmt: skip
        self.layers = make_layers(settings, self.policy, self._setup)

    # Steps ------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens that the first layer holds (all layers agree between forward passes)."""
        return self.layers[0].length if self.layers else 0

    def layer_length(self, layer: int) -> int:
        """Tokens that one layer holds."""
        return self.layers[layer].length if self.layers else 0

    @property
    def batch(self) -> int:
        """Sequences of the cache; 0 while it holds no token."""
        return self.plan.batch // self._rows.per_sequence if self.length else 0

    @property
    def lengths(self) -> list[int]:
        """Tokens that each layer holds; they differ within a step, and where one was given up."""
        return [layer.length for layer in self.layers]

    def check_step(self, batch: int, count: int) -> None:
        """Refuse a step of `count` tokens for each of `batch` rows before a tier takes it in.

        Raises:
            CacheStateError: as for `attend`.
        """
        self._check_size(0, batch, count)

    def check_sound(self) -> None:
        """Refuse to go on behind what failed.

        Raises:
            CacheStateError: as for `attend`; or layers that are not in tiers hold other tokens.
        """
        self._health.require_sound(self.lengths, self._health.others)

    def set_other_layers(self, others: Sequence[OtherLayer]) -> None:
        """Learn of the model's layers that are not in tiers: a step has to pass them too."""
        self._health.others = others

    def mixed_up(self) -> None:
        """Rows of the layers that are not in tiers are not those of the tiers any more."""
        self._health.tear(0)

    def sound_length(self) -> int:
        """Tokens that every layer holds, others than the tiered ones too, and that are sound."""
        return self._health.common_length(self.lengths)

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        """Attend in one layer and take its new tokens in.

        Returns:
            [batch, new_tokens, num_heads, head_dim]

        Raises:
            CacheStateError: closed, another batch than before, beyond `max_tokens`, or an earlier
                step failed halfway.
            FetchError: a read failed.
            StoreFullError: the disk is full.
        """
        batch, _, count, _ = call.keys.shape
        self._check(layer, batch, count)
        self._make_room(batch)
        if layer == 0:
            self._begin_step(batch, count)
        is_last = layer + 1 == len(self.layers)
        with self._health.keeping(self.layers[layer].length):
            out = self._rows.unfold(self.layers[layer].attend(self._rows.fold_call(call)))
            if is_last and count > 1:
                for each in self.layers:  # all but the newest writes have long ended
                    each.drain_writes()
            if is_last and self.device_steps is not None:
                self.device_steps.end(self.length, step=count == 1 and self.length > 1)
        if is_last:
            if self._writer is not None:
                self._writer.start_deferred()
            self._meter.leave(count)
            if count > 1 and self.settings.progress is not None and not self.verifying:
                self.settings.progress(self.layers[layer].length)
            with self._health.keeping(self.length):
                self._indexing.after_step(self.layers)
        return out

    def append(
        self, layer: int, keys: Tensor, values: Tensor, visible: Tensor | None = None
    ) -> None:
        """Take tokens in without attending (a document whose KV is already there).

        Args:
            keys: post-RoPE. [batch, kv_heads, new_tokens, head_dim]
            values: [batch, kv_heads, new_tokens, value_width]
            visible: as in `AttentionCall`.
        """
        batch, _, count, _ = keys.shape
        self._check(layer, batch, count)
        self._make_room(batch)
        with self._health.keeping(self.layers[layer].length):
            self.layers[layer].append(*self._rows.fold_tokens(keys, values, visible))
            if layer + 1 == len(self.layers) and self.device_steps is not None:
                self.device_steps.end(self.length)

    def restore(self, batch: int, length: int | None = None) -> None:
        """Go on behind the first tokens of the stored past, in every row.

        Where the policy's units are the past's, nothing is copied; others take a copy in.

        Args:
            length: tokens to hold then; None: all of the past.

        Raises:
            BudgetError: the budget is too small for this batch.
            ConfigError: the stored index is another one's.
            FetchError: a read failed, or what is stored is damaged.
        """
        past = self.settings.past
        assert past is not None
        end = past.length if length is None else length
        self._check(0, self.batch or batch, end - self.length)
        self._make_room(batch)
        with self._health.keeping(self.length):
            if self._setup is not None and self.settings.shares_past:
                share_past(past, self.layers, self._setup.units, end)
            else:
                rows = self.plan.batch // self._rows.per_sequence
                copy_past(past, self.layers, self._rows, rows, end, self.settings.device)
            if self.device_steps is not None:
                self.device_steps.end(self.length)

    def read_tokens(self, layer: int, start: int, end: int) -> Tensor:
        """Keys and values of tokens that a layer holds.

        Args:
            start: a multiple of a unit's tokens.

        Returns:
            [batch, end - start, *shape.token_size]

        Raises:
            CacheStateError: the policy forgets tokens, or they are in the device tier.
            FetchError: a read failed.
        """
        target = self.layers[layer]
        if self.policy.drops or not target.reads_back:
            where = self.policy.name if target.reads_back else "the device tier"
            raise CacheStateError(f"keys and values of {where} cannot be read back; use a disk")
        with self._health.keeping(self.length):
            return self._rows.unfold_tokens(target.read_tokens(start, end))

    def index_state(self, layer: int) -> dict[str, Tensor] | None:
        """What the index of a layer needs to go on elsewhere; None where it is made from keys."""
        with self._health.keeping(self.length):
            return self.layers[layer].index_state()

    def drop_fetches(self) -> None:
        """A step was given up before its tokens came: what was fetched for it is not used."""
        for layer in self.layers:
            layer.drop_fetch()

    def _forget_slots(self) -> None:
        for layer in self.layers:
            layer.forget_slots()

    def _check(self, layer: int, batch: int, count: int) -> None:
        self._health.require_sound(self.lengths if layer == 0 else ())
        self._check_size(layer, batch, count)

    def _check_size(self, layer: int, batch: int, count: int) -> None:
        if self.batch not in (0, batch):
            raise CacheStateError(f"the cache holds {self.batch} rows, not {batch}")
        total = self.layer_length(layer) + count
        if total > self.settings.max_tokens:
            raise CacheStateError(
                f"{total} tokens do not fit max_tokens={self.settings.max_tokens}; make the cache "
                "with a larger max_tokens"
            )

    def _begin_step(self, batch: int, count: int) -> None:
        decoding = count == 1 and self.length > 0
        phase = self._meter.begin(batch * count, decoding=decoding, verifying=self.verifying)
        if self._setup is not None:
            if decoding and self._retrieves:
                self._close_workspace()
            else:
                self._open_workspace(self._setup)
            self._setup.phase = phase
        if self.device_steps is not None and decoding:
            self.device_steps.begin(self.length)

    @property
    def _retrieves(self) -> bool:
        return self.policy.retrieves and not self.settings.exact

    def _open_workspace(self, setup: LayerSetup) -> None:
        """A pass of many tokens begins; slots are idle in it, and lend their memory."""
        workspace = setup.workspace
        if workspace.blocks is not None:
            return
        if not setup.checks_drafts:
            self._forget_slots()
            workspace.open(setup.writer)
            return
        try:  # drafts go on with what the slots hold
            lent = workspace.open(setup.writer, most_lent=workspace.slot_bytes // LENT_SHARE)
        except BaseException:
            self._forget_slots()
            raise
        for layer in self.layers:
            layer.forget_lent_slots(lent)

    def _close_workspace(self) -> None:
        """Tokens are decoded again; what is left to index of the prompt has large blocks still."""
        setup = self._setup
        if setup is None or setup.workspace.blocks is None:
            return
        setup.phase = self.stats.decode
        with self._health.keeping(self.length):
            for layer in self.layers:
                layer.make_index()
        setup.workspace.close()

    @property
    def on_device_tier(self) -> bool:
        """Whether the layers that there are keep their KV in host memory that a device reads."""
        return self.device_steps is not None

    @property
    def is_torn(self) -> bool:
        """Whether an earlier step failed halfway."""
        return not self._health.is_sound

    def forget_recording(self, lengths: Sequence[int]) -> None:
        """A decode step was recorded, as far as that went, and none of it has run.

        Args:
            lengths: of the layers before it.
        """
        assert self.device_steps is not None
        for layer, length in zip(self.layers, lengths, strict=True):
            layer.length = length
        self._health.heal()
        self._meter.take_back(self.batch)
        self.device_steps.forget_recording()

    def replayed(self) -> None:
        """A CUDA graph has run one decode step of all layers: count it here too."""
        self._meter.begin(self.batch, decoding=True)
        self._meter.leave(1)
        if self.device_steps is not None:
            self.device_steps.replayed()
        for layer in self.layers:
            layer.length += 1

    def end_step(self) -> None:
        """Close the step under way, when its last layer was done."""
        self._meter.end()

    def wants_query(self, layer: int) -> bool:
        """Whether this layer's query, ahead of its attention, would start a fetch now."""
        return bool(self.layers) and self.layers[layer].can_begin(self.policy)

    def begin_fetch(self, layer: int, query: Tensor) -> None:
        """Start the fetch of one layer's next decode step. query: [batch, num_heads, head_dim]."""
        target = self.layers[layer]
        if self._setup is not None:
            self._close_workspace()
            self._setup.phase = self.stats.decode
        with self._health.keeping(target.length):
            if self.device_steps is not None:
                self.device_steps.begin(target.length)
            target.begin(self._rows.fold(query))

    def choosing(self, layer: int, *inputs: Tensor) -> AbstractContextManager[None]:
        """For `with`: what chooses for a layer ahead; the device tier has a stream for it.

        Args:
            inputs: what is read there.
        """
        steps = self.device_steps
        return nullcontext() if steps is None else steps.choosing(self.layer_length(layer), *inputs)

    @contextmanager
    def checking_drafts(self) -> Iterator[None]:
        """For `with`: passes of several tokens check drafts, and what the slots hold outlives
        them."""
        setup = self._setup
        if setup is None:
            yield
            return
        setup.checks_drafts = True
        try:
            yield
        finally:
            setup.checks_drafts = False

    # Changes of shape -------------------------------------------------------------------------

    def crop(self, length: int) -> None:
        """Forget the tokens at and after `length`; so is a step that failed behind it."""
        with self._health.keeping(length):
            if self._health.is_torn or len(set(self.lengths)) > 1:
                self._forget_slots()
                for layer in self.layers:
                    layer.drain_writes()  # of units that are forgotten below
            for layer in self.layers:
                if length > 0:
                    layer.crop(length)
                else:
                    layer.reset()  # another padding may follow
        if self.device_steps is not None:
            self.device_steps.end(self.length)
        if self._setup is not None:
            self._setup.units.forget_from(length // self.plan.group_tokens)
        if set(self.lengths) <= {length}:
            self._health.cropped(length)

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was; of two batches the ledger has the new one alone.

        Raises:
            BudgetError: the new batch does not fit the budget.
            CacheStateError: there is no such row.
        """
        if not self.length:
            return
        if not bool(((rows >= 0) & (rows < self.batch)).all()):
            raise CacheStateError(f"rows {rows.tolist()} of a cache that holds {self.batch}")
        if len(rows) != self.batch:
            self._plan(len(rows), (self.policy, self.plan))  # refuses before anything is given up
        with self._health.keeping(0):
            if len(rows) != self.batch:
                self._change_batch(rows)
            elif not torch.equal(rows, torch.arange(len(rows), device=rows.device)):
                self._take_rows_from(self.layers, rows, self.device_steps)

    def _change_batch(self, rows: Tensor) -> None:
        old, old_setup, old_steps = self.layers, self._setup, self.device_steps
        for layer in old:
            layer.forget_slots()
            layer.drain()
        self._release_memory()
        self.layers = []
        try:
            self._allocate(len(rows), current=(self.policy, self.plan))
            if self._setup is not None and old_setup is not None:
                self._setup.units = old_setup.units
            self._take_rows_from(old, rows, old_steps)
        except BaseException:
            self._health.tear(0)  # of the batch that was nothing is left
            self._give_back()
            raise
        finally:
            close_all(*(layer.close for layer in old))

    def _take_rows_from(self, old: list[Layer], rows: Tensor, steps: DeviceSteps | None) -> None:
        rows = self._rows.of(rows)
        for layer, other in zip(self.layers, old, strict=True):
            layer.take_rows_from(other, rows)
        if self.device_steps is not None and steps is not None:
            self.device_steps.take_rows_from(steps, rows, self.length)
        if self._setup is not None:
            self._setup.units.select_rows(rows.cpu().numpy().astype(np.int64))

    def reset(self) -> None:
        """Forget every token; memory and store stay."""
        self.end_step()
        for layer in self.layers:
            layer.reset()
        self._health.heal()
        if self._setup is not None:
            self._setup.units.forget_from(0)
        self.stats.begin(self.policy.counters)

    # Reports ----------------------------------------------------------------------------------

    def report(self) -> MemoryReport:
        """What is held in fast memory now, item by item."""
        full = self._rows.shape.full_cache_bytes(self.plan.batch, self.settings.max_tokens)
        return self._ledger.report(full)

    def describe_store(self) -> str:
        """Where the full KV lives."""
        if self.settings.device_tier and not self.plan.is_resident:
            return "host memory that the device reads itself"
        return "fast memory" if self._store is None else self._store.describe()

    @property
    def simulated(self) -> str | None:
        """Name of the simulated device, if the store is one."""
        return None if self._store is None else self._store.simulated

    def close(self) -> None:
        """Give everything back; errors of writes that will not be read stay unsaid."""
        with DeferredInterrupts():
            self._health.is_closed = True
            parts = [*self.layers, self._writer, self._store]
            closers = [part.close for part in parts if part is not None]
            steps, self.layers, self.device_steps = self.device_steps, [], None
            if steps is not None:  # which hold the layers, and know what was not asked for yet
                closers.insert(0, partial(steps.count_into, self.stats.decode))
            close_all(*closers, self._release_memory)
            self._setup = None
