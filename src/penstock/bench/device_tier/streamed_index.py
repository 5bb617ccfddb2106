"""StreamedIndex: selections by queries of a stated likeness, in place of a random model's own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.indexes.device_tier.base import DeviceIndex, StepClock, Wanted
from penstock.runtime.device_tier.device_layer import DeviceLayer

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
        number = (step + phase) // segment % SEGMENTS  # no turn where the table begins anew
        drawn = normal(SEGMENTS).to(dtype)
        directions = drawn[number, torch.arange(sequences, device=device)]
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
        shift = LAYER_SHIFT * layer
        table = self._table[shift : shift + self.period]
        return table.index_select(0, position % self.period)


class StreamedIndex(DeviceIndex):
    """A layer's index that sees the stream's queries when it selects; all else is its own."""

    def __init__(self, inner: DeviceIndex, stream: QueryStream, layer: int) -> None:
        self.inner = inner
        self._stream, self._layer = stream, layer

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
        return self.inner.select(self.streamed_query(query, clock), clock)

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


def lay_stream(layers: Sequence[object], stream: QueryStream) -> int:
    """Put the stream before the index of every layer that selects on the device.

    To be called once, before the first decode step (a CUDA graph keeps what it has recorded).

    Returns:
        How many layers select.
    """
    count = 0
    for number, layer in enumerate(layers):
        if isinstance(layer, DeviceLayer) and layer.index is not None:
            layer.index = StreamedIndex(layer.index, stream, number)
            count += 1
    return count
