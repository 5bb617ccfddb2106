"""group_products(): each group's best product of its quantised key codes with a few queries."""

import functools

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton
from penstock.kernels.scaled_query import scaled_down


def group_products(codes: Tensor, queries: Tensor, bits: int) -> Tensor:
    """Multiply every token's code with every query and keep each group's largest product.

    The twin of `group_products_twin`. On a CPU, 8-bit codes are multiplied as integers (the
    query is quantised too, one scale per head), which reads a quarter of the bytes and converts
    nothing; 4-bit codes are unpacked to 8. On a GPU codes are converted in registers.

    Args:
        codes: floating, int8, or uint8 with two components in a byte (the first half of the
            components in the low nibbles; value = nibble - 7.5).
            [batch, blocks, group_tokens, groups, width]
        queries: in units where a code's step is 1: float32 and one for all groups, or one for each
            of so many parts of them, alike and in order, which may be bfloat16 on a GPU with
            Triton. [batch, heads, rank] or [batch, parts, heads, rank]
        bits: 16, 8 or 4.

    Returns:
        float32 [batch, blocks * groups, heads]
    """
    if queries.dim() == 4 and not uses_triton(codes):
        return _products_by_part(codes, queries, bits)
    has_integers = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if bits != 16 and codes.device.type == "cpu" and has_integers:
        return _integer_products(codes, queries, bits)
    if uses_triton(codes):
        from penstock.kernels import group_products_triton

        return group_products_triton.group_products(codes, queries, bits)
    return group_products_twin(codes, queries, bits)


def group_products_twin(codes: Tensor, queries: Tensor, bits: int) -> Tensor:
    """The meaning of `group_products` in plain torch."""
    if queries.dim() == 4:
        return _products_by_part(codes, queries, bits)
    batch, blocks, group_tokens, groups, _ = codes.shape
    if bits == 4:
        codes = _unpack(codes, queries.shape[-1]).to(queries.dtype) - 7.5
    flat = codes.reshape(batch, blocks * group_tokens * groups, -1)
    dtype = flat.dtype if bits == 16 else queries.dtype
    queries, factor = scaled_down(queries.to(dtype))
    products = torch.matmul(flat.to(dtype), queries.transpose(1, 2))
    planes = products.view(batch, blocks, group_tokens, groups, -1)
    best = planes.amax(dim=2).flatten(1, 2).float()
    return best if factor == 1.0 else best.mul_(factor)


def _products_by_part(codes: Tensor, queries: Tensor, bits: int) -> Tensor:
    """Products where each part of the groups has a query of its own.

    Integer products know one query for all: this is plain torch.
    """
    batch, blocks, group_tokens, groups, width = codes.shape
    parts = queries.shape[1]
    assert parts % blocks == 0, (codes.shape, queries.shape)
    assert groups * blocks % parts == 0, (codes.shape, queries.shape)
    per_block = parts // blocks
    by_part = codes.view(batch, blocks, group_tokens, per_block, groups // per_block, width)
    by_part = by_part.transpose(2, 3).reshape(batch * parts, 1, group_tokens, -1, width)
    best = group_products_twin(by_part, queries.flatten(0, 1), bits)
    return best.view(batch, blocks * groups, -1)


def _unpack(codes: Tensor, rank: int) -> Tensor:
    """Nibbles to components, 0 to 15, on the last axis."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)[..., :rank]


def _integer_products(codes: Tensor, queries: Tensor, bits: int) -> Tensor:
    batch, blocks, group_tokens, groups, _ = codes.shape
    if bits == 4:
        # value = 2 * nibble - 15 in half steps: integers, so that the product stays exact
        codes = _unpack(codes, queries.shape[-1]).view(torch.int8).mul_(2).sub_(15)
        queries = queries * 0.5
    scale = torch.linalg.vector_norm(queries, float("inf"), dim=-1, keepdim=True)
    scale = scale.clamp_min_(1e-30).mul_(1.0 / 127.0)
    quantised = (queries / scale).round_().to(torch.int8).transpose(1, 2)
    # The integer product takes matrices only; one call per row is bound by its codes, not by us.
    best = [
        _whole_products(codes[b].flatten(0, 2), quantised[b])
        .view(blocks, group_tokens, groups, -1)
        .amax(dim=1)
        for b in range(batch)
    ]
    stacked = best[0].unsqueeze(0) if batch == 1 else torch.stack(best)
    return stacked.flatten(1, 2).float().mul_(scale.transpose(1, 2))


def _whole_products(codes: Tensor, queries: Tensor) -> Tensor:
    """int8 [tokens, rank] times int8 [rank, heads]: exact, as int32 or float32."""
    if _multiplies_exactly():
        return torch._int_mm(codes, queries)
    return codes.float() @ queries.float()  # whole numbers below 2**24


@functools.cache
def _multiplies_exactly() -> bool:
    """Whether torch's int8 product is right here.

    With AVX2 but without VNNI, oneDNN adds pairs of products in 16 bits, which saturate.
    """
    ones = torch.full((32, 64), 127, dtype=torch.int8)
    found = torch._int_mm(ones, ones.t().contiguous())
    return bool((found == 64 * 127 * 127).all())
