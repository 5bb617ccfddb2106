"""How sparse attention is: the share of tokens that holds a share of the probability."""

import torch
from torch import Tensor

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Shares of the probability for which tokens are counted."""
PARTS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of the tokens whose probability is added up."""

_SLACK = 1e-6
"""Of rounding: what lacks so little to a level has reached it."""


def tokens_that_hold(shares: Tensor, visible: Tensor, levels: tuple[float, ...]) -> Tensor:
    """The fewest tokens that hold a share of the probability, as a share of all visible tokens.

    Source: the sparsity that KVSwap (appendix A.2: "critical KV entries are sparse, typically
    comprising less than 5% of the long context") and HillInfer (section 3.1: "typically less than
    20% of historical tokens significantly influencing the final output") build upon.

    Differences: neither paper says when a token counts as critical; here it is by probability.

    Args:
        shares: of each distribution; every one sums to 1. [batch, heads, tokens]
        visible: False at padding. bool [batch, tokens]
        levels: shares of the probability, 0 to 1.

    Returns:
        Above 0, at most 1. float64 [batch, heads, levels]
    """
    held = shares.double().sort(dim=-1, descending=True).values.cumsum(dim=-1)
    wanted = torch.tensor(levels, dtype=torch.float64, device=shares.device) - _SLACK
    wanted = wanted.expand(*held.shape[:-1], len(levels)).contiguous()
    counts = torch.searchsorted(held, wanted) + 1
    counts = counts.clamp_max(shares.shape[-1])
    return counts.double() / visible.sum(dim=-1)[:, None, None]


def mass_of_best(shares: Tensor, visible: Tensor, parts: tuple[float, ...]) -> Tensor:
    """The probability that the best tokens hold, for shares of all visible tokens.

    A share that is no whole number of tokens lies on the line between its neighbours.

    Args:
        shares: as in `tokens_that_hold`.
        visible: as in `tokens_that_hold`.
        parts: shares of the tokens, 0 to 1.

    Returns:
        0 to 1. float64 [batch, heads, parts]
    """
    held = shares.double().sort(dim=-1, descending=True).values.cumsum(dim=-1)
    held = torch.nn.functional.pad(held, (1, 0))
    wanted = torch.tensor(parts, dtype=torch.float64, device=shares.device)
    places = visible.sum(dim=-1, keepdim=True).double() * wanted
    places = places.clamp_max(shares.shape[-1]).unsqueeze(1).expand(*held.shape[:-1], len(parts))
    below = places.floor().long()
    above = (below + 1).clamp_max(shares.shape[-1])
    low, high = held.gather(-1, below), held.gather(-1, above)
    return low + (places - below) * (high - low)
