"""DeviceSteps: what the layers of the device tier share from step to step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.core.slot_plan import SlotPlan
from penstock.core.stats import PhaseStats
from penstock.indexes.device_tier.base import SETTLE_STEPS, StepClock
from penstock.runtime.device_tier.device_layer import DeviceLayer
from penstock.runtime.resident_layer import ResidentLayer


class DeviceSteps:
    """Keeps the clock right and lets the layers tidy up between steps."""

    def __init__(self, plan: SlotPlan, device: torch.device) -> None:
        self.clock = StepClock(plan, device)
        self._layers: list[DeviceLayer] = []

    def watch(self, layers: Sequence[object]) -> None:
        """Take the layers over."""
        self._layers = [layer for layer in layers if isinstance(layer, DeviceLayer)]

    def begin(self, length: int) -> None:
        """The step of the token at position `length` begins; a CUDA graph may be recording."""
        self.settle(length)
        self.clock.tick()

    def settle(self, length: int) -> None:
        """Let the indexes tidy up, every so many steps; never while a CUDA graph is recorded."""
        if length % SETTLE_STEPS == 0:
            for layer in self._layers:
                layer.settle()

    def end(self, length: int, *, step: bool = False) -> None:
        """All layers hold `length` tokens.

        Args:
            step: one token was decoded; a CUDA graph may be recording.
        """
        if step:
            self.clock.advance()
        else:
            self.clock.position.fill_(length)

    def take_rows_from(self, other: "DeviceSteps", rows: Tensor, length: int) -> None:
        """The batch is now rows `rows` of what `other` (perhaps itself) has."""
        self.clock.set_start(other.clock.start[rows].long())
        self.end(length)

    def count_into(self, decode: PhaseStats) -> None:
        """Bring the counters of steps that the host did not see up to date."""
        for layer in self._layers:
            layer.count_into(decode)


def make_ready(layers: Sequence[object]) -> bool:
    """Whether every layer's next decode step is one that a CUDA graph may hold."""
    tiered = [layer for layer in layers if isinstance(layer, DeviceLayer)]
    whole = any(isinstance(layer, ResidentLayer) for layer in layers)
    return bool(tiered) and not whole and all(layer.prepare_step() for layer in tiered)
