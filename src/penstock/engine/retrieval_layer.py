"""RetrievalLayer: a layer that decodes over selected units, fetched ahead of time."""

import time
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.closing import close_all
from penstock.core.selection import Selection
from penstock.engine.attended import Observer, attended_tokens, slot_weights
from penstock.engine.attention_call import AttentionCall, AttentionSum, require_finite
from penstock.engine.compact_pool import CompactPool
from penstock.engine.fetch_plan import FetchPlan, plan_fetch
from penstock.engine.fused_fetch import Fetch, FusedFetch
from penstock.engine.index_fit import IndexFit, sample_units
from penstock.engine.key_index import KeyIndex
from penstock.engine.layer import Layer
from penstock.engine.layer_cache import LayerCache, LayerSetup
from penstock.engine.policy import SelectionPolicy
from penstock.engine.slot_transfer import PendingRead, PoolMemory
from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.slot_table import SlotTable
from penstock.engine.tiers.token_pool import CodedPool
from penstock.kernels.decode_attention import (
    coded_attention,
    coded_blocks,
    decode_attention,
)
from penstock.kernels.plain_attention import NEGATIVE_INFINITY


class RetrievalLayer(LayerCache):
    """Decodes one token at a time over slots, sinks and window; all else is exact streaming.

    A step is `begin` (score, select, plan, submit; usually from the layer before) and `attend`
    (wait, one softmax over the pool). Between the two the slots belong to the fetch.
    """

    may_fuse: ClassVar[bool] = True
    """Whether a fetch is what `read_missing` and `update_replacement` do here, and no more."""

    def __init__(
        self,
        layer_idx: int,
        setup: LayerSetup,
        pool_memory: PoolMemory,
        policy: SelectionPolicy,
        index: KeyIndex,
        compact: CompactPool | None,
    ) -> None:
        super().__init__(layer_idx, setup, pool_memory)
        plan = setup.plan
        self.policy, self.index = policy, index
        self._shares_slots = plan.shares(layer_idx)
        self.table = SlotTable(plan.batch, plan.num_slots, plan.max_units)
        self.slot_pool = self.pool
        """What the table's slots are of."""
        self.replacement = policy.make_replacement(plan.batch, plan.num_slots)
        self._compact = compact
        self._may_use_kernel = compact is None and setup.shape.is_even
        self._set_first_units(np.full(plan.batch, plan.sink_slots, dtype=np.int64))
        self._fetch: Fetch | None = None
        factor = policy.resident_factor(plan.selected_units) if policy.selects_best else 1.0
        self._resident_factor = factor
        self._fused = FusedFetch(policy, self.transfer, self.pool.slots_per_row, factor)
        self._slots_full = False
        self._visible: Tensor | None = None
        self._fit = IndexFit()
        self.observer: Observer | None = None
        """Called with what each decode step attends to (audits)."""

    def _set_first_units(self, first_unit: NDArray[np.int64]) -> None:
        """Say which unit of each row is the first that may be selected."""
        self._first_unit = first_unit
        self._lowest_unit = int(first_unit.min())
        self._starts_alike = self._lowest_unit == first_unit.max()

    # Fetching ---------------------------------------------------------------------------------

    @property
    def fetch_begun(self) -> bool:
        """Whether this step's fetch is on its way."""
        return self._fetch is not None

    @override
    def can_begin(self, policy: SelectionPolicy) -> bool:
        return policy.predicts and not self.fetch_begun and self.length > 0

    @override
    def begin(self, query: Tensor) -> None:
        """Select for the next decode step and submit what is missing.

        Args:
            query: true or predicted, post-RoPE. [batch, num_heads, head_dim]
        """
        self.make_index(query)
        start = time.perf_counter()
        end_unit = self.window.first_window_unit(self.length + 1)
        if self.index.ready:
            self.index.begin_step(query, self._first_unit, self.length)
        if end_unit <= self._lowest_unit or self._all_resident(end_unit):
            return
        setup = self.setup
        if self._shares_slots and not self.has_prefetched:
            # The slots hold another layer's units.
            self._clear_table()
        self._fetch = self._fetch_fused(query, end_unit) or self._fetch_in_steps(query, end_unit)
        plan = self._fetch.plan
        wanted, hit = plan.num_wanted - plan.num_reused, plan.num_hit - plan.num_reused
        setup.phase.units_wanted += wanted
        setup.phase.units_hit += hit
        setup.phase.units_reused += plan.num_reused
        end = time.perf_counter()
        setup.phase.predict_s += end - start
        if setup.tracer is not None:
            setup.tracer.add(
                "select", "select", int(start * 1e9), int(end * 1e9), layer=self.layer_idx,
                wanted=wanted, hit=hit,
            )  # fmt: skip

    def _fetch_fused(self, query: Tensor, end_unit: int) -> Fetch | None:
        if not self.may_fuse or not self._starts_alike:
            return None
        return self._fused.begin(
            self.index, self.table, self.replacement, self.setup.units.table, query,
            (self._lowest_unit, end_unit), self.setup.plan.selected_units, self.read_missing,
        )  # fmt: skip

    def _fetch_in_steps(self, query: Tensor, end_unit: int) -> Fetch:
        asked = (self.index, query, self._first_unit, end_unit, self.setup.plan.selected_units)
        if self._resident_factor != 1:
            selection = self.policy.select_keeping(
                *asked, self.table.slot_of, self._resident_factor
            )
        else:
            selection = self.policy.select(*asked)
        self.update_replacement()
        plan = plan_fetch(selection, self.table, self.replacement)
        return Fetch(selection, plan, self.read_missing(plan) if len(plan.rows) else None)

    @property
    def has_prefetched(self) -> bool:
        """Whether what the table says is on its way into slots that are shared."""
        return False

    def slots_landed(self) -> None:
        """The slots are as this step wants them; another pool's may be filled meanwhile."""

    def update_replacement(self) -> None:
        """Tell the replacement policy what the slots hold, where it wants to know."""

    def read_missing(self, plan: FetchPlan) -> PendingRead:
        """Submit the reads of what a selection misses; what one transfer cannot bring with the rest
        has landed then."""
        table = self.setup.units.table
        self.transfer.drain()
        units, slots = table[plan.rows, plan.units], plan.slots
        if len(table) > 1:
            slots = plan.rows * self.pool.slots_per_row + slots
        most = self.transfer.max_units
        while most is not None and len(units) > most:
            self._land(self.transfer.read(units[:most], slots[:most]))
            units, slots = units[most:], slots[most:]
        return self.transfer.read(units, slots)

    def _all_resident(self, end_unit: int) -> bool:
        first = self._lowest_unit
        plan = self.setup.plan
        if self._shares_slots or plan.compact or plan.num_slots < end_unit - first:
            return False
        return bool((self.table.slot_of[:, first:end_unit] >= 0).all())

    def _finish_fetch(self) -> tuple[Selection, FetchPlan] | None:
        if self._fetch is None:
            return None
        (selection, plan, pending), self._fetch = self._fetch, None
        if pending is not None:
            self._land(pending)
            self._show(plan)
            keys = self.index.rebuild_keys(plan.rows, plan.units)
            if keys is not None:
                self.pool.write_keys(plan.rows, plan.slots, keys)
        return selection, plan

    def _show(self, plan: FetchPlan) -> None:
        """Make the landed slots visible, padding excepted."""
        if self._slots_full and self._visible is None:
            return
        if self._visible is None:
            self.slot_pool.show_slots(plan.rows, plan.slots)
            self._slots_full = bool((self.table.unit_in >= 0).all())
            return
        device = self.slot_pool.mask.device
        rows = torch.from_numpy(plan.rows).to(device)
        slots = torch.from_numpy(plan.slots).to(device)
        group_tokens = self.setup.plan.group_tokens
        first = torch.from_numpy(plan.units).to(device) * group_tokens
        positions = first[:, None] + torch.arange(group_tokens, device=device)
        positions = positions.clamp(max=self._visible.shape[1] - 1)
        shown = self._visible.to(device)[rows[:, None], positions]
        mask = torch.zeros(shown.shape, dtype=self.slot_pool.mask.dtype, device=device)
        self.slot_pool.slot_mask[rows, slots] = mask.masked_fill_(~shown, NEGATIVE_INFINITY)

    # Attention --------------------------------------------------------------------------------

    @override
    def attend(self, call: AttentionCall) -> Tensor:
        """One new token decodes over the selection."""
        if call.query.shape[2] != 1 or self.length == 0:
            self.drop_fetch()
            self._fit.check(self.index, self.length + call.query.shape[2], decoding=False)
            self._fit.keep(self.index, call.query)
            return self.attend_exactly(call)
        if self._fetch is None:
            self.begin(call.query[:, :, 0])
        self.append(call.keys, call.values, call.visible)
        fetched = self._finish_fetch()
        self.slots_landed()
        self.show_kept()
        out = self.see_step(call, fetched)
        if self.observer is not None:
            self.observer(self.layer_idx, self._attended(fetched))
        if out is not None:
            return out
        if fetched is not None and self.index.observes:
            selection, plan = fetched
            self.index.observe(selection, slot_weights(self.pool, call, plan.selected_slots))
        return self.attend_to_pool(call, fetched)

    def attend_to_pool(
        self, call: AttentionCall, fetched: tuple[Selection, FetchPlan] | None
    ) -> Tensor:
        """A decode step's attention, when its units are in their slots.

        Args:
            fetched: those; None where nothing was selected.

        Returns:
            [batch, 1, num_heads, value_width]
        """
        shown = self.attended_mask(None if fetched is None else fetched[1])
        if isinstance(self.pool, CodedPool):
            return self._attend_to_codes(call, self.pool, shown)
        if self._may_use_kernel and call.sink_logits is None and call.softcap is None:
            out = decode_attention(
                call.query, self.pool.tokens, shown, call.scaling, self.index.lse
            )
            return out.to(call.query.dtype).transpose(1, 2)
        keys, values, mask = self.pool.keys, self.pool.values, shown
        if self._compact is not None and fetched is not None:
            keys, values, mask = self._compact.gather(self.pool, fetched[1].selected_slots)
        total = AttentionSum(call)
        total.add(keys, values, mask)
        if self.index.lse is not None:
            self.index.lse.copy_(total.lse[:, :, 0])
        return total.result()

    def _attend_to_codes(self, call: AttentionCall, pool: CodedPool, shown: Tensor) -> Tensor:
        if call.sink_logits is None and call.softcap is None:
            out = coded_attention(
                call.query, pool.codes, self.window.tokens, shown, call.scaling, self.index.lse
            )
            return out.to(call.query.dtype).transpose(1, 2)
        total, shape = AttentionSum(call), self.setup.shape
        size = (shape.num_kv_heads, shape.head_dim)
        for block in coded_blocks(pool.codes, shown, size, shape.dtype):
            total.add(*block)
        keys, values = self.window.keys.transpose(1, 2), self.window.values.transpose(1, 2)
        total.add(keys, values, shown[:, pool.slot_places :])
        if self.index.lse is not None:
            self.index.lse.copy_(total.lse[:, :, 0])
        return total.result()

    def show_kept(self) -> None:
        """Put sinks and window behind the slots, where another layer's were before."""
        if self._shares_slots:
            self.pool.show_kept(self.window.tokens, self.window.mask)

    def see_step(
        self, call: AttentionCall, fetched: tuple[Selection, FetchPlan] | None
    ) -> Tensor | None:
        """Look at what a step is about to attend to; most methods do not.

        Args:
            fetched: its units, which are in their slots; None where nothing was selected.

        Returns:
            What the layer says instead, [batch, 1, num_heads, value_width]; None: attend.
        """
        return None

    @property
    def gathers(self) -> bool:
        """Whether a step attends to what it selected alone, and not to all that slots hold."""
        return self._compact is not None

    def attended_mask(self, plan: FetchPlan | None) -> Tensor:
        """What of the pool a step attends to, additive; plan: None where nothing was selected.

        Returns:
            [rows, places]
        """
        return self.pool.mask

    def _attended(self, fetched: tuple[Selection, FetchPlan] | None) -> Tensor:
        """True for each token that this step sees. bool [rows, length]"""
        gathered = None
        if self.gathers and fetched is not None:
            gathered = fetched[1].selected_slots
        plan = self.setup.plan
        start_units = self._first_unit - plan.sink_slots
        return attended_tokens(self.pool, self.table, plan, start_units, self.length, gathered)

    # The index --------------------------------------------------------------------------------

    @override
    def append(self, keys: Tensor, values: Tensor, visible: Tensor | None) -> None:
        """Remembers padding for the slots."""
        self._visible = visible
        super().append(keys, values, visible)

    @override
    def _set_start_units(self, start_unit: Tensor) -> None:
        super()._set_start_units(start_unit)
        first = start_unit.cpu().numpy()
        self.index.see_start(first)
        self._set_first_units(first + self.setup.plan.sink_slots)

    @override
    def on_closed(self, keys: Tensor, first_unit: int) -> None:
        require_finite(keys, self.layer_idx)
        if self.index.ready:
            self.index.append(keys, first_unit * self.setup.plan.group_tokens)

    @override
    def make_index(self, query: Tensor | None = None) -> None:
        """Make the index from the prompt's own keys when there is none, and count the time.

        Args:
            query: the first decode query, where one is known; for indexes that want queries of the
                prompt and have seen none. [batch, num_heads, head_dim]
        """
        self._fit.check(self.index, self.length, decoding=True)
        if self.index.ready:
            return
        start = time.perf_counter()
        self.setup.indexing.report(self.layer_idx, 0.0)
        if not self._fit.make(self.index, query, self.ensure_index):
            return
        self.setup.indexing.report(self.layer_idx, 1.0)
        self.setup.phase.index_s += time.perf_counter() - start

    def ensure_index(self) -> bool:
        """Make the basis from the prompt's own keys, then index what closed.

        Returns:
            Whether there was anything to index.
        """
        closed = self.length // self.setup.plan.group_tokens
        if closed == 0:
            return False
        self.drain()
        sequences = self.setup.plan.batch // self.setup.rows_per_sequence
        units = sample_units(closed, sequences, self.setup.plan.group_tokens)
        self.forget_slots()
        size = self._halves.units
        sample = [self._read_keys(units[i : i + size]) for i in range(0, len(units), size)]
        self._fit.hand_queries(self.index)
        group_tokens = self.setup.plan.group_tokens
        positions = (units[:, None] * group_tokens + np.arange(group_tokens)).reshape(-1)
        self.index.fit(torch.cat(sample, dim=1), torch.from_numpy(positions))
        self._fit.tokens = closed * group_tokens
        if self.index.looks_first:
            with self._reading(0, closed) as blocks:
                for first, tokens in blocks:
                    self.index.look(self._checked_keys(tokens), first)
        self._index_units(0, closed)
        return True

    def _index_units(self, first_unit: int, end_unit: int) -> None:
        """Take the keys of units that are on disk into the index."""
        self.forget_slots()
        with self._reading(first_unit, end_unit) as blocks:
            for first, tokens in blocks:
                self.index.append(self._checked_keys(tokens), first)

    def _read_keys(self, units: NDArray[np.int64]) -> Tensor:
        """Keys of some units of every row. [batch, tokens, kv_heads, head_dim]"""
        read = self._read_block(self.setup.units.table[:, units], 0)
        self._land(read)
        return self._checked_keys(self._halves.tokens(0, len(units)))

    def _checked_keys(self, tokens: Tensor) -> Tensor:
        """Keys of a block, which are there on their own. [batch, tokens, kv_heads, head_dim]"""
        keys = self.setup.shape.keys_of(tokens).clone()
        require_finite(keys, self.layer_idx)
        return keys

    @override
    def restore(self, length: int, state: Mapping[str, Tensor] | None = None) -> None:
        """The index is as it was, or made from the keys.

        Args:
            state: what `KeyIndex.state` gave where the tokens were taken in.

        Raises:
            FetchError: a read failed.
            ConfigError: the state is another index's.
        """
        first = self.length // self.setup.plan.group_tokens
        super().restore(length)
        if state is not None:
            self.index.load_state(state, length // self.setup.plan.group_tokens)
        elif self.index.ready:
            self._index_units(first, length // self.setup.plan.group_tokens)

    @override
    def index_state(self) -> dict[str, Tensor] | None:
        """What `restore` goes on from; the index is made first where there is none."""
        self.make_index()
        return self.index.state(self.length // self.setup.plan.group_tokens)

    # Changes of shape -------------------------------------------------------------------------

    @property
    @override
    def keeps_slots(self) -> bool:
        """Slots of its own, in the order that they are filled in, hold whole units of the past."""
        setup, alone = self.setup, type(self) is RetrievalLayer
        own = not self._shares_slots and type(self.replacement) is FIFO
        return setup.checks_drafts and alone and own

    @override
    def forget_units(self, first: int) -> None:
        self.drop_fetch()
        if not self.keeps_slots:
            self.forget_slots()
            return
        rows, slots = np.nonzero(self.table.unit_in >= first)
        if len(rows):
            self.table.evict(rows, slots)
            self._slots_full = False
            device = self.pool.mask.device
            at = torch.from_numpy(rows).to(device), torch.from_numpy(slots).to(device)
            self.pool.slot_mask[at] = NEGATIVE_INFINITY

    @override
    def forget_slots(self) -> None:
        self.drop_fetch()
        self._clear_table()
        super().forget_slots()

    def _clear_table(self) -> None:
        self.table.clear()
        self._slots_full = False
        if self._shares_slots:
            self.pool.hide_slots()

    @override
    def drop_fetch(self) -> None:
        """Give up a fetch that will not be attended to."""
        if self._fetch is not None:
            pending = self._fetch[2]
            self._fetch = None
            self._clear_table()
            self.pool.hide_slots()
            if pending is not None:
                pending.drop()

    @override
    def take_rows_from(self, other: Layer, rows: Tensor) -> None:
        """Slots move along when the layer is the same."""
        assert isinstance(other, RetrievalLayer)
        other.drop_fetch()
        super().take_rows_from(other, rows)
        self.index.take_rows_from(other.index, rows)
        rows_np: NDArray[np.int64] = rows.cpu().numpy()
        self._set_first_units(other._first_unit[rows_np])
        self._visible = None if other._visible is None else other._visible[rows]
        self._fit.take_rows_from(other._fit, rows)
        if other is self and (self.slot_pool is not self.pool or not self._shares_slots):
            self.slot_pool.take_rows(rows.to(self.slot_pool.memory.device))
            self.table = self.table.copy_rows(rows_np)
            self.replacement = self.replacement.copy_rows(rows_np)

    @override
    def crop(self, length: int) -> None:
        """A row that has only padding left begins with what comes next."""
        super().crop(length)
        self._fit.crop(length)
        first = self._first_unit - self.setup.plan.sink_slots
        end = length // self.setup.plan.group_tokens
        if first.max() > end:
            self._set_start_units(torch.from_numpy(first.clip(max=end)).to(self.setup.device))

    @override
    def reset(self) -> None:
        self.drop_fetch()
        super().reset()
        self._fit.reset()
        self.index.forget_fit()
        self._visible = None
        self.index.see_start(np.zeros_like(self._first_unit))
        self._set_first_units(np.full_like(self._first_unit, self.setup.plan.sink_slots))

    @override
    def close(self) -> None:
        close_all(self.drop_fetch, self.index.close)
