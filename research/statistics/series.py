"""Series: figures of every step, layer and sequence, and their means over what counts."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Series:
    """Collects named figures step by step; all that is kept of a step but for a few queries."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        self._live: list[Tensor] = []

    def add(self, live: Tensor, layers: Sequence[Mapping[str, Tensor]]) -> None:
        """Take one step.

        Args:
            live: rows that count. bool [batch]
            layers: each layer's figures by name, the same names at every step; NaN where there is
                nothing to say. Each [batch, figures]
        """
        self._live.append(live.cpu())
        for name in layers[0]:
            stacked = torch.stack([layer[name].cpu().double() for layer in layers])
            self._parts.setdefault(name, []).append(stacked)

    @property
    def live(self) -> Tensor:
        """bool [steps, batch]"""
        return torch.stack(self._live)

    def __getitem__(self, name: str) -> Tensor:
        """float64 [steps, layers, batch, figures]"""
        return torch.stack(self._parts[name])

    def means(self, name: str) -> list[list[float | None]]:
        """By layer and figure, over the steps and rows that count; None where nothing is said."""
        values = self[name]
        counted = self.live[:, None, :, None] & ~values.isnan()
        sums = torch.where(counted, values, 0.0).sum(dim=(0, 2))
        return plain(sums / counted.sum(dim=(0, 2)))

    def of_row(self, name: str, layer: int, row: int) -> list[float]:
        """The first figure of one layer and row at each step that counts, the first step left out:
        what compares a step with the step before."""
        values: list[float] = self[name][:, layer, row, 0][self.live[:, row]][1:].tolist()
        return values


def plain(values: Tensor) -> list[list[float | None]]:
    """A matrix for JSON: NaN becomes None, and six digits do."""
    return [[None if x != x else float(f"{x:.6g}") for x in row] for row in values.tolist()]


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of what there is."""
    there = [value for value in values if value is not None and value == value]
    return sum(there) / len(there) if there else None


def column(rows: Sequence[Sequence[float | None]], place: int) -> list[float | None]:
    """One figure of every layer."""
    return [row[place] for row in rows]
