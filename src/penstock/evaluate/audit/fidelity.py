"""Measures of an audit: attention mass captured, recall of the top tokens."""

import torch
from torch import Tensor


def attention_shares(
    query: Tensor, keys: Tensor, visible: Tensor | None, *, scaling: float,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Full attention's probability of every token, the mean over the query heads of a KV head.

    A learned sink logit (gpt-oss) is left out: the shares of the tokens sum to 1.

    Args:
        query: post-RoPE. [batch, num_heads, head_dim]
        keys: post-RoPE, of all tokens. [batch, kv_heads, tokens, head_dim]
        visible: False at padding; None when nothing is padded. bool [batch, tokens]
        scaling: factor on the logits, before `softcap`.

    Returns:
        float32 [batch, kv_heads, tokens]
    """
    batch, kv_heads, _, head_dim = keys.shape
    grouped = query.float().reshape(batch, kv_heads, -1, head_dim)
    logits = torch.matmul(grouped, keys.float().transpose(2, 3)) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None, None], float("-inf"))
    return torch.softmax(logits, dim=-1).mean(dim=2)


def captured_mass(shares: Tensor, attended: Tensor) -> Tensor:
    """Share of full attention's probability that falls on what was attended to.

    Args:
        shares: see `attention_shares`. [batch, kv_heads, tokens]
        attended: bool [batch, kv_heads or 1, tokens]

    Returns:
        The mean over query heads, 0 to 1. [batch]
    """
    return (shares * attended).sum(dim=2).mean(dim=1)


def recall_of_top(shares: Tensor, attended: Tensor, visible: Tensor, top: int) -> Tensor:
    """Share of the tokens with the most attention among those that were attended to.

    Where all heads attend to the same tokens, the top ones are those of the layer (probabilities
    of all heads added); where each KV head has its own, the top ones of each, and the mean.

    Args:
        shares: see `attention_shares`. [batch, kv_heads, tokens]
        attended: bool [batch, kv_heads or 1, tokens]
        visible: False at padding, which is never among the top. bool [batch, tokens]
        top: how many tokens, or all visible ones if there are fewer.

    Returns:
        0 to 1. [batch]
    """
    worth = shares if attended.shape[1] > 1 else shares.sum(dim=1, keepdim=True)
    worth = worth.masked_fill(~visible[:, None], -1.0)
    best = worth.topk(min(top, worth.shape[2]), dim=2)
    counted = best.values >= 0
    found = attended.gather(2, best.indices) & counted
    return (found.sum(dim=2) / counted.sum(dim=2)).mean(dim=1)
