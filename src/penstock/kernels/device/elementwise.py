"""rms_norm(), rotate(), gated(): small parts of a model's layer, each in one launch.

What transformers writes as four to ten launches each, for a step of one token, in which a launch
takes longer than what it does. The twins are transformers' own lines with all their roundings.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.device.available import uses_triton


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hidden states over their root mean square, times a weight.

    Args:
        hidden: contiguous. float32, bfloat16 or float16 [..., dim]
        weight: of the same dtype. [dim]
        eps: added to the mean square.

    Returns:
        As `hidden`.
    """
    if uses_triton(hidden):
        from penstock.kernels.device.elementwise_triton import rms_norm_triton

        return rms_norm_triton(hidden, weight, eps)
    return rms_norm_twin(hidden, weight, eps)


def rms_norm_twin(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The meaning of `rms_norm`: Llama's, of which the normed states are rounded first."""
    wide = hidden.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions for the queries and keys of one token, halves turned against each other.

    Args:
        query: the last axis contiguous. [batch, heads, 1, head_dim]
        key: likewise, with its own number of heads.
        cos: contiguous, of the same dtype. [batch or 1, 1, head_dim]
        sin: likewise.

    Returns:
        Both, turned and contiguous.
    """
    if uses_triton(query):
        from penstock.kernels.device.elementwise_triton import rotate_triton

        return rotate_triton(query, key, cos, sin)
    return rotate_twin(query, key, cos, sin)


def rotate_twin(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The meaning of `rotate` in plain torch."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + _turned(query) * sin, key * cos + _turned(key) * sin


def _turned(states: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of one projection times the other.

    Args:
        gate: contiguous. float32, bfloat16 or float16 [..., dim]
        up: likewise, of the same dtype and shape.

    Returns:
        As `gate`.
    """
    if uses_triton(gate):
        from penstock.kernels.device.elementwise_triton import gated_triton

        return gated_triton(gate, up)
    return gated_twin(gate, up)


def gated_twin(gate: Tensor, up: Tensor) -> Tensor:
    """The meaning of `gated` in plain torch."""
    return functional.silu(gate) * up
