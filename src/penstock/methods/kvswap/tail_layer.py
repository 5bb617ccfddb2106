"""TailLayer: a layer whose decode steps add the mean of what they did not read."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall, AttentionSum
from penstock.engine.fetch_plan import FetchPlan
from penstock.engine.fused_fetch import Fetch
from penstock.engine.layer import Layer
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.engine.value_sum import ValueSum
from penstock.methods.kvswap.index import LowRankIndex
from penstock.methods.kvswap.stored_index import VALUE_SUM

UNREAD_GAP = 0.15
"""Logits of an unread unit add up to so much more than the largest, beyond what those of a unit in
the slots do; in logarithms, by the logarithm of its tokens. Units of four have 0.2."""


class TailLayer(RetrievalLayer):
    """Attends to what it has in memory, and to the rest as if it were one token.

    That token's value is the mean of all values that are not attended to, one for each KV head. Its
    weight is what they have, one for each query head. The index says how much more or less that is
    than what the slots have, which is known. Not of the KVSwap paper, which leaves the rest out.

    What is missed need not be like the mean: in the first layers, where a token attends to others
    of its kind, it is like what is attended to. So the mean is taken in by a part alone, a number
    of each row. The newest token of a prompt has been answered exactly; it is answered once more
    over a selection, and the part is that which comes nearest (least squares over the heads).
    """

    may_fuse = False

    def __init__(self, *parts: Any) -> None:
        """Make the layer; parts: of a `RetrievalLayer`."""
        super().__init__(*parts)
        plan = self.setup.plan
        self._values = ValueSum(plan.batch, self.setup.shape, self.setup.device)
        self._logits: Tensor | None = None
        self._part = torch.zeros(plan.batch, device=self.setup.device)
        self._exact: tuple[AttentionCall, Tensor] | None = None
        """The newest token of a prompt, and its answer. [batch, 1, num_heads, head_dim]"""

    @staticmethod
    def scratch_bytes(rows: int, max_units: int, shape: KVShape) -> int:
        """Temporaries of a step beside the index's own, for the ledger: logits of this layer, and
        of the one whose fetch has begun."""
        logits = 4 * rows * 2 * max_units * shape.num_query_heads
        return logits + ValueSum.scratch_bytes(rows, shape)

    # Steps ------------------------------------------------------------------------------------

    @override
    def _fetch_in_steps(self, query: Tensor, end_unit: int) -> Fetch:
        index = self.index.unwrapped
        assert isinstance(index, LowRankIndex)
        fetch = super()._fetch_in_steps(query, end_unit)
        self._logits = index.unit_logits(query, end_unit)
        return fetch

    @override
    def drop_fetch(self) -> None:
        self._logits = None
        super().drop_fetch()

    @override
    def attend_to_pool(
        self, call: AttentionCall, fetched: tuple[Selection, FetchPlan] | None
    ) -> Tensor:
        logits, self._logits = self._logits, None
        if fetched is None or logits is None:  # all that there is is in memory
            return super().attend_to_pool(call, fetched)
        out, more = self._with_mean(call, logits)
        return out + more * self._part[:, None, None, None].to(out.dtype)

    def _with_mean(self, call: AttentionCall, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What is attended to, and what the mean adds. Both [batch, 1, num_heads, head_dim]"""
        total = AttentionSum(call)
        pool, slots = self.pool, self.pool.slot_places
        total.add(pool.keys[:, :, :slots], pool.values[:, :, :slots], pool.mask[:, :slots])
        weight = self._weight(logits, call, total.lse[:, :, 0])
        total.add(pool.keys[:, :, slots:], pool.values[:, :, slots:], pool.mask[:, slots:])
        out = total.result()
        mean = self._values.mean_without(pool.values, pool.mask)
        heads = call.query.shape[1] // mean.shape[1]
        total.merge(mean.repeat_interleave(heads, dim=1)[:, :, None], weight[:, :, None])
        return out, total.result() - out

    def _weight(self, logits: Tensor, call: AttentionCall, slots: Tensor) -> Tensor:
        """Logarithm of what the units have that are not attended to: what the slots have, times the
        index's ratio of the two.

        Args:
            logits: of units, by the index; overwritten. [rows, units, heads]
            slots: log-sum-exp of the logits of what is in the slots. [rows, heads]

        Returns:
            float32 [rows, heads]
        """
        if call.softcap is not None:
            logits = torch.tanh(logits / call.softcap) * call.softcap
        units = torch.from_numpy(self.table.unit_in).to(logits.device).long()[:, :, None]
        at = units.clamp_min(0).expand(-1, -1, logits.shape[2])
        read = logits.gather(1, at).masked_fill_(units < 0, -math.inf).logsumexp(dim=1)
        unread = logits.masked_fill_(self._known(logits), -math.inf).logsumexp(dim=1)
        weight = slots + unread - read + UNREAD_GAP * math.log(self.setup.plan.group_tokens)
        return weight.masked_fill(unread.isinf(), -math.inf)

    def _known(self, logits: Tensor) -> Tensor:
        """Units that are attended to, or no unit of a row's. bool [rows, units, 1]"""
        units, device = logits.shape[1], logits.device
        starts = torch.from_numpy(self._first_unit).to(device)[:, None]
        held = torch.from_numpy(self.table.slot_of[:, :units] >= 0).to(device)
        return (held | (torch.arange(units, device=device) < starts))[:, :, None]

    # The part of the mean ---------------------------------------------------------------------

    @override
    def attend(self, call: AttentionCall) -> Tensor:
        out = super().attend(call)
        if call.query.shape[2] > 1:
            parts = {
                name: getattr(call, name)[:, :, -1:].clone() for name in ("query", "keys", "values")
            }
            last = replace(call, **parts, visible=None)
            self._exact = last, out[:, -1:].clone()
        return out

    def _answer_again(self) -> None:
        """Learn from the newest token of a prompt which part of the mean comes nearest."""
        if self._exact is None or not self.index.ready:
            return
        (call, exact), self._exact = self._exact, None
        end_unit = self.window.first_window_unit(self.length)
        if end_unit <= self._lowest_unit or self._all_resident(end_unit):
            return
        if self.setup.plan.shared_pools:
            self._clear_table()
        self._fetch = self._fetch_in_steps(call.query[:, :, 0], end_unit)
        self._finish_fetch()
        self.slots_landed()
        self.show_kept()
        logits, self._logits = self._logits, None
        assert logits is not None
        out, more = (each.float() for each in self._with_mean(call, logits))
        along = ((exact.float() - out) * more).flatten(1).sum(dim=1)
        self._part = (along / more.square().flatten(1).sum(dim=1).clamp_min(1e-30)).clamp(0, 1)

    # Values -----------------------------------------------------------------------------------

    @override
    def append(self, keys: Tensor, values: Tensor, visible: Tensor | None) -> None:
        start = self.length
        super().append(keys, values, visible)
        if self._values.tokens == start:
            self._values.add(values, None if visible is None else visible[:, start:])

    @override
    def make_index(self, query: Tensor | None = None) -> None:
        """Values that were not seen are read too: a stored past's, or those that a crop left."""
        super().make_index(query)
        self._see_values()
        self._answer_again()

    def _see_values(self) -> None:
        group_tokens, known = self.setup.plan.group_tokens, self._values.tokens
        if known == self.length:
            return
        first = known // group_tokens * group_tokens
        for start, end in self._pieces(first):
            tokens = self.read_tokens(start, end)[:, max(0, known - start) :]
            shown = self._visible
            if shown is not None:
                shown = shown[:, max(start, known) : end]
            self._values.add(self.setup.shape.values_of(tokens).transpose(1, 2), shown)

    def _pieces(self, first: int) -> list[tuple[int, int]]:
        """[first, length) in pieces that the slots hold."""
        plan = self.setup.plan
        step = self._halves.units * plan.group_tokens
        return [(at, min(at + step, self.length)) for at in range(first, self.length, step)]

    @override
    def crop(self, length: int) -> None:
        known, touched = self._values.tokens, max(self._touched, self.length)
        if length < known:
            oldest = self.window.first_window_unit(touched) * self.setup.plan.group_tokens
            if oldest <= length and touched == known:
                at = self.window.window_places(
                    torch.arange(length, known, device=self.setup.device)
                )
                shown = self.window.mask[:, at] == 0
                self._values.take_away(self.window.values[:, at].transpose(1, 2), shown)
            else:
                self._values.reset()
        if length < self.length:
            self._exact = None
        super().crop(length)

    @override
    def take_rows_from(self, other: Layer, rows: Tensor) -> None:
        super().take_rows_from(other, rows)
        assert isinstance(other, TailLayer)
        self._values.take_rows_from(other._values, rows)
        self._part, self._exact = other._part[rows].clone(), None

    @override
    def reset(self) -> None:
        super().reset()
        self._values.reset()
        self._part, self._exact = torch.zeros_like(self._part), None

    @override
    def restore(self, length: int, state: Mapping[str, Tensor] | None = None) -> None:
        """The sum of values is as it was, or made from the values by `make_index`."""
        super().restore(length, state)
        if state is not None and VALUE_SUM in state:
            self._values.load_state(state[VALUE_SUM], length)

    @override
    def index_state(self) -> dict[str, Tensor] | None:
        state = super().index_state()
        return None if state is None else {**state, VALUE_SUM: self._values.state()}
