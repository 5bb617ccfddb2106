"""NearLayer: a layer with a hot and a cold pool, evaluated while the layer before computes."""

import contextlib
import math
import time
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.closing import close_all
from penstock.core.errors import FetchError, PenstockError, StorageError
from penstock.core.selection import Selection
from penstock.engine.attention_call import AttentionCall
from penstock.engine.fetch_plan import FetchPlan, plan_fetch
from penstock.engine.fused_fetch import Fetch
from penstock.engine.key_index import KeyIndex
from penstock.engine.layer import Layer
from penstock.engine.layer_cache import LayerSetup
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.engine.slot_transfer import PendingRead, PoolMemory
from penstock.engine.tiers.slot_table import ABSENT
from penstock.kernels.plain_attention import NEGATIVE_INFINITY
from penstock.kernels.top_units import top_units
from penstock.methods.hillinfer.index import NearIndex, Places
from penstock.methods.hillinfer.near_work import NearWork

if TYPE_CHECKING:
    from penstock.methods.hillinfer.policy import HillInfer

_NONE = np.zeros(0, dtype=np.int64)


class LeavingTokens(NamedTuple):
    """Tokens that leave the window with the step under way, and the rows that have them."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]


class NearLayer(RetrievalLayer):
    """A `RetrievalLayer` whose slots are HillInfer's hot pool.

    `begin` hands the step to the worker of the cache and returns: scoring on both sides, choosing,
    promotions, demotions and the reads all happen there, while the layer before computes. A token
    that leaves the window goes straight to a slot, so that the newest alpha * N are hot without
    ever being read back.

    Source: HillInfer, sections 4.2 (BKP) and 4.3 (APP).

    Differences: promotion and demotion are part of the step that finds a cold token important
    (which needs it in memory anyway), not a pass of their own after it; the hot pool is filled at
    the first step, by that step's scores.
    """

    def __init__(
        self, layer_idx: int, setup: LayerSetup, pool_memory: PoolMemory, policy: "HillInfer",
        index: KeyIndex, work: NearWork,
    ) -> None:  # fmt: skip
        super().__init__(layer_idx, setup, pool_memory, policy, index, None)
        assert isinstance(index.unwrapped, NearIndex)
        self.near = index.unwrapped
        """The index, without what a benchmark may have laid over it."""
        self._hill, self._work = policy, work
        self.pools = policy.make_pools(setup.plan.batch, setup.plan.max_units)
        """Who is hot because of what."""
        self.replacement = self.pools
        self.slot_transfer = self.transfer
        """Brings units into the table's slots."""
        self._attach()
        self._begun: Future[None] | None = None
        self._left: int | None = None
        self._remap = False

    # A step -----------------------------------------------------------------------------------

    @property
    @override
    def fetch_begun(self) -> bool:
        return self._begun is not None or super().fetch_begun

    @override
    def begin(self, query: Tensor) -> None:
        """Returns at once."""
        end_unit = self.window.first_window_unit(self.length + 1)
        if end_unit > self._lowest_unit:
            job = partial(self._evaluate, query, end_unit)
            self._begun = self._work.run(job, query.device)

    @override
    def attend(self, call: AttentionCall) -> Tensor:
        if call.query.shape[2] == 1 and self.length > 0:
            if not self.fetch_begun:
                self.begin(call.query[:, :, 0])
            start = time.perf_counter()
            self._settle()
            self.setup.phase.stall_s += time.perf_counter() - start
        return super().attend(call)

    def _settle(self) -> None:
        """Wait for the evaluation under way. Raises what it raised."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def _evaluate(self, query: Tensor, end_unit: int) -> None:
        """Score, choose, move between the pools, submit the reads (on the worker's thread)."""
        start = time.perf_counter()
        if self._remap:
            self._map_anew()
        leaving = self._leaving(end_unit)
        self.near.leaving = leaving
        self.index.begin_step(query, self._first_unit, self.length)
        wanted = self._hill.wanted_tokens(self.length, self.setup.plan.selected_units)
        selection = self.policy.select(self.index, query, self._first_unit, end_unit, wanted)
        self.pools.note_selected(selection.unit_ids, selection.valid)
        hot = _count(self.table.slot_of, selection) + len(leaving.rows)
        admitted = self._admitted(selection, leaving, end_unit)
        plan, pending = self._move(admitted, leaving, end_unit)
        where = (np.arange(len(selection.unit_ids))[:, None], selection.unit_ids)
        slots: NDArray[np.int64] = self.table.slot_of[where].astype(np.int64)
        if selection.valid is not None:
            slots[~selection.valid] = ABSENT
        asked = selection.unit_ids.size if selection.valid is None else int(selection.valid.sum())
        phase = self.setup.stats.decode
        phase.units_wanted += asked
        phase.units_hit += hot
        phase.predict_s += time.perf_counter() - start
        self._note_rates(asked, hot)
        self._fetch = Fetch(selection, replace(plan, selected_slots=slots), pending)

    def _note_rates(self, asked: int, hot: int) -> None:
        measured = self.near.measured
        if measured is not None:
            self._work.note(
                measured, rows=self.setup.plan.batch, selected=asked, selected_hot=min(hot, asked),
                alpha=min(1.0, asked / max(1, measured.hot_tokens + measured.cold_tokens)),
                link=self._work.scorer.link_rate(), host_link=self._host_link_rate(),
            )  # fmt: skip

    def _host_link_rate(self) -> float:
        """Tokens per second from the hot pool to where attention runs; infinite where they are."""
        return math.inf

    def _leaving(self, end_unit: int) -> LeavingTokens:
        """Tokens before `end_unit` that only the window holds, where that is known."""
        first, self._left = self._left, end_unit
        if first is None or first >= end_unit or end_unit - first >= self.setup.plan.window_slots:
            return LeavingTokens(_NONE, _NONE)
        tokens = np.arange(first, end_unit)
        rows, columns = (tokens >= self._first_unit[:, None]).nonzero()
        return LeavingTokens(rows, tokens[columns])

    def _admitted(self, selection: Selection, leaving: LeavingTokens, end_unit: int) -> Selection:
        """What shall be hot: the selection, what leaves the window, and all that fits at first."""
        if not (self.table.unit_in != ABSENT).any():
            return self._first_fill(selection, end_unit)
        if not len(leaving.rows):
            return selection
        taken = np.zeros(self.near.scores.shape, dtype=np.bool_)
        valid = selection.valid
        if valid is None:
            valid = np.ones(selection.unit_ids.shape, dtype=np.bool_)
        rows, columns = valid.nonzero()
        taken[rows, selection.unit_ids[rows, columns]] = True
        if taken[leaving].all():
            return selection
        rest = ~taken[leaving]
        tokens = np.unique(leaving.tokens[rest])
        if valid.shape[1] + len(tokens) > self.table.num_slots:
            most = self.setup.plan.max_units  # no room beside the selection: they are cold
            self.near.moved(_NONE, leaving.rows[rest] * most + leaving.tokens[rest])
            return selection
        extra = np.zeros((len(valid), len(tokens)), dtype=np.bool_)
        extra[leaving.rows[rest], np.searchsorted(tokens, leaving.tokens[rest])] = True
        ids = np.broadcast_to(tokens, extra.shape)
        return Selection(
            np.concatenate([selection.unit_ids, ids], axis=1),
            np.concatenate([valid, extra], axis=1),
        )

    def _first_fill(self, selection: Selection, end_unit: int) -> Selection:
        """The newest tokens, the selection, and the best of the rest, as many as may be hot."""
        scores = self.near.scores[:, :end_unit].copy()
        scores[:, max(0, end_unit - self._pinned_tokens) :] = np.float32(3e38)
        rows = np.arange(len(scores))[:, None]
        scores[rows, selection.unit_ids] = np.inf
        columns = np.arange(end_unit)
        scores[columns < self._first_unit[:, None]] = -np.inf
        count = max(self._work.capacity, selection.unit_ids.shape[1])
        count = min(count, self.table.num_slots)
        ids = top_units(torch.from_numpy(scores), self._lowest_unit, count)
        valid = ids >= self._first_unit[:, None]
        return Selection(ids, None if valid.all() else valid)

    @property
    def _pinned_tokens(self) -> int:
        """The newest tokens that stay hot (section 4.2: alpha * N)."""
        most = self._hill.wanted_tokens(self.length, self.setup.plan.selected_units)
        return min(most, self.table.num_slots // 2)

    # The pools --------------------------------------------------------------------------------

    def _move(
        self, admitted: Selection, leaving: LeavingTokens, end_unit: int
    ) -> tuple[FetchPlan, PendingRead | None]:
        """Promote what is missing of `admitted`, demote as much, and submit the reads."""
        self.pools.observe(
            self.table.unit_in, self.near.scores[:, :end_unit], end_unit, self._pinned_tokens,
            self._work.capacity,
        )  # fmt: skip
        demoted = self._shed(admitted)
        before = self.table.unit_in.copy()
        plan = plan_fetch(admitted, self.table, self.pools)
        tokens = self.setup.plan.max_units
        old = before[plan.rows, plan.slots].astype(np.int64)
        gone = old != ABSENT
        demoted = np.concatenate([demoted, plan.rows[gone] * tokens + old[gone]])
        self.near.moved(plan.rows * tokens + plan.units, demoted)
        phase = self.setup.stats.decode
        phase.count("units_promoted", len(plan.rows))
        phase.count("units_demoted", len(demoted))
        here = np.zeros(len(plan.rows), dtype=np.bool_)
        if len(leaving.rows):
            leaving_ids = leaving.rows * tokens + leaving.tokens
            here = np.isin(plan.rows * tokens + plan.units, leaving_ids)
            self._copy_from_window(plan, here)
        cold = ~here
        units = self.setup.units.table[plan.rows[cold], plan.units[cold]]
        slots = plan.rows[cold] * self.slot_pool.slots_per_row + plan.slots[cold]
        return plan, self._read(units, slots)

    def _read(self, units: NDArray[np.int64], slots: NDArray[np.int64]) -> PendingRead | None:
        """Submit reads; of more than one transfer holds (the first fill) all but the last land."""
        if not len(units):
            return None
        self.transfer.drain()
        read, size = self.slot_transfer.read, self.slot_transfer.max_units or len(units)
        last = (len(units) - 1) // size * size
        for first in range(0, last, size):
            self._land(read(units[first : first + size], slots[first : first + size]))
        return read(units[last:], slots[last:])

    def _shed(self, admitted: Selection) -> NDArray[np.int64]:
        """Demote what is above the hot pool's size, where that has scaled_down."""
        found = self.table.look_up(admitted.unit_ids, admitted.valid)
        rows, slots = self.pools.surplus(found.pinned, found.counts)
        if not len(rows):
            return _NONE
        tokens = self.table.unit_in[rows, slots].astype(np.int64)
        self.table.slot_of[rows, tokens] = ABSENT
        self.table.unit_in[rows, slots] = ABSENT
        mask = self.slot_pool.slot_mask
        mask[torch.from_numpy(rows), torch.from_numpy(slots)] = NEGATIVE_INFINITY
        self._slots_full = False
        return rows * self.setup.plan.max_units + tokens

    def _copy_from_window(self, plan: FetchPlan, here: NDArray[np.bool_]) -> None:
        """Copy tokens that leave the window into their slots."""
        rows = torch.from_numpy(plan.rows[here])
        places = self.window.window_places(torch.from_numpy(plan.units[here]))
        slots = torch.from_numpy(plan.slots[here])
        tokens = self.slot_pool.tokens
        tokens[rows, slots] = self.window.tokens[rows, places].to(tokens.device)

    @override
    def _finish_fetch(self) -> tuple[Selection, FetchPlan] | None:
        begun = self._fetch
        fetched = super()._finish_fetch()
        if begun is not None and begun[2] is None and len(begun[1].rows):
            self._show(begun[1])  # nothing was read, but tokens came out of the window
        return fetched

    # Attention --------------------------------------------------------------------------------

    @property
    @override
    def gathers(self) -> bool:
        return self._hill.attend == "selected"

    @override
    def attended_mask(self, plan: FetchPlan | None) -> Tensor:
        """The selection, sinks and window."""
        if plan is None or not self.gathers:
            return self.pool.mask
        mask = self.pool.mask.clone()
        mask[:, : self.pool.slot_places] = NEGATIVE_INFINITY
        rows, columns = (plan.selected_slots != ABSENT).nonzero()
        where = (torch.from_numpy(rows), torch.from_numpy(plan.selected_slots[rows, columns]))
        mask[where] = self.pool.mask[where]
        return mask

    # Changes of shape -------------------------------------------------------------------------

    def _attach(self) -> None:
        self.near.attach(Places(
            self._work.scorer, self.layer_idx, self.slot_pool, self.table,
            lambda: self.setup.units.table,
            self.window if self.slot_pool is not self.pool else None,
        ))  # fmt: skip

    def _map_anew(self) -> None:
        """Give the codes of all keys to a scorer that has never seen them."""
        self._remap = False
        scorer = self._work.scorer
        if not scorer.wants_keys:
            return  # said with the next request
        for first, end in self._blocks(0, self.length):
            self.near.append(self._read_keys(np.arange(first, end)), first)

    @override
    def forget_slots(self) -> None:
        super().forget_slots()
        self._left = None

    @override
    def _clear_table(self) -> None:
        super()._clear_table()
        self.near.slots_forgotten()
        self._left = None

    @override
    def drop_fetch(self) -> None:
        """An evaluation under way ends first; the next `drain` raises what its writes raised."""
        try:
            self._settle()
        except FetchError:
            pass  # of this fetch alone
        except StorageError as error:
            self.transfer.fail_next_drain(error)
        except PenstockError:
            pass
        super().drop_fetch()

    @override
    def crop(self, length: int) -> None:
        shrinks = length < max(self.length, self._touched)
        super().crop(length)
        if shrinks:
            self.near.forget_from(length)
            self.pools.forget_from(length)

    @override
    def take_rows_from(self, other: Layer, rows: Tensor) -> None:
        """The scorer learns of it with the next step."""
        super().take_rows_from(other, rows)
        self._attach()
        self.pools = self.replacement  # type: ignore[assignment]
        self._left, self._remap = None, other is not self

    @override
    def reset(self) -> None:
        super().reset()
        self.near.forget_from(0)
        self.pools.clear()

    def _settle_quietly(self) -> None:
        with contextlib.suppress(PenstockError, CancelledError):  # of a step that was given up
            self._settle()

    @override
    def close(self) -> None:
        close_all(self._settle_quietly, self._work.close, super().close)


def _count(slot_of: NDArray[np.int32], selection: Selection) -> int:
    """Selected tokens that are in slots."""
    slots = slot_of[np.arange(len(selection.unit_ids))[:, None], selection.unit_ids]
    held = slots != ABSENT
    if selection.valid is not None:
        held &= selection.valid
    return int(held.sum())
