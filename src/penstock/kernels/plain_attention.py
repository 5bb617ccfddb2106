"""Attention over a block of keys in plain PyTorch, and blocks merged into one softmax."""

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


def attention_twin(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over one block of keys and say how much of the softmax it carries.

    Args:
        query: [batch, num_heads, queries, head_dim], any floating dtype.
        keys: [batch, kv_heads, tokens, head_dim]; heads are shared by consecutive query heads.
        values: like `keys`, perhaps of another width.
        scaling: factor on the logits, before `softcap`.
        mask: bool, True where a query may look; or floating, which is added to the logits.
            Broadcastable to [batch, heads, queries, tokens].
        causal: query i sees keys up to i; needs as many queries as tokens.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).

    Returns:
        The block's output, float32 [batch, num_heads, queries, value_width], zero where a query
        sees nothing; and the log-sum-exp of its logits, float32 [batch, num_heads, queries], minus
        infinity there.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    grouped = query.reshape(batch, kv_heads, num_heads // kv_heads, num_queries, head_dim)
    logits = torch.matmul(grouped.float(), keys.float().unsqueeze(2).transpose(-1, -2)) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.reshape(batch, num_heads, num_queries, tokens)
    if causal:
        visible = torch.ones(num_queries, tokens, dtype=torch.bool, device=query.device).tril()
        logits = logits.masked_fill(~visible, NEGATIVE_INFINITY)
    if mask is not None and mask.is_floating_point():
        logits = logits + mask
    elif mask is not None:
        logits = logits.masked_fill(~mask, NEGATIVE_INFINITY)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    weights = weights.reshape(batch, kv_heads, -1, num_queries, tokens)
    out = torch.matmul(weights, values.float().unsqueeze(2))
    return out.reshape(batch, num_heads, num_queries, values.shape[-1]), lse


def add_attention_sink(out: Tensor, lse: Tensor, sink_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Add a learned logit per head that takes part in the softmax but carries no value (gpt-oss).

    Args:
        out: [batch, heads, queries, head_dim], float32.
        lse: [batch, heads, queries], float32.
        sink_logits: [heads] or [batch, heads].
    """
    sink = sink_logits.float().view(-1, out.shape[1], 1)
    total = torch.logaddexp(lse, sink)
    return out * torch.exp(lse - total).unsqueeze(-1), total
