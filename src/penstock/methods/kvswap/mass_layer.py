"""MassLayer: a layer that reads until enough of the attention is there, and says how much is."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.selection import Selection
from penstock.engine.attended import pool_logits
from penstock.engine.attention_call import AttentionCall, AttentionSum
from penstock.engine.fetch_plan import FetchPlan, plan_fetch
from penstock.engine.fused_fetch import Fetch
from penstock.engine.layer import Layer
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.engine.value_sum import ValueSum
from penstock.methods.kvswap.index import LowRankIndex
from penstock.methods.kvswap.mass import Chosen, MassEstimate, MassMeter, selection_of

Below = Literal["again", "tail", "exact"]
"""What is done below the floor: all slots are filled by the true query, the mean of what is not
read is added by its estimated mass, or the step attends to everything."""


class MassLayer(RetrievalLayer):
    """Selects by the mass that the index sees; measures it when the units have landed.

    It counts, over layers, steps and rows: `mass_steps`, how many; `mass_captured` and
    `mass_variance`, the estimates and their variances; `mass_capped`, those that wanted more than
    the slots; `mass_read_again`, `mass_tail` and `mass_exact`, those below the floor, by what was
    done.
    """

    may_fuse = False

    def __init__(
        self, *parts: Any, mass: float, floor: float | None, below: Below, scaling: float
    ) -> None:
        """Make the layer.

        Args:
            parts: of a `RetrievalLayer`.
            mass: share of the attention that steps read for.
            floor: captured share below which a step is made better; None: never.
            below: how.
            scaling: factor on logits.
        """
        super().__init__(*parts)
        plan, heads = self.setup.plan, self.setup.shape.num_query_heads
        self._scaling, self._floor, self._below = scaling, floor, below
        self._meter = MassMeter(
            plan.batch, heads, mass=mass, unit_tokens=plan.group_tokens, seed=self.layer_idx,
            device=self.setup.device,
        )  # fmt: skip
        self._chosen: Chosen | None = None
        self._sees_all = False
        shape = self.setup.shape
        self._values: ValueSum | None = None
        if below == "tail":
            self._values = ValueSum(plan.batch, shape, self.setup.device)
        self.estimate: MassEstimate | None = None
        """Of the last step; None where it attended to everything."""

    @override
    def _fetch_in_steps(self, query: Tensor, end_unit: int) -> Fetch:
        index = self.index.unwrapped
        assert isinstance(index, LowRankIndex)
        logits = index.unit_logits(query, end_unit)
        chosen = self._meter.choose(
            logits, self._kept_logits(query), self._first_unit, self.setup.plan.num_slots
        )
        self.update_replacement()
        best = chosen.best.cpu().numpy()
        plan = plan_fetch(selection_of(best), self.table, self.replacement)
        # Who is drawn may not say what is evicted, or what was evicted is never seen.
        resident = self._resident(end_unit)
        self._meter.draw(chosen, resident)
        wanted, probes = best.copy(), chosen.probes.cpu().numpy()
        wanted[np.arange(len(probes))[:, None], probes] = True
        selection = selection_of(wanted)
        plan = _joined(plan, plan_fetch(selection, self.table, self.replacement))
        chosen.left = resident & self._resident(end_unit) & ~chosen.best
        self._chosen = chosen
        return Fetch(selection, plan, self.read_missing(plan) if len(plan.rows) else None)

    def _resident(self, end_unit: int) -> Tensor:
        """Units in slots. bool [rows, end_unit]"""
        held = torch.from_numpy(self.table.slot_of[:, :end_unit] >= 0)
        return held.to(self.setup.device)

    def _kept_logits(self, query: Tensor) -> Tensor:
        """Log-sum-exp over sinks and window. float32 [rows, heads]"""
        keys = self.window.keys.transpose(1, 2)
        rows, kv_heads, _, head_dim = keys.shape
        grouped = query.view(rows, kv_heads, -1, head_dim).float() * self._scaling
        logits = torch.matmul(grouped, keys.float().transpose(2, 3))
        shown = logits + self.window.mask[:, None, None].float()
        return shown.logsumexp(dim=3).flatten(1)

    @override
    def drop_fetch(self) -> None:
        self._chosen = None
        super().drop_fetch()

    @override
    def see_step(
        self, call: AttentionCall, fetched: "tuple[Selection, FetchPlan] | None"
    ) -> Tensor | None:
        chosen, self._chosen, self._sees_all = self._chosen, None, False
        rows, phase = self.setup.plan.batch, self.setup.phase
        if fetched is None or chosen is None:
            self.estimate = None
            self._count(rows, float(rows), 0.0, 0)
            return None
        found, capped, out = self._measure(call, chosen), int(chosen.capped.sum()), None
        low = 0 if self._floor is None else int((found.captured < self._floor).sum())
        if low and self._below == "again":
            phase.count("mass_read_again", low)
            found = self._read_again(call)
        elif low and self._values is not None and call.sink_logits is None:
            phase.count("mass_tail", low)
            out = self._with_tail(call, found, self._values)
        elif low:
            phase.count("mass_exact", low)
            out, self._sees_all = self._exactly(call), True
            found = MassEstimate(
                torch.ones_like(found.captured), torch.zeros_like(found.variance),
                torch.zeros_like(found.unread),
            )  # fmt: skip
        self.estimate = found
        self._count(rows, float(found.captured.sum()), float(found.variance.sum()), capped)
        return out

    def _count(self, rows: int, captured: float, variance: float, capped: int) -> None:
        phase = self.setup.phase
        phase.count("mass_steps", rows)
        phase.count("mass_captured", captured)
        phase.count("mass_variance", variance)
        phase.count("mass_capped", capped)

    def _measure(self, call: AttentionCall, chosen: Chosen) -> MassEstimate:
        logits = pool_logits(self.pool, call)
        slots = logits[:, :, : self.pool.slot_places]
        by_slot = slots.reshape(*slots.shape[:2], -1, self.pool.group_tokens).logsumexp(dim=3)
        probes = chosen.probes.cpu().numpy()
        places = self.table.slot_of[np.arange(len(probes))[:, None], probes]
        at = torch.from_numpy(places.astype(np.int64)).to(logits.device)
        probed = by_slot.transpose(1, 2).gather(1, at[:, :, None].expand(-1, -1, logits.shape[1]))
        return self._meter.measure(chosen, logits.logsumexp(dim=2), probed)

    def _read_again(self, call: AttentionCall) -> MassEstimate:
        """Fill all slots, by the true query."""
        end_unit = self.window.first_window_unit(self.length)
        self._meter.mass, wanted = 1.0, self._meter.mass
        try:
            self._fetch = self._fetch_in_steps(call.query[:, :, 0], end_unit)
        finally:
            self._meter.mass = wanted
        plan, phase = self._fetch.plan, self.setup.phase
        phase.units_wanted += plan.num_wanted
        phase.units_hit += plan.num_hit
        self._finish_fetch()
        self.slots_landed()
        chosen, self._chosen = self._chosen, None
        assert chosen is not None
        return self._measure(call, chosen)

    def _exactly(self, call: AttentionCall) -> Tensor:
        """Attend to everything: the new token is in the window already."""
        total = AttentionSum(call)
        self._add_window(total)
        self._stream(total, self.window.first_window_unit(self.length), call.visible)
        return total.result()

    @override
    def _attended(self, fetched: "tuple[Selection, FetchPlan] | None") -> Tensor:
        if not self._sees_all:
            return super()._attended(fetched)
        rows, visible = self.setup.plan.batch, self._visible
        seen = torch.ones(rows, self.length, dtype=torch.bool, device=self.setup.device)
        if visible is not None:
            seen[:, : visible.shape[1]] &= visible
        return seen

    def _with_tail(self, call: AttentionCall, found: MassEstimate, values: ValueSum) -> Tensor:
        """Rows below the floor with the mean of what they do not attend to."""
        total = AttentionSum(call)
        total.add(self.pool.keys, self.pool.values, self.pool.mask)
        attended = total.result()
        assert self._floor is not None
        rest = values.mean_without(self.pool.values, self.pool.mask)
        rest = rest.repeat_interleave(call.query.shape[1] // rest.shape[1], dim=1)
        share = found.unread / (1 + found.unread) * (found.captured < self._floor)[:, None]
        share = share[:, None, :, None]
        mixed = attended.float() * (1 - share) + rest[:, None] * share
        return mixed.to(attended.dtype)

    # The sum of the values ----------------------------------------------------------------------

    @override
    def begin(self, query: Tensor) -> None:
        if self._values is not None and self._values.tokens != self.length:
            self._add_up(self._values)
        super().begin(query)

    @override
    def append(self, keys: Tensor, values: Tensor, visible: Tensor | None) -> None:
        start = self.length
        super().append(keys, values, visible)
        if self._values is not None and self._values.tokens == start:
            new = None if visible is None else visible[:, -values.shape[2] :]
            self._values.add(values, new)

    def _add_up(self, values: ValueSum) -> None:
        """Read every token that is held: a crop, or a stored text, has changed which are."""
        group_tokens = self.setup.plan.group_tokens
        closed = self.length // group_tokens
        values.reset()
        self.drain()
        self.forget_slots()
        starts = [first * group_tokens for first, _ in self._blocks(0, closed)]
        starts += [closed * group_tokens] * (self.length > closed * group_tokens)
        for start, end in zip(starts, [*starts[1:], self.length], strict=True):
            self._add(values, self.read_tokens(start, end), start)

    def _add(self, values: ValueSum, tokens: Tensor, start: int) -> None:
        end, visible = start + tokens.shape[1], None
        if self._visible is not None:
            visible = self._visible[:, start:end]
            missing = end - start - visible.shape[1]  # decoded since, which is no padding
            visible = torch.nn.functional.pad(visible, (0, missing), value=True)
        values.add(self.setup.shape.values_of(tokens).transpose(1, 2), visible)

    def _forget_values(self) -> None:
        if self._values is not None:
            self._values.reset()

    @override
    def restore(self, length: int, state: Mapping[str, Tensor] | None = None) -> None:
        self._forget_values()
        super().restore(length, state)

    @override
    def crop(self, length: int) -> None:
        if length < max(self.length, self._touched):
            self._forget_values()
        super().crop(length)

    @override
    def take_rows_from(self, other: Layer, rows: Tensor) -> None:
        super().take_rows_from(other, rows)
        assert isinstance(other, MassLayer)
        self._meter.take_rows_from(other._meter, rows)
        if self._values is not None and other._values is not None:
            self._values.take_rows_from(other._values, rows)

    @override
    def reset(self) -> None:
        super().reset()
        self._meter.reset()
        if self._values is not None:
            self._values.reset()


def _joined(first: FetchPlan, then: FetchPlan) -> FetchPlan:
    """Both plans' reads, where the second knows all that is selected."""
    rows, units, slots = (
        np.concatenate([getattr(first, name), getattr(then, name)])
        for name in ("rows", "units", "slots")
    )
    order = np.lexsort((units, rows))
    hits = then.num_wanted - len(rows)
    return FetchPlan(
        rows[order], units[order], slots[order], then.selected_slots, then.num_wanted, hits
    )
