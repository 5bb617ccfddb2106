"""add_block(): the attention of many queries over one more block, added to one softmax."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention import attention_block
from penstock.kernels.device.available import uses_triton
from penstock.kernels.native.compiled import Kernel, address, kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES

_MOST_DIM, _LANES = 256, 16
"""Of the compiled kernel: head_dim, and the keys that it packs side by side."""
_PACKED_KEYS, _PACKED_BYTES = 1024, 4 << 20
"""Most keys that are packed at a time, and most bytes of them all."""
_FEWEST_ROWS = 64
"""Queries of a KV head from which on torch's products by AMX pay."""
_FLOATS, _PAIRS, _TILES = range(3)
"""What multiplies bfloat16: units for floats, AVX-512 BF16, AMX."""

Softmax = tuple[Tensor, Tensor]
"""What was attended to: float32 [batch, queries, num_heads, value_width], contiguous, and the
log-sum-exp of its logits, float32 [batch, num_heads, queries]."""


def add_block(
    so_far: Softmax | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    key_mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> Softmax:
    """Attend over one more block; the twin of `add_block_twin`.

    Compiled for host memory: keys and values are packed once, in the order in which AVX-512 wants
    them, and logits never leave the cache. The block's output is not rounded on its way.

    Args:
        so_far: what was attended to before; its memory is used again. None: nothing was.
        query: [batch, num_heads, queries, head_dim]
        keys: a view as it lies in a block or a new tensor, never copied.
            [batch, kv_heads, tokens, head_dim]
        values: likewise. [batch, kv_heads, tokens, value_width]
        scaling: factor on the logits, before `softcap`.
        key_mask: additive, 0 or minus infinity. [batch, tokens]
        causal: query i sees keys up to i.
        softcap: see `attention_twin`.

    Returns:
        The whole: zero and minus infinity where a query has seen nothing.

    Source: FlashAttention (Dao et al. 2022), algorithm 1.
    """
    compiled = kernel("prompt_attention") if query.device.type == "cpu" else None
    if compiled is None or softcap is not None or not _can_compile(query, keys, values):
        return add_block_twin(
            so_far, query, keys, values, scaling=scaling, key_mask=key_mask, causal=causal,
            softcap=softcap,
        )  # fmt: skip
    return _compiled(compiled, so_far, query, keys, values, scaling, key_mask, causal)


def add_block_twin(
    so_far: Softmax | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    key_mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> Softmax:
    """The meaning of `add_block` by torch's own attention."""
    out, lse = attention_block(
        query, keys, values, scaling=scaling, key_mask=key_mask, causal=causal, softcap=softcap
    )
    if so_far is None:
        return out.transpose(1, 2).float().contiguous(), lse.contiguous()
    return merge_into(so_far, out, lse)


def merge_into(so_far: Softmax, out: Tensor, lse: Tensor) -> Softmax:
    """Merge a block into what was attended to, in its memory, by their log-sum-exp.

    Args:
        out: of the block, any floating dtype. [batch, num_heads, queries, value_width]
        lse: float32 [batch, num_heads, queries]
    """
    if uses_triton(so_far[0]):
        from penstock.kernels.device.merge_triton import merge_into_triton

        merge_into_triton(*so_far, out, lse)
        return so_far
    return merge_into_twin(so_far, out, lse)


def merge_into_twin(so_far: Softmax, out: Tensor, lse: Tensor) -> Softmax:
    """The meaning of `merge_into` in plain torch."""
    total = torch.logaddexp(so_far[1], lse)
    safe = torch.where(total.isinf(), 0.0, total)
    mine, theirs = (
        torch.exp(each - safe).transpose(1, 2).unsqueeze(-1) for each in (so_far[1], lse)
    )
    so_far[0].mul_(mine).addcmul_(out.transpose(1, 2), theirs)
    return so_far[0], total


def _can_compile(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    heads, queries, head_dim = query.shape[1:]
    kind = query.dtype
    if (
        kind not in DTYPE_CODES
        or not kind == keys.dtype == values.dtype
        or head_dim % _LANES
        or head_dim > _MOST_DIM
        or values.shape[3] != head_dim
        or heads % keys.shape[1]
        or not query.stride(3) == keys.stride(3) == values.stride(3) == 1
    ):
        return False
    many = heads // keys.shape[1] * queries >= _FEWEST_ROWS
    return not (kind == torch.bfloat16 and many and bfloat16_units() == _TILES)


def bfloat16_units() -> int:
    """What multiplies bfloat16 here: 0 nothing but floats, 1 AVX-512 BF16, 2 AMX."""
    return _FLOATS if kernel("bfloat16_units") is None else _cpu_units()


@cache
def _cpu_units() -> int:
    """Asked once: to answer takes a virtual machine longer than a small block does."""
    found, ask = np.zeros(1, dtype=np.int64), kernel("bfloat16_units")
    assert ask is not None
    ask(address(found))
    return int(found[0])


def _compiled(
    compiled: Kernel, so_far: Softmax | None, query: Tensor, keys: Tensor, values: Tensor,
    scaling: float, key_mask: Tensor | None, causal: bool,
) -> Softmax:  # fmt: skip
    (batch, heads, queries, dim), (kv_heads, tokens) = query.shape, keys.shape[1:3]
    is_first = so_far is None
    if so_far is None:
        so_far = torch.empty(batch, queries, heads, dim), torch.empty(batch, heads, queries)
    mask = None if key_mask is None else key_mask.to(torch.float32).contiguous()
    pairs = query.dtype == torch.bfloat16 and bfloat16_units() > _FLOATS
    key_bytes = 2 * batch * kv_heads * dim * (2 if pairs else 4)
    most = max(_LANES, min(_PACKED_KEYS, tokens, _PACKED_BYTES // key_bytes))
    together = -(-most // _LANES) * _LANES
    packed = torch.empty(together * key_bytes, dtype=torch.uint8)
    size = query.element_size()
    strides = np.array(
        [stride * size for each in (query, keys, values) for stride in each.stride()[:3]],
        dtype=np.int64,
    )
    sizes = np.array(
        [
            batch, heads, kv_heads, queries, tokens, dim, DTYPE_CODES[query.dtype],
            0 if causal else tokens, is_first, pairs, together,
        ],
        dtype=np.int64,
    )  # fmt: skip
    compiled(
        query.data_ptr(), keys.data_ptr(), values.data_ptr(),
        0 if mask is None else mask.data_ptr(), so_far[0].data_ptr(), so_far[1].data_ptr(),
        packed.data_ptr(), address(sizes), address(strides), scaling,
    )  # fmt: skip
    return so_far
