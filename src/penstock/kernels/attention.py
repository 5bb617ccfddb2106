"""attention_block(): attention over one block with its log-sum-exp, by the fastest kernel."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.plain_attention import NEGATIVE_INFINITY, attention_twin

_FEW_QUERIES = 64
"""A GPU's attention takes so many queries of a head at once, whether they are there or not."""
_TWIN_QUERY_ROWS = 256
"""The plain-torch path makes a float32 [.., rows, tokens] matrix; this bounds its rows."""


def attention_block(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    key_mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
    never_empty: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend over one block of keys; the twin of `attention_twin`.

    Keys and values may be strided views (a slot pool holds [tokens, 2, kv_heads, head_dim]); they
    are never copied. Query heads that share a KV head become rows of one problem, because the CPU
    kernel is several times faster on [kv_heads, rows] than on one query per head.

    Args:
        query: [batch, num_heads, queries, head_dim]
        keys: [batch, kv_heads, tokens, head_dim]
        values: of any width. [batch, kv_heads, tokens, value_width]
        scaling: factor on the logits.
        key_mask: additive mask over the keys alone, 0 or minus infinity, in the query's dtype.
            [batch, tokens]
        causal: query i sees keys up to i (as many queries as tokens).
        softcap: see `attention_twin`.
        never_empty: the caller knows that `key_mask` leaves every row something to see, which
            saves a check in the decode loop.

    Returns:
        Output [batch, num_heads, queries, value_width] (the query's dtype or float32) and the
        log-sum-exp, float32 [batch, num_heads, queries]; zero and minus infinity where a query
        sees nothing.
    """
    if values.shape[-1] != keys.shape[-1]:
        width = values.shape[-1]
        query, keys, values = _of_one_width(query, keys, values)
        out, lse = attention_block(
            query, keys, values, scaling=scaling, key_mask=key_mask, causal=causal,
            softcap=softcap, never_empty=never_empty,
        )  # fmt: skip
        return out[..., :width], lse
    if softcap is None and query.device.type == "cpu":
        if causal:
            return _cpu_causal(query, keys, values, scaling, key_mask)
        return _cpu_grouped(query, keys, values, scaling, key_mask, never_empty)
    if softcap is None and key_mask is None and _flash_on_cuda(query):
        return _cuda_flash(query, keys, values, scaling, causal=causal)
    return _plain(query, keys, values, scaling, key_mask, causal, softcap)


def keeps_no_logits(query: Tensor, *, masked: bool, softcap: float | None) -> bool:
    """Whether `attention_block` needs no memory that grows with its keys.

    Args:
        query: [batch, num_heads, queries, head_dim]
        masked: whether there is a mask over the keys.
    """
    if softcap is not None:
        return False
    return query.device.type == "cpu" or (not masked and _flash_on_cuda(query))


def _of_one_width(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one block, the narrower ones with zeros behind them.

    torch's kernels have one width only. Values that are the first channels of their keys need no
    copy: what follows them is attended to, and left out of the output.
    """
    more = keys.shape[-1] - values.shape[-1]
    if more < 0:
        return pad(query, (0, -more)), pad(keys, (0, -more)), values
    if values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride():
        return query, keys, keys
    return query, keys, pad(values, (0, more))


def _flash_on_cuda(query: Tensor) -> bool:
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[3] % 8 == 0
        and query.shape[3] <= 256
    )


def _cuda_flash(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The GPU's own attention; few queries of a KV head are rows of one problem there too."""
    batch, num_heads, num_queries, head_dim = query.shape
    few = num_queries < _FEW_QUERIES and not causal
    if few:
        query = query.reshape(batch, keys.shape[1], -1, head_dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, causal, False, scale=scaling
    )[:2]
    if few:
        out = out.reshape(batch, num_heads, num_queries, head_dim)
        lse = lse.reshape(batch, num_heads, num_queries)
    return out, lse


def _cpu_grouped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    key_mask: Tensor | None,
    never_empty: bool,
) -> tuple[Tensor, Tensor]:
    """Every query sees every key that `key_mask` leaves: one problem per KV head."""
    batch, num_heads, num_queries, head_dim = query.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    rows = num_heads // kv_heads * num_queries
    mask = None
    if key_mask is not None:
        mask = key_mask.view(batch, 1, 1, tokens)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.reshape(batch, kv_heads, rows, head_dim), keys, values, 0.0, False,
        attn_mask=mask, scale=scaling,
    )  # fmt: skip
    lse = lse.reshape(batch, num_heads, num_queries)
    if key_mask is not None and not never_empty:
        # The kernel answers a fully masked row with lse 0, which would corrupt a merge.
        empty = (key_mask == NEGATIVE_INFINITY).all(dim=-1)
        if bool(empty.any()):
            lse = lse.masked_fill(empty.view(batch, 1, 1), NEGATIVE_INFINITY)
    return out.reshape(batch, num_heads, num_queries, head_dim), lse


def _cpu_causal(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The diagonal block of a prefill chunk."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if key_mask is None:
        out, lse = kernel(query, keys, values, 0.0, True, scale=scaling)
        return out, lse
    tokens = keys.shape[2]
    hidden = torch.full((tokens, tokens), NEGATIVE_INFINITY, dtype=query.dtype).triu(1)
    mask = key_mask[:, None, None, :] + hidden
    out, lse = kernel(query, keys, values, 0.0, False, attn_mask=mask, scale=scaling)
    # Left padding: query i sees nothing when keys 0..i are all masked.
    empty = (key_mask == NEGATIVE_INFINITY).cumprod(dim=-1).bool()[:, None, :]
    return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, NEGATIVE_INFINITY)


def _plain(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    key_mask: Tensor | None,
    causal: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Plain torch in strips of query rows, so that the logits stay small."""
    outs, lses = [], []
    visible_keys = None if key_mask is None else key_mask.eq(0)[:, None, None, :]
    positions = torch.arange(keys.shape[2], device=keys.device)
    for start in range(0, query.shape[2], _TWIN_QUERY_ROWS):
        strip = query[:, :, start : start + _TWIN_QUERY_ROWS]
        mask = visible_keys
        if causal:
            rows = torch.arange(start, start + strip.shape[2], device=keys.device)
            visible = positions <= rows[:, None]
            mask = visible if mask is None else mask & visible
        out, lse = attention_twin(strip, keys, values, scaling=scaling, mask=mask, softcap=softcap)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
