"""DeviceLayer: a layer whose decode step is a fixed row of launches on the device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.errors import PromptError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.core.stats import PhaseStats
from penstock.engine.attended import Observer
from penstock.engine.attention_call import (
    AttentionCall,
    AttentionSum,
    additive_mask,
    first_visible,
    require_finite,
)
from penstock.engine.device_tier.attend_pool import attend_pool
from penstock.engine.device_tier.device_index import DeviceIndex, StepClock, Wanted
from penstock.engine.device_tier.device_pool import DevicePool
from penstock.engine.device_tier.host_memory import HostMemory
from penstock.engine.device_tier.streams import on_link
from penstock.engine.device_tier.workspace import Workspace
from penstock.engine.index_fit import IndexFit, sample_units
from penstock.engine.layer import Layer
from penstock.engine.policy import SelectionPolicy
from penstock.engine.tiers.rolling_window import RollingWindow
from penstock.engine.tiers.token_pool import CodedPool, copy_rows
from penstock.kernels.attention import keeps_no_logits
from penstock.kernels.device.append import append_token, store_tokens
from penstock.kernels.device.slots import gather_units, plan_slots
from penstock.kernels.plain_attention import NEGATIVE_INFINITY

STAYING_GATHER = True
"""Whether what is fetched one layer ahead is gathered by a few programs that stay (the same bytes);
false for ablations."""


@dataclass(kw_only=True, slots=True)
class DeviceSetup:
    """What all layers of one cache share."""

    shape: KVShape
    """Of a row."""
    plan: SlotPlan
    device: torch.device
    clock: StepClock
    workspace: Workspace


class DeviceLayer(Layer):
    """One layer's KV in host memory, a pool of slots and a window on the device, and an index.

    A decode step selects, lists what is missing, gathers it straight from host memory, writes the
    new token to the window and to host memory, and attends to the whole pool. No step waits for the
    device or depends on a number that only the host knows, so that a CUDA graph can hold it.
    Everything else (prompts, exact mode) streams the past block by block.

    Source: LouisKV, section 4 (its GPU-CPU engine); the other methods have the same engine here.
    """

    reads_back: ClassVar[bool] = False

    def __init__(
        self, layer_idx: int, setup: DeviceSetup, index: DeviceIndex | None, pool: DevicePool
    ) -> None:
        """Allocate the layer.

        Args:
            index: None for methods that attend to everything.
            pool: one that other layers use too, where the plan says so.
        """
        plan, shape, device = setup.plan, setup.shape, setup.device
        self.layer_idx, self.setup, self.index = layer_idx, setup, index
        self.length = self._touched = 0
        self.host = HostMemory(plan, shape, device)
        self._slots, self._shares_slots = pool, plan.shared_pools
        self.pool = self._slots.tokens
        self.unit_in, self.slot_of = self._slots.unit_in, self._slots.slot_of
        mask = self.pool.mask[:, self.pool.slot_places :]
        if plan.keeps_apart:
            size = (plan.batch, plan.kept_slots * plan.group_tokens, *shape.token_size)
            tokens = torch.zeros(size, dtype=shape.dtype, device=device)
        else:
            tokens = self.pool.kept_tokens()
        if self._shares_slots:  # between steps another layer's are there
            mask = torch.full_like(mask, NEGATIVE_INFINITY)
        elif index is not None:
            index.see_slots(self.slot_of)
        self.window = RollingWindow(
            tokens, mask, group_tokens=plan.group_tokens, sink_slots=plan.sink_slots,
            window_slots=plan.window_slots,
        )  # fmt: skip
        traffic = torch.zeros_like(self._slots.lists.traffic)
        self.lists = replace(self._slots.lists, traffic=traffic)
        self._may_step = self._emptied = self._in_flight = False
        self._window_is_old = False
        """Whether tokens have come that the window has not."""
        self._times_lent = 0
        self._begun: Tensor | None = None
        self._landed: torch.cuda.Event | None = None
        self._written: torch.cuda.Event | None = None
        """Behind which host memory has all tokens of passes."""
        if device.type == "cuda":
            made: Any = torch.cuda
            self._landed, self._written = made.Event(), made.Event()
        self._fit = IndexFit()
        self._counted = torch.zeros(2, dtype=torch.int64)
        self.observer: Observer | None = None
        """Called with what each decode step attends to (audits)."""

    # Attention --------------------------------------------------------------------------------

    @override
    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, and take the new tokens in; one new token decodes over the selection.

        Returns:
            [rows, new_tokens, heads of a row, head_dim]
        """
        if call.query.shape[2] == 1 and self.length > 0 and self.index is not None:
            self.prepare_step()
            return self._step(call, self.index)
        if self.index is not None:
            self._fit.check(self.index, self.length + call.query.shape[2], decoding=False)
            self._fit.keep(self.index, call.query)
        workspace = self.setup.workspace
        if keeps_no_logits(call.query, masked=call.visible is not None, softcap=call.softcap):
            workspace.lend(call.query.shape[2], self._end_unit)
        past = workspace.stream(self.host, self._end_unit, self._written)
        total = AttentionSum(call)
        mask = None
        if call.visible is not None:
            mask = additive_mask(call.visible[:, self.length :], call.query.dtype)
        total.add(call.keys, call.values, mask, causal=call.query.shape[2] > 1)
        self._add_past(total, past, call.visible)
        self.append(call.keys, call.values, call.visible)
        return total.result()

    @override
    def prepare_step(self) -> bool:
        """Make ready for decode steps after a prompt; false if there can be none (no index)."""
        if self.index is None or self.length == 0:
            return False
        if not self.index.ready:
            self._make_index(self.index)
        if not self._may_step:
            self._bring_up_window()
            self.index.begin_decode(self.length, self.setup.clock)
            kept = self.index.kept() if self._emptied else None
            if kept is not None:
                self._list(kept)
                self._gather()
            self._may_step, self._emptied = True, False
        return True

    @property
    def fetch_begun(self) -> bool:
        """Whether the next step's selection is made."""
        return self._begun is not None

    @override
    def can_begin(self, policy: SelectionPolicy) -> bool:
        may = policy.predicts_on_device and self.index is not None
        return may and not self.fetch_begun and self.length > 0

    @property
    @override
    def is_recordable(self) -> bool:
        return self.index is not None

    @override
    def begin(self, query: Tensor) -> None:
        """Select and fetch for the next decode step, with a query that is there before its layer.

        Queued on the current stream, see `DeviceSteps.choosing`; the step waits for it.

        Args:
            query: [rows, heads of a row, head_dim]
        """
        assert self.index is not None
        self.prepare_step()
        self._select(self.index, query)
        with on_link(self.setup.device):
            self._gather(leaves_room=STAYING_GATHER)
            if self._landed is not None:
                self._landed.record()
        self._begun, self._in_flight = query, True  # kept until the step has waited

    @override
    def land(self) -> None:
        """Queue what follows behind the fetch that was begun; its step does not wait again."""
        if self._landed is not None and self._in_flight:
            self._landed.wait()
        self._in_flight = False

    def _join(self) -> None:
        """The step that a fetch was begun for is there."""
        self.land()
        self._begun = None

    @override
    def forget_recording(self) -> None:
        """What was begun has not run, and there is nothing to wait for."""
        self._begun, self._in_flight = None, False

    @override
    def settle(self) -> None:
        """Between steps, now and then: let the index tidy up, and see more of the text."""
        if self.index is None or self.length == 0:
            return
        self._fit.check(self.index, self.length, decoding=True)
        if not self.index.ready:
            self._make_index(self.index)
        self.index.settle(self.length)

    def _make_index(self, index: DeviceIndex) -> None:
        """Fit the index to the text's own keys, then give it the units that have closed."""
        _wait(self.setup.device)
        group_tokens = self.setup.plan.group_tokens
        closed = self.length // group_tokens
        positions = torch.arange(self.length)  # of less than a unit: the basis is of what there is
        if closed:
            units = torch.from_numpy(sample_units(closed, len(self.unit_in), group_tokens))
            positions = (units[:, None] * group_tokens + torch.arange(group_tokens)).flatten()
        sample = self.host.tokens[:, positions, 0].to(self.setup.device)
        require_finite(sample, self.layer_idx)
        self._fit.hand_queries(index)
        index.fit(sample, positions)
        self._fit.tokens = closed * group_tokens or self.length
        for first, end, tokens in self.setup.workspace.stream(self.host, closed, self._written):
            index.take(tokens[:, : (end - first) * group_tokens, 0], first * group_tokens)

    def _select(self, index: DeviceIndex, query: Tensor) -> None:
        """Choose for a step, and give what is missing slots."""
        if self._shares_slots:
            self._slots.clear()
        self._list(index.select(query, self.setup.clock))

    def _list(self, wanted: Wanted) -> None:
        """Give what is wanted and missing slots."""
        plan_slots(
            wanted.ids, wanted.valid, wanted.due, self.unit_in, self.slot_of, self._slots.heads,
            self.lists,
        )  # fmt: skip

    def _gather(self, *, leaves_room: bool = False) -> None:
        """Bring what is listed, perhaps beside the layer before."""
        gather_units(
            self.host.units, self._slots.units, self.pool.mask, self.setup.clock.start, self.lists,
            self.setup.plan.group_tokens, leaves_room=leaves_room, coded=self._slots.coded,
        )  # fmt: skip

    def _step(self, call: AttentionCall, index: DeviceIndex) -> Tensor:
        plan, clock = self.setup.plan, self.setup.clock
        query, keys, values = call.query[:, :, 0], call.keys[:, :, 0], call.values[:, :, 0]
        self._touched = self.length + 1
        if self._begun is None:
            self._select(index, query)
            self._gather()
        else:
            self._join()
        append_token(
            keys, values, self.host.tokens, self.window.tokens, self.window.mask, clock.position,
            clock.start, sink_places=plan.sink_slots * plan.group_tokens,
            window_slots=plan.window_slots, group_tokens=plan.group_tokens,
        )  # fmt: skip
        if plan.group_tokens == 1:
            unit_keys = keys.unsqueeze(1)
        else:
            unit_keys = self.window.tokens[:, :, 0].index_select(1, clock.unit_places)
        index.put(unit_keys, clock)
        if self._shares_slots:
            self.pool.show_kept(self.window.tokens, self.window.mask)
        self.length += 1
        if self.observer is not None:
            self.observer(self.layer_idx, self._attended())
        if isinstance(self.pool, CodedPool):
            return attend_pool(call, self.window.tokens, self.pool.mask, index.lse, self.pool.codes)
        return attend_pool(call, self.pool.tokens, self.pool.mask, index.lse)

    def _attended(self) -> Tensor:
        """True for each token that this step sees. bool [rows, length]"""
        plan, rows = self.setup.plan, len(self.unit_in)
        seen = torch.zeros(rows, plan.max_units * plan.group_tokens + 1, dtype=torch.bool)
        shown = self.pool.mask.eq(0).cpu()
        units = self.unit_in.cpu().long()
        offsets = torch.arange(plan.group_tokens)
        positions = units[:, :, None] * plan.group_tokens + offsets
        positions = positions.masked_fill(units[:, :, None] < 0, -1).flatten(1)
        window = torch.full((rows, plan.kept_slots * plan.group_tokens), -1)
        first = self.setup.clock.first_unit.cpu().long() - plan.sink_slots
        sinks = torch.arange(plan.sink_slots * plan.group_tokens)
        window[:, : len(sinks)] = first[:, None] * plan.group_tokens + sinks
        newest = torch.arange(
            self.window.first_window_unit(self.length) * plan.group_tokens, self.length
        )
        window[:, self.window.window_places(newest)] = newest
        positions = torch.cat([positions, window], dim=1)
        seen.scatter_(1, positions.masked_fill(~shown, -1) % seen.shape[1], True)
        return seen[:, : self.length]

    @property
    def _end_unit(self) -> int:
        """Units that have begun."""
        return -(-self.length // self.setup.plan.group_tokens)

    def _add_past(
        self, total: AttentionSum, past: Iterator[tuple[int, int, Tensor]], visible: Tensor | None
    ) -> None:
        """Add all tokens that are there to a softmax."""
        group_tokens = self.setup.plan.group_tokens
        for first, end, tokens in past:
            count = min(end * group_tokens, self.length) - first * group_tokens
            mask = None
            if visible is not None:
                shown = visible[:, first * group_tokens :][:, :count]
                mask = additive_mask(shown, tokens.dtype)
            keys, values = tokens[:, :count, 0], tokens[:, :count, 1]
            total.add(keys.transpose(1, 2), values.transpose(1, 2), mask)

    # Taking tokens in -------------------------------------------------------------------------

    @override
    def append(self, keys: Tensor, values: Tensor, visible: Tensor | None) -> None:
        """Take new tokens in without attending; both [rows, kv_heads, new_tokens, head_dim].

        Args:
            visible: bool, False at padding, None when nothing is padded. [rows, all tokens]

        Raises:
            PromptError: padding behind a row's first token.
        """
        self._join()
        start, group_tokens = self.length, self.setup.plan.group_tokens
        if visible is not None or start == 0:
            first = first_visible(visible, keys)
            units = np.zeros(len(first), dtype=np.int64)
            if visible is not None:
                self._refuse_gaps(visible, first)
                units = (first // group_tokens).cpu().numpy()
            self.setup.clock.set_start(first)
            if self.index is not None:
                self.index.see_start(units)
            self.window.set_start_units(first // group_tokens, int(units.max()))
        store_tokens(keys, values, self.host.tokens, start)
        if self._written is not None:
            self._written.record()
        self._index_keys(keys)
        self.length = self._touched = start + keys.shape[2]
        self.window.see(visible)
        self._window_is_old, self._may_step = True, False

    def _bring_up_window(self) -> None:
        """Read sinks and window back from host memory, and take lent slots back, after a pass.

        So a prompt's chunks write neither, and the slots' memory is free for it to stream through.
        """
        workspace = self.setup.workspace
        if self._times_lent != workspace.times_lent:
            workspace.give_back()
            self._join()
            self._slots.forget()
            self._emptied, self._times_lent = True, workspace.times_lent
        elif not self._window_is_old:
            return
        self.window.read_back(self.host.tokens_there, self.length)
        self._window_is_old = False

    def _refuse_gaps(self, visible: Tensor, first: Tensor) -> None:
        positions = torch.arange(visible.shape[1], device=visible.device)
        if not torch.equal(visible, positions >= first[:, None]):
            raise PromptError(
                "a row is padded behind its first token, between two prompts of different lengths, "
                "say, which the device tier cannot hide; give each row its own cache, or keep "
                "the cache on a disk"
            )

    def _index_keys(self, keys: Tensor) -> None:
        """Hand the index the units that these tokens close."""
        if self.index is None:
            return
        self._fit.check(self.index, self.length + keys.shape[2], decoding=False)
        if not self.index.ready:
            return  # with the first step, of all of the prompt
        group_tokens = self.setup.plan.group_tokens
        start, end = self.length, self.length + keys.shape[2]
        first, last = start // group_tokens, end // group_tokens
        if first == last:
            return
        closed = keys.transpose(1, 2)[:, : last * group_tokens - start]
        if start % group_tokens:
            unclosed = self.host.tokens_there[:, first * group_tokens : start, 0]
            closed = torch.cat([unclosed, closed], dim=1)
        self.setup.clock.finite[self.layer_idx] = torch.isfinite(closed).all()
        self.index.take(closed, first * group_tokens)

    # Reports ----------------------------------------------------------------------------------

    @override
    def count_into(self, decode: PhaseStats) -> None:
        """Add what steps have asked for and fetched since the last call; waits for the device."""
        total = self.lists.traffic.sum(dim=0).cpu()
        wanted, missing = (total - self._counted).tolist()
        self._counted = total
        decode.units_wanted += wanted
        decode.units_hit += wanted - missing
        decode.reads += missing
        decode.read_bytes += missing * self.setup.plan.unit_bytes

    # Changes of shape -------------------------------------------------------------------------

    def _empty_slots(self) -> None:
        self._join()
        self._emptied = True
        self._slots.clear()
        self._slots.heads.zero_()

    @override
    def crop(self, length: int) -> None:
        """Forget the tokens at and after `length`; the window is read back from host memory."""
        if length >= max(self.length, self._touched):
            return
        length = min(length, self.length)
        _wait(self.setup.device)
        self._empty_slots()
        self.length = self._touched = length
        self._window_is_old = True
        if self.index is not None:
            self.index.crop(length)
        self._fit.crop(length)
        self._may_step = False

    @override
    def take_rows_from(self, other: Layer, rows: Tensor) -> None:
        assert isinstance(other, DeviceLayer)
        _wait(self.setup.device)
        self.length = other.length
        places = max(1, self.length)
        copy_rows(self.host.tokens[:, :places], other.host.tokens[:, :places], rows.cpu())
        self.window.take_rows_from(other.window, rows)
        self._window_is_old = True
        self._empty_slots()
        if self.index is not None and other.index is not None:
            self.index.take_rows_from(other.index, rows)
        self._fit.take_rows_from(other._fit, rows)
        self._may_step = False

    @override
    def reset(self) -> None:
        """Forget every token."""
        self.length = self._touched = 0
        self._empty_slots()
        self.window.see(None)
        self._window_is_old = True
        self.lists.traffic.zero_()
        self._counted.zero_()
        self._fit.reset()
        if self.index is not None:
            self.index.crop(0)
            self.index.forget_fit()
        self._may_step = False

    @override
    def drop_fetch(self) -> None:
        """Give up a fetch that will not be attended to; what it brought is in its slots."""
        self._join()

    @override
    def forget_slots(self) -> None:
        """Trust nothing that a failed step may have left in the slots."""
        self._empty_slots()
        self._may_step = False

    @override
    def close(self) -> None:
        """Let what is under way end; memory goes with the object."""
        _wait(self.setup.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
