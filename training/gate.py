"""A gate early in a run: a seed that has not found what the rest needs is not worth its time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.core.errors import ConfigError

REFUSED = 4
"""Exit status of a run that its gate has ended."""


class SeedRefused(ConfigError):
    """A run's seed has not found what the gate asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """What must have been found by a step."""

    step: int
    """The first losses that are told from this step on are looked at."""
    task: str
    loss: float
    """Nats a token that the task may have at most."""

    def scaled(self, factor: float) -> "Gate":
        """Of a run with `factor` times as many steps."""
        return replace(self, step=max(1, round(self.step * factor)))

    def check(self, step: int, losses: Mapping[str, float]) -> bool:
        """Whether it lies behind the run now.

        Args:
            step: of the run.
            losses: by task, nats a token, of the steps before; tasks that were asked.

        Raises:
            SeedRefused: the task's loss is higher than that, or not a number.
        """
        if step < self.step or self.task not in losses:
            return False
        if not losses[self.task] <= self.loss:
            raise SeedRefused(
                f"at step {step:,} {self.task} has {losses[self.task]:.2f} nats a token, more than "
                f"the {self.loss:g} of runs that learn the rest: give another --seed"
            )
        return True
