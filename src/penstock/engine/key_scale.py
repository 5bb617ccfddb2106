"""key_scale(): how loud the queries are that will meet a component of the keys."""

import torch
from torch import Tensor

from penstock.kernels.key_rotation import KeyRotation

FLOOR = 0.3
"""Part of a KV head's mean square that is added to each component's."""


def mean_squares(queries: Tensor, kv_heads: int) -> Tensor:
    """Of each component, over the tokens and the query heads of a KV head.

    Args:
        queries: post-RoPE. [batch, heads, tokens, head_dim]

    Returns:
        float32 [kv_heads, head_dim]
    """
    batch, _, tokens, dim = queries.shape
    squares = queries.float().square().reshape(batch, kv_heads, -1, tokens, dim)
    return squares.mean(dim=(0, 2, 3))


def key_scale(squares: Tensor, rotation: KeyRotation) -> Tensor:
    """What keys are multiplied by, and queries divided by, before a basis is fitted.

    With it, the strongest components of the keys are those that change the logits most: a product
    is a sum over components of the query's times the key's. Components that turn into one another
    have one scale, so that keys are scaled and turned in either order.

    Source: none of the papers weights keys. Measured on pretrained models: at the same bytes it
    finds what half as many bytes more do (research/notes/2026-11-26-index-study.md).

    Args:
        squares: see `mean_squares`. [kv_heads, head_dim]

    Returns:
        float32 [kv_heads * head_dim], about 1; all of it 1 where there are no queries to speak of.
    """
    pairs = rotation.pairs
    turning = squares[:, : 2 * pairs]
    if rotation.interleaved:
        means = turning.reshape(-1, pairs, 2).mean(2).repeat_interleave(2, dim=1)
    else:
        means = turning.reshape(-1, 2, pairs).mean(1).repeat(1, 2)
    means = torch.cat([means, squares[:, 2 * pairs :]], dim=1)
    means = means + FLOOR * means.mean(dim=1, keepdim=True)
    whole = means.mean()
    if not bool(torch.isfinite(means).all()) or not bool((means > 1e-6 * whole).all()):
        return torch.ones(squares.numel(), device=squares.device)
    return (means / whole).sqrt().flatten()
