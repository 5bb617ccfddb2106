"""code_units(): keys and values in 8 bits, as slots may hold them, and what they stand for.

A token lies as int8 [2, kv_heads, head_dim], its keys first, and behind them [2, kv_heads] scales
of bfloat16. A number is its code times the scale of its head and token: a 127th of the largest
number there, rounded up, so that an error is half a scale at most. Where a number is not finite,
that head of the token becomes NaN.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.native.compiled import address, kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES

_SCALE_BYTES = 2
_MOST = 127
_NAN_BITS = 0x7FC00000


def coded_token_bytes(kv_heads: int, head_dim: int) -> int:
    """Bytes of a token in 8 bits."""
    return 2 * kv_heads * (head_dim + _SCALE_BYTES)


def code_units(units: Tensor, memory: Tensor, slots: NDArray[np.int64]) -> None:
    """Write units into slots in 8 bits; the twin of `code_units_twin`.

    Args:
        units: on the CPU; each contiguous. [count, group_tokens, 2, kv_heads, head_dim]
        memory: uint8 [slots, group_tokens * coded_token_bytes], contiguous.
        slots: int64 [count]
    """
    compiled = kernel("code_units")
    count, group_tokens, _, kv_heads, head_dim = units.shape
    slot_bytes = group_tokens * coded_token_bytes(kv_heads, head_dim)
    assert slots.shape == (count,), (slots.shape, count)
    assert memory.shape[1] == slot_bytes, (memory.shape, slot_bytes)
    if not count:
        return
    if (
        compiled is None or head_dim % 16 or units.dtype not in DTYPE_CODES
        or not units[0].is_contiguous() or not memory.is_contiguous()
    ):  # fmt: skip
        code_units_twin(units, memory, slots)
        return
    slots = np.ascontiguousarray(slots)
    assert 0 <= slots.min() <= slots.max() < len(memory), "a slot outside the memory"
    compiled(
        units.data_ptr(), count, units.stride(0) * units.element_size(), address(slots),
        memory.data_ptr(), group_tokens, 2 * kv_heads, head_dim, DTYPE_CODES[units.dtype],
    )  # fmt: skip


def code_units_twin(units: Tensor, memory: Tensor, slots: NDArray[np.int64]) -> None:
    """The meaning of `code_units` in torch."""
    memory[torch.from_numpy(slots)] = codes_of(units).flatten(1)


def codes_of(tokens: Tensor) -> Tensor:
    """Tokens in 8 bits, by torch on any device.

    Args:
        tokens: [..., 2, kv_heads, head_dim]

    Returns:
        uint8 [..., coded_token_bytes]
    """
    numbers = tokens.float()
    largest = numbers.abs().amax(dim=-1) / _MOST
    bits = (largest.nan_to_num(posinf=0.0).view(torch.int32) + 0xFFFF) & ~0xFFFF
    bits = torch.where(largest.isfinite(), bits, _NAN_BITS)
    scales = bits.view(torch.float32)
    codes = numbers / torch.where(scales == 0, 1.0, scales)[..., None]
    codes = codes.nan_to_num(nan=-_MOST - 1).round().to(torch.int8)
    # As integers: what bits a cast gives to NaN depends on the processor's vectors.
    halves = (bits >> 16).to(torch.int16)
    parts = (codes.flatten(-3).view(torch.uint8), halves.flatten(-2).view(torch.uint8))
    return torch.cat(parts, dim=-1)


def numbers_of(coded: Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """What tokens in 8 bits stand for.

    Args:
        coded: uint8 [..., coded_token_bytes]

    Returns:
        [..., 2, kv_heads, head_dim]
    """
    size, end = (*coded.shape[:-1], 2, kv_heads), 2 * kv_heads * head_dim
    codes: Tensor = coded[..., :end].view(torch.int8).view(*size, head_dim)
    scales: Tensor = coded[..., end:].contiguous().view(torch.bfloat16).view(*size, 1)
    return (codes.float() * scales.float()).to(dtype)
