"""Choice: the values of one hyperparameter that are worth trying, best quality first."""

from dataclasses import dataclass
from typing import TypeAlias

ChoiceValue: TypeAlias = int | float | str | None
"""A value of a hyperparameter; None leaves it to the policy's own plan."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One field of a policy, and what a search may put there."""

    field: str
    """Name of the field."""
    values: tuple[ChoiceValue, ...]
    """From the best quality to the fastest or leanest. None, where it stands for the best that the
    budget holds, comes first; where it stands for a value, it is in that value's place."""
    meaning: str
    """What the field decides, in a few words."""

    def __post_init__(self) -> None:
        assert self.values, f"{self.field} has no values"
        assert len(set(self.values)) == len(self.values), f"{self.field} has a value twice"
