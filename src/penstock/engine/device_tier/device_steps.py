"""DeviceSteps: what the layers of the device tier share from step to step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.core.on_device import on_device
from penstock.core.slot_plan import SlotPlan
from penstock.core.stats import PhaseStats
from penstock.engine.attention_call import not_finite
from penstock.engine.device_tier.device_index import SETTLE_STEPS, StepClock
from penstock.engine.device_tier.streams import choosing_stream
from penstock.engine.layer import Layer


class DeviceSteps:
    """Keeps the clock right and lets the layers tidy up between steps."""

    def __init__(self, plan: SlotPlan, device: torch.device) -> None:
        self.clock, self._device = StepClock(plan, device), device
        self._layers: Sequence[Layer] = ()
        self._begun_at: int | None = None
        self._inputs: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = choosing_stream(device)

    def watch(self, layers: Sequence[Layer]) -> None:
        """Take the layers over."""
        self._layers = layers

    def begin(self, length: int) -> None:
        """The step of the token at position `length` begins, if it has not; a CUDA graph may be
        recording."""
        if self._begun_at != length:
            with on_device(self._device):
                self.settle(length)
                self.clock.tick()
            self._begun_at = length

    @contextmanager
    def choosing(self, length: int, *inputs: Tensor) -> Iterator[None]:
        """Queue what follows beside the step of the token at position `length`, behind what was
        queued so far; on a CPU it simply runs.

        Args:
            inputs: what is read there; kept until the step is over.
        """
        self.begin(length)
        self._inputs += inputs
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def forget_recording(self) -> None:
        """Nothing has run of a step that was recorded, as far as that went: it begins again."""
        self._begun_at = None
        self._inputs.clear()
        for layer in self._layers:
            layer.forget_recording()

    def replayed(self) -> None:
        """The step that began has run, as CUDA graphs that have advanced the clock."""
        self._begun_at = None

    def settle(self, length: int) -> None:
        """Let the indexes tidy up, every so many steps; never while a CUDA graph is recorded."""
        if length % SETTLE_STEPS == 0:
            for layer in self._layers:
                layer.settle()

    def end(self, length: int, *, step: bool = False) -> None:
        """All layers hold `length` tokens.

        Args:
            step: one token was decoded; a CUDA graph may be recording.

        Raises:
            CacheStateError: keys of the pass are not finite.
        """
        self._begun_at = None
        self._inputs.clear()
        if step:
            self.clock.advance()
            return
        self.clock.position.fill_(length)
        self._require_finite()

    def _require_finite(self) -> None:
        finite, self.clock.finite = self.clock.finite, {}
        if not finite:
            return
        found = torch.stack([*finite.values()]).tolist()  # one wait, not one a layer
        for layer, is_finite in zip(finite, found, strict=True):
            if not is_finite:
                raise not_finite(layer)

    def take_rows_from(self, other: "DeviceSteps", rows: Tensor, length: int) -> None:
        """The batch is now rows `rows` of what `other` (perhaps itself) has."""
        self.clock.set_start(other.clock.start[rows].long())
        self.end(length)

    def count_into(self, decode: PhaseStats) -> None:
        """Bring the counters of steps that the host did not see up to date."""
        for layer in self._layers:
            layer.count_into(decode)


def make_ready(layers: Sequence[Layer]) -> bool:
    """Whether every layer's next decode step is one that a CUDA graph may hold."""
    return bool(layers) and all(layer.is_recordable and layer.prepare_step() for layer in layers)
