"""rms_norm(), rotate() and gated() in Triton; rounded wherever the twins are."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATED_AT_ONCE = 1024


@triton.jit
def _rms_norm(hidden_ptr, weight_ptr, out_ptr, dim, eps, WIDE: tl.constexpr):
    column = tl.arange(0, WIDE)
    inside = column < dim
    place = tl.program_id(0).to(tl.int64) * dim + column
    loaded = tl.load(hidden_ptr + place, mask=inside, other=0.0)
    wide = loaded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / dim + eps)
    normed = (wide * scale).to(loaded.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (weight * normed).to(loaded.dtype), mask=inside)


def rms_norm_triton(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A program per row; see `elementwise.rms_norm`."""
    assert hidden.is_contiguous()
    assert weight.is_contiguous()
    assert hidden.dtype == weight.dtype
    dim = hidden.shape[-1]
    out = torch.empty_like(hidden)
    wide = triton.next_power_of_2(dim)
    _rms_norm[(hidden.numel() // dim,)](
        hidden, weight, out, dim, eps, WIDE=wide, num_warps=8 if wide > 2048 else 4
    )
    return out


@triton.jit
def _rotate(
    query_ptr, key_ptr, cos_ptr, sin_ptr, query_out_ptr, key_out_ptr,
    heads, key_heads, query_row, query_head, key_row, key_head, position_row,
    HALF: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, WIDE)
    inside = lane < HALF
    if head < heads:
        source = query_ptr + row * query_row + head * query_head
        target = query_out_ptr + (row * heads + head) * 2 * HALF
    else:
        source = key_ptr + row * key_row + (head - heads) * key_head
        target = key_out_ptr + (row * key_heads + head - heads) * 2 * HALF
    first = tl.load(source + lane, mask=inside, other=0.0)
    second = tl.load(source + HALF + lane, mask=inside, other=0.0)
    kind = first.dtype
    cos_ptr += row * position_row
    sin_ptr += row * position_row
    cos = tl.load(cos_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    straight = (first.to(tl.float32) * cos).to(kind).to(tl.float32)
    across = (-second.to(tl.float32) * sin).to(kind).to(tl.float32)
    tl.store(target + lane, (straight + across).to(kind), mask=inside)
    cos = tl.load(cos_ptr + HALF + lane, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + HALF + lane, mask=inside, other=0.0).to(tl.float32)
    straight = (second.to(tl.float32) * cos).to(kind).to(tl.float32)
    across = (first.to(tl.float32) * sin).to(kind).to(tl.float32)
    tl.store(target + HALF + lane, (straight + across).to(kind), mask=inside)


def rotate_triton(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A program per head of a row; see `elementwise.rotate`."""
    batch, heads, tokens, dim = query.shape
    key_heads = key.shape[1]
    assert tokens == 1
    assert dim % 2 == 0
    assert query.stride(3) == key.stride(3) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert cos.shape == sin.shape
    turned = query.new_empty(query.shape), key.new_empty(key.shape)
    _rotate[(batch, heads + key_heads)](
        query, key, cos, sin, *turned, heads, key_heads, query.stride(0), query.stride(1),
        key.stride(0), key.stride(1), cos.stride(0) if cos.shape[0] > 1 else 0,
        HALF=dim // 2, WIDE=triton.next_power_of_2(dim // 2), num_warps=1,
    )  # fmt: skip
    return turned


@triton.jit
def _gated(gate_ptr, up_ptr, out_ptr, count, AT_ONCE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = place < count
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    shut = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + place, (shut * up).to(gate.dtype), mask=inside)


def gated_triton(gate: Tensor, up: Tensor) -> Tensor:
    """A program per 1,024 numbers; see `elementwise.gated`."""
    assert gate.is_contiguous()
    assert up.is_contiguous()
    assert (gate.shape, gate.dtype) == (up.shape, up.dtype)
    out = torch.empty_like(gate)
    _gated[(triton.cdiv(gate.numel(), _GATED_AT_ONCE),)](
        gate, up, out, gate.numel(), AT_ONCE=_GATED_AT_ONCE, num_warps=4
    )
    return out
