"""Quantisers: what is left of components, or of whole keys, once they are stored in a few bits."""

from collections.abc import Callable

import torch
from torch import Tensor

Quantiser = Callable[[Tensor], Tensor]
"""From components to what their codes stand for. float32 [tokens, components]"""
_FINE_PART = 16
"""Of the columns of `in_columns`, one in so many is the second of a component."""
_GAUSSIAN = {
    1: (0.7979,),
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
"""Levels of the least squared error for a normal distribution (Max 1960, table I), by bits."""


def eight_bits(components: Tensor) -> Tensor:
    """Whole multiples of a step, up to 127; a component's largest magnitude has that one."""
    step = components.abs().amax(0).clamp_min(1e-12) / 127
    levels: Tensor = (components / step).round()
    return levels * step


def four_bits(components: Tensor) -> Tensor:
    """Sixteen levels at half steps, symmetric around zero."""
    step = components.abs().amax(0).clamp_min(1e-12) / 7.5
    levels: Tensor = (components / step).floor().clamp(-8, 7) + 0.5
    return levels * step


def components_of(columns: int) -> int:
    """Components that so many 4-bit columns hold when the strongest take two each."""
    return columns - columns // _FINE_PART


def in_columns(columns: int) -> Quantiser:
    """Columns of 4 bits; the strongest components have two, which are one of 8 bits."""
    fine = columns - components_of(columns)

    def quantise(components: Tensor) -> Tensor:
        strong, rest = components[:, :fine], components[:, fine:]
        return torch.cat([eight_bits(strong), four_bits(rest)], dim=1)

    return quantise


def by_channel(keys: Tensor, bits: int) -> Tensor:
    """Whole keys with a scale for each component. [kv_heads, tokens, head_dim]"""
    half = 1 << (bits - 1)
    step = keys.abs().amax(1, keepdim=True) / (half - 0.5)
    levels = (keys / step).floor().clamp(-half, half - 1) + 0.5
    return levels * step


def after_random_rotation(keys: Tensor, bits: int) -> Tensor:
    """Whole keys, centred and turned at random, in levels for a normal distribution.

    A token's keys have a length of 16 bits beside the codes.

    Args:
        keys: [kv_heads, tokens, head_dim]
    """
    dim = keys.shape[-1]
    drawn = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0))
    rotation = torch.linalg.qr(drawn).Q
    mean = keys.mean(1, keepdim=True)
    turned = (keys - mean) @ rotation
    size = turned.norm(dim=-1, keepdim=True) / dim**0.5
    upper = torch.tensor(_GAUSSIAN[bits])
    levels = torch.cat([-upper.flip(0), upper])
    unit = turned / size
    found = levels[torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)]
    longer = (found * unit).sum(-1, keepdim=True) / found.square().sum(-1, keepdim=True)
    rebuilt: Tensor = found * longer * size @ rotation.T + mean
    return rebuilt
