"""Queries of a stated likeness, units that are stated, and the index that selects by them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.core.slot_plan import SlotPlan
from penstock.engine.device_tier.device_index import DeviceIndex, StepClock, Wanted
from penstock.engine.device_tier.device_layer import DeviceLayer
from research.device_tier.recorded_units import RecordedUnits

# Queries of a stated likeness, from step to step and across a turn --------------------------------

SEGMENTS = 32
"""Segments after which the stream begins anew."""
LAYER_SHIFT, SEQUENCE_SHIFT = 5, 3
"""Steps by which layers, and sequences, are apart: they turn at different steps."""


class QueryStream:
    """Queries that stay alike for a segment and then turn, one table for all layers.

    Query heads of a sequence at step p are d * sqrt(sameness) + n * sqrt(1 - sameness): d is drawn
    anew for every segment, n for every step, both normal and independent from head to head. So the
    cosine of two steps is about `sameness` within a segment and about 0 across its end. A step
    costs a layer two small launches; the host has nothing to do with it.
    """

    def __init__(
        self, *, sequences: int, heads: int, head_dim: int, layers: int, segment: int,
        sameness: float, dtype: torch.dtype, device: torch.device, seed: int = 0,
    ) -> None:  # fmt: skip
        """Draw the table.

        Args:
            heads: query heads of a sequence.
            segment: steps that belong together.
            sameness: cosine of two queries of a segment, in [0, 1].
        """
        self.period = SEGMENTS * segment
        steps = self.period + LAYER_SHIFT * layers
        draw = torch.Generator(device).manual_seed(seed)

        def normal(count: int) -> Tensor:
            size = (count, sequences, heads, head_dim)
            return torch.randn(size, generator=draw, device=device, dtype=torch.float32)

        step = torch.arange(steps, device=device)[:, None]
        phase = SEQUENCE_SHIFT * torch.arange(sequences, device=device) % segment
        # No turn where the table begins anew.
        self.number = (step + phase) // segment % SEGMENTS
        """Of the segment, for each step and sequence. int64 [steps, sequences]"""
        drawn = normal(SEGMENTS).to(dtype)
        directions = drawn[self.number, torch.arange(sequences, device=device)]
        self._table = torch.empty_like(directions)
        for first in range(0, steps, segment):  # the noise of all steps at once would be large
            part = slice(first, min(first + segment, steps))
            mixed = normal(part.stop - first) * (1 - sameness) ** 0.5
            mixed += directions[part].float() * sameness**0.5
            self._table[part] = mixed.to(dtype)

    def query(self, layer: int, position: Tensor) -> Tensor:
        """Queries of the step of `position`'s token.

        Args:
            layer: number of the layer.
            position: int64 [1], on the device.

        Returns:
            [1, sequences, heads, head_dim]
        """
        return self.at_step(self._table, layer, position)

    def at_step(self, table: Tensor, layer: int, position: Tensor) -> Tensor:
        """A layer's entry of the step of `position`'s token.

        Args:
            table: as long as the stream's own. [steps, ...]

        Returns:
            [1, ...]
        """
        shift = LAYER_SHIFT * layer
        return table[shift : shift + self.period].index_select(0, position % self.period)


# Selections of which a stated share stays, in place of those that drawn queries make --------------
#
# How much of a selection outlives a turn decides what a method moves, and drawn queries over drawn
# keys leave next to nothing (`device_tier.follow` has what a language model leaves). A method
# scores and selects as ever, so that all its costs stay, and only which units have won is replaced
# (as `workloads.selection_streams` does for the tiers that the host drives).


class StatedUnits:
    """The selections of all layers of one cache, one table on the device.

    Place j of a selection has units of its own, those that are j after a multiple of the
    selection's width: whatever stays and whatever moves, all of them are distinct. There are
    `SEGMENTS / 2 + 1` sets, gone through there and back, so that any two that follow one another
    have `stays` in common. Rows, layers and segments turn where the stream's queries do.
    """

    def __init__(
        self, stream: QueryStream, plan: SlotPlan, *, at_turns: bool, stays: float, seed: int = 0
    ) -> None:
        """Allocate the table; nothing is stated yet.

        Args:
            stream: of the queries that select.
            plan: of the cache.
            at_turns: a selection lasts for a segment; otherwise for a step.
            stays: share of a selection that is in the next one, in [0, 1].
        """
        self._plan, self._stays, self._seed = plan, stays, seed
        device, rows = stream.number.device, plan.batch
        steps = torch.arange(len(stream.number), device=device)[:, None] % SEGMENTS
        number = stream.number if at_turns else steps.expand_as(stream.number)
        number = number.repeat_interleave(rows // number.shape[1], dim=1)
        self._entry = number * rows + torch.arange(rows, device=device)
        size = (SEGMENTS * rows, plan.selected_units)
        self._ids = torch.full(size, -1, dtype=torch.int32, device=device)
        self._stream = stream

    @property
    def num_bytes(self) -> int:
        """Of the tables on the device, which are no cache's."""
        return self._entry.nbytes + self._ids.nbytes

    def state(self, length: int) -> bool:
        """Draw the selections of steps from `length` tokens on, in the tensors that are there.

        Returns:
            Whether there are units enough: twice as many before the window as are selected.
            Otherwise the method's own selections stay.
        """
        plan = self._plan
        width, rows = plan.selected_units, plan.batch
        end = length // plan.group_tokens - plan.window_slots
        choices = (end - plan.sink_slots) // width
        if choices < 2:
            self._ids.fill_(-1)
            return False
        device = self._ids.device
        draw = torch.Generator(device).manual_seed(self._seed)
        size = (rows, width)
        place = torch.arange(width, device=device) + plan.sink_slots
        table = self._ids.view(SEGMENTS, rows, width)
        chosen = torch.randint(choices, size, generator=draw, device=device)
        for number in range(SEGMENTS // 2 + 1):
            if number:
                moved = torch.rand(size, generator=draw, device=device) >= self._stays
                by = torch.randint(1, choices, size, generator=draw, device=device)
                chosen = torch.where(moved, (chosen + by) % choices, chosen)
            table[number] = chosen * width + place
            table[-number % SEGMENTS] = table[number]
        return True

    def write(self, layer: int, position: Tensor, wanted: Wanted) -> None:
        """Put the step's selection in place of what has won.

        Args:
            layer: number of the layer.
            position: int64 [1], on the device.
            wanted: what the method has selected; its `ids` are written over.
        """
        entry = self._stream.at_step(self._entry, layer, position)[0]
        stated = self._ids.index_select(0, entry)
        wanted.ids.copy_(torch.where(stated < 0, wanted.ids, stated))


# Selections by queries of a stated likeness, in place of a random model's own ---------------------


class StreamedIndex(DeviceIndex):
    """A layer's index that sees the stream's queries when it selects; all else is its own, but for
    which units have won where that is stated."""

    def __init__(
        self, inner: DeviceIndex, stream: QueryStream, layer: int,
        stated: StatedUnits | RecordedUnits | None = None,
    ) -> None:  # fmt: skip
        self.inner, self.lse = inner, inner.lse
        self._stream, self._layer, self._stated = stream, layer, stated

    @property
    def ready(self) -> bool:
        """See `DeviceIndex.ready`."""
        return self.inner.ready

    def fit(self, sample: Tensor, positions: Tensor) -> None:
        """See `DeviceIndex.fit`."""
        self.inner.fit(sample, positions)

    @property
    def refits(self) -> bool:
        """See `DeviceIndex.refits`."""
        return self.inner.refits

    def forget_fit(self) -> None:
        """See `DeviceIndex.forget_fit`."""
        self.inner.forget_fit()

    def take(self, keys: Tensor, first_token: int) -> None:
        """See `DeviceIndex.take`."""
        self.inner.take(keys, first_token)

    def begin_decode(self, length: int, clock: StepClock) -> None:
        """See `DeviceIndex.begin_decode`."""
        self.inner.begin_decode(length, clock)

    def streamed_query(self, query: Tensor, clock: StepClock) -> Tensor:
        """What the index sees instead of `query`. [rows, heads of a row, head_dim]"""
        return self._stream.query(self._layer, clock.position).view(query.shape)

    def select(self, query: Tensor, clock: StepClock) -> Wanted:
        """See `DeviceIndex.select`."""
        wanted = self.inner.select(self.streamed_query(query, clock), clock)
        if self._stated is not None:
            self._stated.write(self._layer, clock.position, wanted)
        return wanted

    def kept(self) -> Wanted | None:
        """See `DeviceIndex.kept`."""
        return self.inner.kept()

    def put(self, keys: Tensor, clock: StepClock) -> None:
        """See `DeviceIndex.put`."""
        self.inner.put(keys, clock)

    def settle(self, length: int) -> None:
        """See `DeviceIndex.settle`."""
        self.inner.settle(length)

    def crop(self, length: int) -> None:
        """See `DeviceIndex.crop`."""
        self.inner.crop(length)

    def take_rows_from(self, other: DeviceIndex, rows: Tensor) -> None:
        """See `DeviceIndex.take_rows_from`."""
        assert isinstance(other, StreamedIndex)
        self.inner.take_rows_from(other.inner, rows)


def lay_stream(
    layers: Sequence[object], stream: QueryStream, stated: StatedUnits | RecordedUnits | None = None
) -> int:
    """Put the stream before the index of every layer that selects on the device.

    To be called once, before the first decode step (a CUDA graph keeps what it has recorded).

    Args:
        stated: what has won, if that is not left to the queries.

    Returns:
        How many layers select.
    """
    selecting = selecting_layers(layers)
    for number, layer in selecting:
        assert layer.index is not None
        layer.index = StreamedIndex(layer.index, stream, number, stated)
    return len(selecting)


def selecting_layers(layers: Sequence[object]) -> list[tuple[int, DeviceLayer]]:
    """The layers that select on the device, with their numbers."""
    return [
        (number, layer) for number, layer in enumerate(layers)
        if isinstance(layer, DeviceLayer) and layer.index is not None
    ]  # fmt: skip
