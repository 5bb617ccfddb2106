"""Rotation: takes the rotary embedding off queries and keys, and puts it back on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS = 8
"""Rounding steps of the model's dtype by which two ways to a query may differ."""


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding whose pairs are the two halves of the leading components."""

    cos: Tensor
    """Of every place of the cache, float32. [batch or 1, tokens, rotated components]"""
    sin: Tensor
    """Like `cos`."""

    def on(self, vectors: Tensor, places: slice = slice(None)) -> Tensor:
        """Rotate.

        Args:
            vectors: pre-RoPE. [batch, heads, tokens, dim]
            places: of the tokens in the cache.

        Returns:
            float32, post-RoPE, of the same shape.
        """
        return _turned(vectors, self.cos[:, places], self.sin[:, places])

    def off(self, vectors: Tensor, places: slice = slice(None)) -> Tensor:
        """Undo `on`; some models scale as well, which is undone too."""
        cos, sin = self.cos[:, places], self.sin[:, places]
        square = cos.square() + sin.square()
        return _turned(vectors, cos / square, -sin / square)

    def row(self, number: int, first: int) -> "Rotation":
        """The rotation of one sequence of the batch, from a place on."""
        number = min(number, len(self.cos) - 1)
        return Rotation(
            self.cos[number : number + 1, first:], self.sin[number : number + 1, first:]
        )


def _turned(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    head = vectors[..., :width].float()
    left, right = head.chunk(2, dim=-1)
    turned = head * cos.unsqueeze(1) + torch.cat([-right, left], dim=-1) * sin.unsqueeze(1)
    return torch.cat([turned, vectors[..., width:].float()], dim=-1)


def find_rotation(
    tables: Sequence[tuple[Tensor, Tensor]], plain: Tensor, rotated: Tensor
) -> Rotation | None:
    """The rotation of a model, if it is of this kind: tried on a query of the newest token.

    Args:
        tables: cos and sin as the model gave them to its layers, pieces in order. Each [batch or 1,
            tokens, components or half of them]
        plain: what the model computes without rotation. [batch, heads, dim]
        rotated: the same with it.

    Returns:
        None where there is no rotary embedding or `off` does not undo it.
    """
    if not tables:
        return None
    cos, sin = (torch.cat([pair[i].float() for pair in tables], dim=1) for i in (0, 1))
    limit = _STEPS * torch.finfo(rotated.dtype).eps * float(plain.abs().max())
    for copies in (1, 2):  # some models keep one half, the other being the same
        rotation = Rotation(torch.cat([cos] * copies, dim=-1), torch.cat([sin] * copies, dim=-1))
        if rotation.cos.shape[-1] > plain.shape[-1] or rotation.cos.shape[-1] % 2:
            continue
        undone = rotation.off(rotated.unsqueeze(2), slice(-1, None)).squeeze(2)
        if (undone - plain.float()).abs().max().item() <= limit:
            return rotation
    return None
