"""JoinedRuntime: rows of several caches that go through one decode step together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.core.slot_plan import SlotPlan
from penstock.engine.attention_call import AttentionCall
from penstock.engine.device_tier.joined_replays import JoinedReplays
from penstock.engine.device_tier.segments import Segments
from penstock.engine.policy import SelectionPolicy
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime


class JoinedRuntime:
    """Splits what a model computes for all rows into the parts of the caches that hold them.

    Each cache keeps its store, its ledger, its length and its index; joining and leaving moves no
    byte. What a cache computes in a step depends on its own rows alone. One that fails is left out
    until the step's end, and its rows get zeros; the others go on.
    """

    def __init__(self, like: TieredRuntime, *, records: bool) -> None:
        """Hold no cache yet.

        Args:
            like: those that join have its policy's way of predicting and its shape.
            records: steps on the device tier may be CUDA graphs.
        """
        self.policy: SelectionPolicy = like.policy
        self.settings: RuntimeSettings = replace(like.settings, past=None)
        self.plan: SlotPlan = like.plan
        self.on_device_tier = like.on_device_tier
        self._replays: JoinedReplays | None = None
        if records and self.on_device_tier:
            self._replays = JoinedReplays(self.settings.device)
        self.recording: Segments | None = None
        """What records the model's pass now: fetches and attention are noted, and do not run."""
        self._replayed: set[int] = set()
        """Members whose step is recorded, by their number in it."""
        self.failures: dict[int, Exception] = {}
        """What caches of the step have failed of, by their number in it."""
        self._members: Sequence[TieredRuntime] = ()
        self._rows: list[slice] = []

    def begin(self, members: Sequence[TieredRuntime]) -> None:
        """Say whose rows the next step has, in the order of the rows; further rows are no one's."""
        self._members, self.failures = members, {}
        ends = torch.tensor([member.batch for member in members]).cumsum(0).tolist()
        self._rows = [slice(end - each.batch, end) for each, end in zip(members, ends, strict=True)]
        if self._replays is not None:
            self._replayed = self._replays.begin(members, self._rows)

    def end(self, *, is_done: bool) -> None:
        """The step is over.

        Args:
            is_done: the model has passed all layers.
        """
        self._members = ()
        if self._replays is not None:
            self._replays.end(is_done=is_done)

    @property
    def parts(self) -> Sequence[slice]:
        """The rows of each cache."""
        return self._rows

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        """As `TieredRuntime.attend`, of one new token a row; what fails is in `failures`."""
        out = new_attended(call)
        self.run(partial(self._attend, layer, call, out))
        return out

    def run(self, function: Callable[[], None]) -> None:
        """Call what no recording of the model's pass may hold: at each replay, if one is made."""
        if self.recording is None:
            function()
        else:
            self.recording.between(function)

    def _attend(self, layer: int, call: AttentionCall, out: Tensor) -> None:
        for number, member, part in self._launched():
            own = rows_of(call, part)
            try:
                out[part] = member.attend(layer, own)
            except Exception as error:
                self.failures[number] = error
            if self._replays is not None:
                self._replays.saw_call(member, layer, own)
        if self._replays is not None:
            self._replays.attend(layer, call, out)

    def _launched(self) -> Iterator[tuple[int, TieredRuntime, slice]]:
        """Members whose step is launched piece by piece and has not failed."""
        for number, (member, part) in enumerate(zip(self._members, self._rows, strict=True)):
            if number not in self.failures and number not in self._replayed:
                yield number, member, part

    def wants_query(self, layer: int) -> bool:
        """Whether a cache would begin a fetch by this layer's query."""
        replays = self._replays
        return (replays is not None and replays.wants_query(layer)) or any(
            member.wants_query(layer) for _, member, _ in self._launched()
        )

    def begin_fetch(self, layer: int, query: Tensor) -> None:
        """As `TieredRuntime.begin_fetch`, for those that want it."""
        self.run(partial(self._begin_fetch, layer, query))

    def _begin_fetch(self, layer: int, query: Tensor) -> None:
        for number, member, part in self._launched():
            if not member.wants_query(layer):
                continue
            try:
                member.begin_fetch(layer, query[part])
            except Exception as error:
                self.failures[number] = error
            if self._replays is not None:
                self._replays.saw_query(member, layer, query[part])
        if self._replays is not None:
            self._replays.begin_fetch(layer, query)

    def choosing(self, _: int, *__: Tensor) -> AbstractContextManager[None]:
        """For `with`: what projects the queries of all rows; each cache chooses by itself."""
        return nullcontext()

    @property
    def length(self) -> int:
        """Tokens that all rows hold, which grows with each step."""
        return sum(member.length for member in self._members)

    def layer_length(self, layer: int) -> int:
        """Tokens that all rows hold of one layer."""
        return sum(member.layer_length(layer) for member in self._members)

    def drop_fetches(self) -> None:
        """As `TieredRuntime.drop_fetches`."""
        for member in self._members:
            member.drop_fetches()


def new_attended(call: AttentionCall) -> Tensor:
    """Zeros for what attention makes of one new token a row. [rows, 1, num_heads, value_width]"""
    rows, count = call.query.shape[:2]
    return call.values.new_zeros((rows, 1, count, call.values.shape[-1]))


def rows_of(call: AttentionCall, rows: slice) -> AttentionCall:
    """A call's part for some of its rows; nothing is padded."""
    sinks = call.sink_logits
    if sinks is not None and sinks.ndim > 1:
        sinks = sinks[rows]
    return AttentionCall(
        call.query[rows], call.keys[rows], call.values[rows], call.scaling, call.softcap, sinks
    )
