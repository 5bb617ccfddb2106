"""code_products(): products of a few queries with many quantised key codes."""

import torch
from torch import Tensor


def code_products(codes: Tensor, queries: Tensor, bits: int) -> Tensor:
    """Multiply every token's code with every query; the twin of `code_products_reference`.

    On a CPU, 8-bit codes are multiplied as integers (the query is quantised too, one scale per
    head), which reads a quarter of the bytes and converts nothing; 4-bit codes are unpacked to 8.

    Args:
        codes: [batch, tokens, width]: floating, int8, or uint8 with two components in a byte (the
            first half of the components in the low nibbles; value = nibble - 7.5).
        queries: float32, in units where a code's step is 1. [batch, heads, rank]
        bits: 16, 8 or 4.

    Returns:
        float32 [batch, tokens, heads]
    """
    if bits == 16:
        return torch.matmul(codes, queries.to(codes.dtype).transpose(1, 2)).float()
    if codes.device.type == "cpu" and torch.backends.mkldnn.is_available():
        return _integer_products(codes, queries, bits)
    return code_products_reference(codes, queries, bits)


def code_products_reference(codes: Tensor, queries: Tensor, bits: int) -> Tensor:
    """The meaning of `code_products` in plain torch."""
    if bits == 4:
        codes = _unpack(codes, queries.shape[-1]).float() - 7.5
    return torch.matmul(codes.float(), queries.transpose(1, 2))


def _unpack(codes: Tensor, rank: int) -> Tensor:
    """Nibbles to components, 0 to 15. [batch, tokens, rank]"""
    return torch.cat((codes & 15, codes >> 4), dim=-1)[..., :rank]


def _integer_products(codes: Tensor, queries: Tensor, bits: int) -> Tensor:
    if bits == 4:
        # value = 2 * nibble - 15 in half steps: integers, so that the product stays exact
        codes = _unpack(codes, queries.shape[-1]).to(torch.int8).mul_(2).sub_(15)
        queries = queries * 0.5
    scale = queries.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / 127.0
    quantised = (queries / scale).round_().to(torch.int8).transpose(1, 2).contiguous()
    # The integer product takes matrices only; one call per row is bound by its codes, not by us.
    rows = [torch._int_mm(codes[b], quantised[b]) for b in range(codes.shape[0])]
    products = rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)
    return products.float().mul_(scale.transpose(1, 2))
