"""A policy as another package has it: pages by the mean of their keys and how far they spread."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.scored_policy import ScoredPolicy


@dataclass(frozen=True, kw_only=True)
class Spread(ScoredPolicy):
    """Pages whose mean key, or a key about as far from it as most are, agrees with the query."""

    name: ClassVar[str] = "acme-spread"
    per_head: ClassVar[bool] = True

    weight: float = 1.0
    """Standard deviations from the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight < 0:
            raise ConfigError(f"weight={self.weight} must not be negative")

    def summary_bytes(self, shape: KVShape) -> int:
        """Two vectors of a key's size."""
        return 2 * shape.joint_dim * shape.dtype.itemsize

    def summarise(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Mean and standard deviation of each component."""
        return keys.mean(dim=3), keys.std(dim=3, correction=0)

    def score(self, summary: tuple[Tensor, ...], query: Tensor) -> Tensor:
        """The mean's product, and `weight` deviations towards the query."""
        mean, deviation = summary
        return mean @ query + self.weight * (deviation @ query.abs())
