"""rms_norm() and turn_query(): the small steps of a layer's query projection, one call each."""

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton
from penstock.kernels.device.elementwise import rotate
from penstock.kernels.native.compiled import kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last axis; the twin of `rms_norm_twin`.

    Args:
        x: [..., width]
        weight: [width], of the same dtype.

    Returns:
        Like `x`.
    """
    compiled = kernel("rms_norm")
    width = x.shape[-1]
    if (
        compiled is None
        or not _fits(x, weight)
        or width % 16
        or weight.shape != (width,)
        or not (x.is_contiguous() and weight.is_contiguous())
    ):
        return rms_norm_twin(x, weight, epsilon)
    out = torch.empty_like(x)
    compiled(
        x.data_ptr(), weight.data_ptr(), epsilon, x.numel() // width, width,
        DTYPE_CODES[x.dtype], out.data_ptr(),
    )  # fmt: skip
    return out


def rms_norm_twin(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The meaning of `rms_norm` in torch."""
    return torch.rms_norm(x, weight.shape, weight, epsilon)


def turn_query(
    query: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, epsilon: float = 0.0
) -> Tensor:
    """RMSNorm per head (if there is a weight), then rotary embedding by halves.

    The twin of `turn_query_twin`.

    Args:
        query: pre-RoPE. [batch, heads, head_dim]
        cos, sin: of the query's position. [batch or 1, head_dim]
        weight: of the norm. [head_dim]

    Returns:
        Post-RoPE. [batch, heads, head_dim]
    """
    if uses_triton(query):
        return _turned_on_device(query, cos, sin, weight, epsilon)
    compiled = kernel("turn_query")
    batch, heads, head_dim = query.shape
    parts = [query, cos, sin] if weight is None else [query, cos, sin, weight]
    if (
        compiled is None
        or head_dim % 32
        or not _fits(*parts)
        or not cos.shape[-1] == sin.shape[-1] == head_dim
        or (weight is not None and not (weight.shape == (head_dim,) and weight.is_contiguous()))
    ):
        return turn_query_twin(query, cos, sin, weight, epsilon)
    query = query.contiguous()
    cos, sin = (part.expand(batch, head_dim).contiguous() for part in (cos, sin))
    out = torch.empty_like(query)
    compiled(
        query.data_ptr(), None if weight is None else weight.data_ptr(), epsilon, cos.data_ptr(),
        sin.data_ptr(), batch, heads, head_dim, DTYPE_CODES[query.dtype], out.data_ptr(),
    )  # fmt: skip
    return out


def turn_query_twin(
    query: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, epsilon: float
) -> Tensor:
    """The meaning of `turn_query` in torch."""
    if weight is not None:
        query = rms_norm_twin(query, weight, epsilon)
    half = query.shape[-1] // 2
    rotated = torch.cat((-query[..., half:], query[..., :half]), dim=-1)
    return query * cos[:, None] + rotated * sin[:, None]


def _turned_on_device(
    query: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, epsilon: float
) -> Tensor:
    """`turn_query` where a launch takes longer than what it does: one of five is left."""
    alike = query.dtype == cos.dtype == sin.dtype and cos.shape[-1] == query.shape[-1]
    if not alike or query.stride(-1) != 1:
        return turn_query_twin(query, cos, sin, weight, epsilon)
    if weight is not None:
        query = rms_norm_twin(query, weight, epsilon)
    cos, sin = (part.unsqueeze(1).contiguous() for part in (cos, sin))
    return rotate(query.unsqueeze(2), query[:, :0].unsqueeze(2), cos, sin)[0].squeeze(2)


def _fits(*parts: Tensor) -> bool:
    dtype = parts[0].dtype
    return dtype in DTYPE_CODES and all(
        part.dtype == dtype and part.device.type == "cpu" for part in parts
    )
