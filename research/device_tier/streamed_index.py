"""StreamedIndex: selections by queries of a stated likeness, in place of a random model's own."""

from collections.abc import Sequence

from torch import Tensor

from penstock.engine.device_tier.device_index import DeviceIndex, StepClock, Wanted
from penstock.engine.device_tier.device_layer import DeviceLayer
from research.device_tier.query_stream import QueryStream
from research.device_tier.stated_units import StatedUnits


class StreamedIndex(DeviceIndex):
    """A layer's index that sees the stream's queries when it selects; all else is its own, but for
    which units have won where that is stated."""

    def __init__(
        self, inner: DeviceIndex, stream: QueryStream, layer: int,
        stated: StatedUnits | None = None,
    ) -> None:  # fmt: skip
        self.inner = inner
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
    layers: Sequence[object], stream: QueryStream, stated: StatedUnits | None = None
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
