"""decode_attention(): one new token attends to a whole pool in one softmax."""

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.attention import attention_block
from penstock.kernels.native.compiled import Kernel, kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES
from penstock.kernels.prompt_attention import add_block_twin
from penstock.kernels.slot_codes import coded_token_bytes, numbers_of

_MOST_OUTPUTS = 1 << 15
"""Floats of one row's output; the compiled kernel sums them on the stack."""
_CODED_PLACES = 512
"""Places in 8 bits that become numbers at a time where no kernel reads them."""


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
    compiled = _compiled(query, tokens, mask)
    if compiled is None or mask.shape != (len(query), tokens.shape[1]):
        return decode_attention_twin(query, tokens, mask, scaling, lse)
    return _call(compiled, query, None, tokens, mask, scaling, lse)


def coded_attention(
    query: Tensor, codes: Tensor, tokens: Tensor, mask: Tensor, scaling: float,
    lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`decode_attention` to tokens in 8 bits and others in one softmax; the twin of
    `coded_attention_twin`.

    Args:
        codes: uint8 [batch, coded_places, token_bytes], see `slot_codes`.
        tokens: as there, behind the codes. [batch, places, 2, kv_heads, head_dim]
        mask: of both. [batch, coded_places + places]
    """
    compiled = _compiled(query, tokens, mask)
    batch, places, _, kv_heads, head_dim = tokens.shape
    if (
        compiled is None
        or not codes.is_contiguous()
        or codes.shape[0] != batch
        or codes.shape[2] != coded_token_bytes(kv_heads, head_dim)
        or mask.shape != (batch, codes.shape[1] + places)
    ):
        return coded_attention_twin(query, codes, tokens, mask, scaling, lse)
    return _call(compiled, query, codes, tokens, mask, scaling, lse)


def _compiled(query: Tensor, tokens: Tensor, mask: Tensor) -> Kernel | None:
    """The kernel, where it knows these tokens."""
    compiled = kernel("decode_attention") if query.device.type == "cpu" else None
    batch, num_heads, _, head_dim = query.shape
    places, kv_heads = tokens.shape[1], tokens.shape[3]
    if (
        head_dim % 16
        or num_heads * head_dim > _MOST_OUTPUTS
        or query.dtype not in DTYPE_CODES
        or not query.dtype == tokens.dtype == mask.dtype
        or not tokens.is_contiguous()
        or tokens.shape != (batch, places, 2, kv_heads, head_dim)
        or num_heads % kv_heads
    ):
        return None
    return compiled


def _call(
    compiled: Kernel, query: Tensor, codes: Tensor | None, tokens: Tensor, mask: Tensor,
    scaling: float, lse: Tensor | None,
) -> Tensor:  # fmt: skip
    batch, num_heads, _, head_dim = query.shape
    places, kv_heads = tokens.shape[1], tokens.shape[3]
    query, mask = query.contiguous(), mask.contiguous()
    out = torch.empty_like(query)
    parts = min(kv_heads, -(-torch.get_num_threads() // batch))
    compiled(
        query.data_ptr(), 0 if codes is None else codes.data_ptr(), tokens.data_ptr(),
        mask.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(), batch,
        0 if codes is None else codes.shape[1], places, kv_heads, num_heads // kv_heads, head_dim,
        DTYPE_CODES[query.dtype], scaling, parts,
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


def coded_attention_twin(
    query: Tensor, codes: Tensor, tokens: Tensor, mask: Tensor, scaling: float,
    lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The meaning of `coded_attention` by torch's own attention, some codes at a time."""
    end, kv_heads, head_dim = codes.shape[1], *tokens.shape[3:]
    so_far = add_block_twin(
        None, query, tokens[:, :, 0].transpose(1, 2), tokens[:, :, 1].transpose(1, 2),
        scaling=scaling, key_mask=mask[:, end:],
    )  # fmt: skip
    for keys, values, shown in coded_blocks(codes, mask, (kv_heads, head_dim), tokens.dtype):
        so_far = add_block_twin(so_far, query, keys, values, scaling=scaling, key_mask=shown)
    out, sums = so_far
    if lse is not None:
        lse.copy_(sums[:, :, 0])
    return out.transpose(1, 2)


def coded_blocks(
    codes: Tensor, mask: Tensor, size: tuple[int, int], dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens in 8 bits as numbers, a few at a time.

    Args:
        codes: uint8 [batch, coded_places, token_bytes]
        mask: additive, of these and perhaps of more; where it hides a place, codes may be any
            bytes. [batch, at least coded_places]
        size: KV heads, and the width of each.

    Yields:
        Keys and values, zero where they are hidden, each [batch, kv_heads, places, head_dim]; and
        their part of the mask.
    """
    for first in range(0, codes.shape[1], _CODED_PLACES):
        some = codes[:, first : first + _CODED_PLACES]
        shown = mask[:, first : first + some.shape[1]]
        numbers = numbers_of(some, *size, dtype)
        numbers.masked_fill_(shown[:, :, None, None, None] != 0, 0.0)
        yield numbers[:, :, 0].transpose(1, 2), numbers[:, :, 1].transpose(1, 2), shown
