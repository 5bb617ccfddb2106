"""HostPoolLayer: the hot pool in the host's memory, beside a GPU that gets what was selected.

Source: HillInfer, section 4.1 (figure 6): the GPU holds the newest tokens and the most critical
ones and attends; the host holds the hot pool and scores it; near storage holds and scores the rest.
"""

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.selection import Selection
from penstock.core.slot_plan import SizingRequest
from penstock.engine.attended import attended_tokens
from penstock.engine.fetch_plan import FetchPlan
from penstock.engine.key_index import KeyIndex
from penstock.engine.layer_cache import LayerSetup
from penstock.engine.slot_transfer import PoolMemory, SlotTransfer
from penstock.engine.tiers.slot_table import ABSENT, SlotTable
from penstock.engine.tiers.token_pool import TokenPool
from penstock.kernels.device.host_view import host_view
from penstock.kernels.plain_attention import NEGATIVE_INFINITY
from penstock.methods.hillinfer.layer import NearLayer
from penstock.methods.hillinfer.near_work import NearWork
from penstock.storage.aligned_buffer import AlignedBuffer

if TYPE_CHECKING:
    from penstock.methods.hillinfer.policy import HillInfer


def host_pool_bytes(request: SizingRequest, host_slots: int) -> int:
    """Host memory of the hot pools of all layers and rows: tokens, masks and tables."""
    shape = request.shape
    table = SlotTable.num_bytes(request.batch, host_slots, request.max_tokens)
    each = shape.token_bytes + shape.dtype.itemsize
    return shape.num_layers * (request.batch * host_slots * each + table)


class HostPool:
    """Slots of one layer in (pinned) host memory, and the way from there to the device."""

    def __init__(self, setup: LayerSetup) -> None:
        """Take the memory for `plan.host_slots` slots of every row.

        Raises:
            RuntimeError: CUDA pins no more.
        """
        plan, device = setup.plan, setup.device
        self.device = device
        pages = AlignedBuffer(
            plan.batch * plan.host_slots, plan.unit_bytes, pinned=device.type == "cuda"
        )
        direct = setup.store.padded_bytes == plan.unit_bytes
        self.memory = PoolMemory(pages.tensor, pages if direct else None, pages)
        self.pool = TokenPool(
            pages.tensor, setup.shape, batch=plan.batch, num_slots=plan.host_slots, kept_slots=0,
            group_tokens=plan.group_tokens,
        )  # fmt: skip
        self._there = host_view(pages.tensor, device).view(plan.batch, plan.host_slots, -1)
        self._timed: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None
        self._rate = 0.0

    def bring(self, slots: NDArray[np.int64], target: TokenPool) -> None:
        """Copy tokens into the first slots of the device's pool, and hide its other slots.

        Args:
            slots: of the hot pool, `ABSENT` for none. [rows, wanted]
        """
        self._read_rate()
        count = slots.shape[1]
        numbers = torch.from_numpy(slots.clip(0))
        shown = self.pool.slot_mask[torch.arange(len(slots))[:, None], numbers]
        shown = shown.masked_fill(torch.from_numpy(slots == ABSENT)[:, :, None], NEGATIVE_INFINITY)
        target.hide_slots()
        target.slot_mask[:, :count] = shown.to(self.device)
        numbers = numbers.to(self.device)
        to = target.memory.view(len(slots), target.slots_per_row, -1)
        begun = self._begin()
        # Whole words: a byte at a time crosses the bus slowly.
        word = torch.int64 if to.shape[2] % 8 == 0 else torch.uint8
        for row, each in enumerate(numbers):
            from_row, to_row = self._there[row].view(word), to[row, :count].view(word)
            torch.index_select(from_row, 0, each, out=to_row)
        self._end(begun, slots.size)

    @property
    def rate(self) -> float:
        """Tokens per second that `bring` brought last; 0: not known yet."""
        return self._rate

    def _begin(self) -> "torch.cuda.Event | float | None":
        if self.device.type != "cuda":
            return time.perf_counter()
        if self._timed is not None:
            return None  # the last one is under way
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _end(self, begun: "torch.cuda.Event | float | None", tokens: int) -> None:
        if isinstance(begun, float):
            self._rate = tokens / max(time.perf_counter() - begun, 1e-9)
        elif begun is not None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._timed = (begun, event, tokens)

    def _read_rate(self) -> None:
        if self._timed is not None and self._timed[1].query():  # type: ignore[no-untyped-call]
            begun, ended, tokens = self._timed
            self._rate = tokens * 1e3 / max(begun.elapsed_time(ended), 1e-6)
            self._timed = None


class HostPoolLayer(NearLayer):
    """A `NearLayer` whose hot pool lies in the host's memory and is scored by its processor.

    The slots of the device serve all layers in turn and hold one selection, which is copied out of
    the hot pool when its reads have landed there. So the device's memory holds sinks, windows and
    two selections, however long the sequence; what the hot pool takes is the host's.

    Differences: nothing of the selection stays on the device from one step to the next; the copy
    begins when the layer itself is evaluated, not under the layer before.
    """

    def __init__(
        self, layer_idx: int, setup: LayerSetup, pool_memory: PoolMemory, policy: "HillInfer",
        index: KeyIndex, work: NearWork,
    ) -> None:  # fmt: skip
        super().__init__(layer_idx, setup, pool_memory, policy, index, work)
        plan = setup.plan
        self._host = HostPool(setup)
        self.slot_pool = self._host.pool
        self.slot_transfer = SlotTransfer(
            self.transfer.region, self._host.memory, setup.staging, setup.writer, setup.tracer
        )
        self.table = SlotTable(plan.batch, plan.host_slots, plan.max_units)
        self._attach()

    @override
    def _finish_fetch(self) -> tuple[Selection, FetchPlan] | None:
        fetched = super()._finish_fetch()
        if fetched is None:
            self.pool.hide_slots()  # which hold another layer's selection
        else:
            self._host.bring(fetched[1].selected_slots, self.pool)
        return fetched

    @override
    def _host_link_rate(self) -> float:
        return self._host.rate

    @property
    @override
    def gathers(self) -> bool:
        return True

    @override
    def attended_mask(self, plan: FetchPlan | None) -> Tensor:
        """All that the device holds."""
        return self.pool.mask

    @override
    def _attended(self, fetched: tuple[Selection, FetchPlan] | None) -> Tensor:
        plan = self.setup.plan
        table = SlotTable(plan.batch, plan.num_slots, plan.max_units)
        if fetched is not None:
            units = fetched[0].unit_ids
            table.unit_in[:, : units.shape[1]] = units
        start_units = self._first_unit - plan.sink_slots
        return attended_tokens(self.pool, table, plan, start_units, self.length, None)

    @override
    def _clear_table(self) -> None:
        super()._clear_table()
        self.slot_pool.hide_slots()
