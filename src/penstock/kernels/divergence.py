"""How far one next-token distribution is from another."""

import torch
from torch import Tensor


def kl_divergence(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) of next-token distributions, in nats.

    Args:
        full, other: log-probabilities. [batch, vocabulary]

    Returns:
        Not negative. float64 [batch]
    """
    # Summed to 1 anew: what float32 left over would show beside small divergences.
    left, right = (torch.log_softmax(each.double(), dim=-1) for each in (full, other))
    terms = torch.where(left.isinf(), 0.0, left.exp() * (left - right))
    return terms.sum(dim=-1).clamp_min(0.0)
