"""pool_attention(): one query per row attends to every place of a pool on the device."""

from typing import Literal, overload

import torch
from torch import Tensor

from penstock.kernels.attention import attention_block
from penstock.kernels.device.available import uses_triton
from penstock.kernels.slot_codes import numbers_of


@overload
def pool_attention(
    query: Tensor,
    tokens: Tensor,
    mask: Tensor,
    scaling: float,
    out: Tensor | None = None,
    *,
    codes: Tensor | None = None,
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
    codes: Tensor | None = None,
    with_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def pool_attention(
    query: Tensor,
    tokens: Tensor,
    mask: Tensor,
    scaling: float,
    out: Tensor | None = None,
    *,
    codes: Tensor | None = None,
    with_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with one query per row over slots, sinks and window, in one softmax.

    The device's form of `kernels.decode_attention.decode_attention`: the places of a row are split
    over programs, whose parts are combined by their log-sum-exp (flash-decoding).

    Args:
        query: [rows, heads, head_dim]; heads of one KV head side by side.
        tokens: the pool, contiguous. [rows, places, 2, kv_heads, head_dim]
        mask: additive, 0 or minus infinity. [rows, coded_places + places]
        scaling: factor on the logits.
        out: where to write the result, contiguous. [rows, heads, head_dim]
        codes: places in 8 bits (`kernels.slot_codes`) that lie before `tokens`, and whose part of
            the mask is the first one; contiguous. uint8 [rows, coded_places, coded_token_bytes]
        with_lse: also give the log-sum-exp of the logits.

    Returns:
        [rows, heads, head_dim] in the query's dtype (`out` itself where given), zero for a row
        that sees nothing; with `with_lse` also float32 [rows, heads], minus infinity there.
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if uses_triton(query):
        from penstock.kernels.device.attention_triton import pool_attention_triton

        lse = pool_attention_triton(query, tokens, mask, scaling, out, codes)
    else:
        lse = pool_attention_twin(query, tokens, mask, scaling, out, codes)
    return (out, lse) if with_lse else out


def pool_attention_twin(
    query: Tensor, tokens: Tensor, mask: Tensor, scaling: float, out: Tensor,
    codes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The meaning of `pool_attention` by `attention_block`; writes `out`, gives log-sum-exp."""
    if codes is not None:
        numbers = numbers_of(codes, tokens.shape[3], tokens.shape[4], tokens.dtype)
        hidden = mask[:, : codes.shape[1], None, None, None] != 0
        tokens = torch.cat([numbers.masked_fill_(hidden, 0.0), tokens], dim=1)
    keys, values = tokens[:, :, 0].transpose(1, 2), tokens[:, :, 1].transpose(1, 2)
    result, lse = attention_block(query[:, :, None], keys, values, scaling=scaling, key_mask=mask)
    out.copy_(result[:, :, 0].masked_fill(lse.isneginf(), 0.0))
    return lse[:, :, 0]
