"""A run that ends in time: rates by the clock, and a last stage as long as the time allows.

Stages before the last have the steps that the settings (and `--scale`) give them, because data are
made ahead by step. When the time is up the rates have come down to zero. How many steps a run has
depends on the machine then: it cannot be repeated bit by bit.
"""

import math
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.core.errors import ConfigError
from training.settings import RunSettings

_TIMES = 8
_Run = TypeVar("_Run", bound=RunSettings)


@dataclass(frozen=True, slots=True)
class Fit:
    """When a run ends, and how its rates come down."""

    total_s: float
    """Of training, all sittings: compiling and glances counted, loading not."""
    decay_s: float
    """At the end, of decay to zero."""
    warmup_steps: int
    decay_power: float
    """See `Optimizer.decay_power`."""

    @classmethod
    def of(cls, settings: RunSettings, total_s: float) -> "Fit":
        """The settings' schedule in a given time.

        Raises:
            ConfigError: no time.
        """
        if total_s <= 0:
            raise ConfigError(f"--fit {total_s / 60:g} must be above 0")
        share = min(1.0, settings.optimizer.decay_steps / settings.steps)
        plan = settings.optimizer
        return cls(total_s, total_s * share, plan.warmup_steps, plan.decay_power)

    def rate(self, step: int, spent_s: float) -> float:
        """Factor of the learning rates in a step (from 0) after so many seconds."""
        rising = (step + 1) / self.warmup_steps if self.warmup_steps else 1.0
        left = max(0.0, self.total_s - spent_s)
        falling = left / self.decay_s if self.decay_s else 1.0
        return min(1.0, rising, math.pow(falling, self.decay_power))


def stretched(settings: _Run) -> _Run:
    """The same settings with more of the last stage than there will be time for."""
    *stages, last = settings.stages
    return replace(settings, stages=(*stages, replace(last, steps=settings.steps * _TIMES)))
