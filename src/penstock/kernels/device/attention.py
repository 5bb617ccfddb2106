"""pool_attention(): one query per row attends to every place of a pool on the device."""

from typing import Literal, overload

import torch
from torch import Tensor

from penstock.kernels.attention import attention_block
from penstock.kernels.device.available import uses_triton


@overload
def pool_attention(
    query: Tensor,
    tokens: Tensor,
    mask: Tensor,
    scaling: float,
    out: Tensor | None = None,
    *,
    with_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def pool_attention(
    query: Tensor,
    tokens: Tensor,
    mask: Tensor,
    scaling: float,
    out: Tensor | None = None,
    *,
    with_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def pool_attention(
    query: Tensor,
    tokens: Tensor,
    mask: Tensor,
    scaling: float,
    out: Tensor | None = None,
    *,
    with_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with one query per row over slots, sinks and window, in one softmax.

    The device's form of `kernels.decode_attention.decode_attention`: the places of a row are split
    over programs, whose parts are combined by their log-sum-exp (flash-decoding).

    Args:
        query: [rows, heads, head_dim]; heads of one KV head side by side.
        tokens: the pool, contiguous. [rows, places, 2, kv_heads, head_dim]
        mask: additive, 0 or minus infinity. [rows, places]
        scaling: factor on the logits.
        out: where to write the result, contiguous. [rows, heads, head_dim]
        with_lse: also give the log-sum-exp of the logits.

    Returns:
        [rows, heads, head_dim] in the query's dtype (`out` itself where given), zero for a row
        that sees nothing; with `with_lse` also float32 [rows, heads], minus infinity there.
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if uses_triton(query):
        from penstock.kernels.device.attention_triton import pool_attention_triton

        lse = pool_attention_triton(query, tokens, mask, scaling, out)
    else:
        lse = pool_attention_twin(query, tokens, mask, scaling, out)
    return (out, lse) if with_lse else out


def pool_attention_twin(
    query: Tensor, tokens: Tensor, mask: Tensor, scaling: float, out: Tensor
) -> Tensor:
    """The meaning of `pool_attention` by `attention_block`; writes `out`, gives log-sum-exp."""
    keys, values = tokens[:, :, 0].transpose(1, 2), tokens[:, :, 1].transpose(1, 2)
    result, lse = attention_block(query[:, :, None], keys, values, scaling=scaling, key_mask=mask)
    out.copy_(result[:, :, 0].masked_fill(lse.isneginf(), 0.0))
    return lse[:, :, 0]
