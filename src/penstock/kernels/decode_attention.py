"""decode_attention(): one new token attends to a whole pool in one softmax."""

import torch
from torch import Tensor

from penstock.kernels.attention import attention_block
from penstock.kernels.native.compiled import kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES

_MOST_OUTPUTS = 1 << 15
"""Floats of one row's output; the compiled kernel sums them on the stack."""


def decode_attention(
    query: Tensor, tokens: Tensor, mask: Tensor, scaling: float, lse: Tensor | None = None
) -> Tensor:
    """Attend with one query per row; the twin of `decode_attention_twin`.

    Compiled for host memory: it reads the pool once, in the order in which it lies.

    Args:
        query: [batch, num_heads, 1, head_dim]
        tokens: a pool, keys and values side by side. [batch, places, 2, kv_heads, head_dim]
        mask: additive, 0 or minus infinity, in the query's dtype; every row sees something.
            [batch, places]
        scaling: factor on the logits.
        lse: receives the log-sum-exp of each head's logits; contiguous. float32 [batch, num_heads]

    Returns:
        [batch, num_heads, 1, head_dim], in the query's dtype or float32.
    """
    compiled = kernel("decode_attention") if query.device.type == "cpu" else None
    batch, num_heads, _, head_dim = query.shape
    places, kv_heads = tokens.shape[1], tokens.shape[3]
    if (
        compiled is None
        or head_dim % 16
        or num_heads * head_dim > _MOST_OUTPUTS
        or query.dtype not in DTYPE_CODES
        or not query.dtype == tokens.dtype == mask.dtype
        or not tokens.is_contiguous()
        or tokens.shape != (batch, places, 2, kv_heads, head_dim)
        or mask.shape != (batch, places)
        or num_heads % kv_heads
    ):
        return decode_attention_twin(query, tokens, mask, scaling, lse)
    query, mask = query.contiguous(), mask.contiguous()
    out = torch.empty_like(query)
    parts = min(kv_heads, -(-torch.get_num_threads() // batch))
    compiled(
        query.data_ptr(), tokens.data_ptr(), mask.data_ptr(), out.data_ptr(),
        0 if lse is None else lse.data_ptr(), batch, places, kv_heads,
        num_heads // kv_heads, head_dim, DTYPE_CODES[query.dtype], scaling, parts,
    )  # fmt: skip
    return out


def decode_attention_twin(
    query: Tensor, tokens: Tensor, mask: Tensor, scaling: float, lse: Tensor | None = None
) -> Tensor:
    """The meaning of `decode_attention` by torch's own attention."""
    keys, values = tokens[:, :, 0].transpose(1, 2), tokens[:, :, 1].transpose(1, 2)
    out, sums = attention_block(
        query, keys, values, scaling=scaling, key_mask=mask, never_empty=True
    )
    if lse is not None:
        lse.copy_(sums[:, :, 0])
    return out
