"""QueryStream: queries of a stated likeness, from step to step and across a turn."""

import torch
from torch import Tensor

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
