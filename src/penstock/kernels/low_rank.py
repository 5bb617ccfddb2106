"""project_queries(), project_keys(), store_codes(): products with the joint-head low-rank basis."""

import torch
from torch import Tensor

from penstock.kernels.native.compiled import Kernel, kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES

_FEW_TOKENS = 64
"""More rows than this are a matrix product that torch does better."""


def project_queries(query: Tensor, basis: Tensor, kv_heads: int, factor: Tensor) -> Tensor:
    """Low-rank queries: each head meets the rows of the basis that belong to its KV head.

    The twin of `project_queries_twin`.

    Args:
        query: [batch, heads, head_dim]
        basis: [kv_heads * head_dim, rank], of the query's dtype.
        factor: float32, on the components. [rank]

    Returns:
        float32 [batch, heads, rank]
    """
    compiled = _compiled(query, basis)
    if compiled is None or not _belong(basis, kv_heads * query.shape[2], factor):
        return project_queries_twin(query, basis, kv_heads, factor)
    batch, heads, head_dim = query.shape
    query = query.contiguous()
    rank = basis.shape[1]
    out = torch.empty(batch, heads, rank)
    compiled(
        query.data_ptr(), heads * head_dim, batch, kv_heads, heads // kv_heads, head_dim,
        basis.data_ptr(), rank, DTYPE_CODES[query.dtype], factor.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def project_queries_twin(query: Tensor, basis: Tensor, kv_heads: int, factor: Tensor) -> Tensor:
    """The meaning of `project_queries` in torch."""
    batch, _, head_dim = query.shape
    grouped = query.view(batch, kv_heads, -1, head_dim)
    rows = basis.view(kv_heads, head_dim, -1)
    return torch.matmul(grouped, rows).flatten(1, 2).float().mul_(factor)


def project_keys(keys: Tensor, basis: Tensor, factor: Tensor) -> Tensor:
    """Low-rank keys, all heads of a token together; the twin of `project_keys_twin`.

    Args:
        keys: a view with the heads of a token side by side. [batch, tokens, kv_heads, head_dim]
        basis: [kv_heads * head_dim, rank], of the keys' dtype.
        factor: float32, on the components. [rank]

    Returns:
        float32 [batch, tokens, rank]
    """
    compiled = _compiled(keys, basis)
    batch, tokens, kv_heads, head_dim = keys.shape
    together = keys.stride(3) == 1 and keys.stride(2) == head_dim
    fits = together and _belong(basis, kv_heads * head_dim, factor)
    if compiled is None or not fits or tokens > _FEW_TOKENS:
        return project_keys_twin(keys, basis, factor)
    rank = basis.shape[1]
    out = torch.empty(batch, tokens, rank)
    for row in range(batch):
        compiled(
            keys[row].data_ptr(), keys.stride(1), tokens, 1, 1, kv_heads * head_dim,
            basis.data_ptr(), rank, DTYPE_CODES[keys.dtype], factor.data_ptr(),
            out[row].data_ptr(),
        )  # fmt: skip
    return out


def project_keys_twin(keys: Tensor, basis: Tensor, factor: Tensor) -> Tensor:
    """The meaning of `project_keys` in torch."""
    return (keys.flatten(2) @ basis).float() * factor


def store_codes(components: Tensor, codes: Tensor, bits: int, first_group: int) -> bool:
    """Quantise components of whole groups straight into an index's codes, when there are few.

    Args:
        components: float32, in units of the quantisation step. [batch, tokens, rank]
        codes: as in `group_products`. [batch, blocks, group_tokens, block_groups, width]
        first_group: of the components.

    Returns:
        False when nothing was done: no compiled kernel, 16 bits, another device, many tokens.
    """
    compiled = kernel("store_codes")
    batch, tokens, rank = components.shape
    if compiled is None or bits == 16 or codes.device.type != "cpu" or tokens > _FEW_TOKENS:
        return False
    components = components.contiguous()
    _, blocks, group_tokens, block_groups, width = codes.shape
    end = first_group + -(-tokens // group_tokens)
    assert batch <= len(codes), components.shape
    assert rank <= width * 8 // bits, (rank, width)
    assert 0 <= first_group <= end <= blocks * block_groups, (first_group, end)
    for row in range(batch):
        compiled(
            components[row].data_ptr(), tokens, rank, bits, first_group, group_tokens,
            block_groups, width, codes[row].data_ptr(),
        )  # fmt: skip
    return True


def fits_compiled(basis: Tensor, width: int) -> bool:
    """Whether a compiled kernel multiplies vectors of this width with a basis's rows."""
    return (
        basis.device.type == "cpu"
        and basis.dtype in DTYPE_CODES
        and basis.is_contiguous()
        and basis.shape[1] % 16 == 0
        and width % 16 == 0
        and kernel("low_rank") is not None
    )


def fits_turned(basis: Tensor) -> bool:
    """Whether a compiled kernel multiplies turned queries with a basis, of any rank."""
    known = basis.device.type == "cpu" and basis.dtype in DTYPE_CODES and basis.is_contiguous()
    return known and kernel("turned_scores") is not None


def _belong(basis: Tensor, width: int, factor: Tensor) -> bool:
    """Whether the kernel reads no further than a basis and its factors are."""
    rank = basis.shape[1]
    return len(basis) == width and factor.shape == (rank,) and factor.dtype == torch.float32


def _compiled(x: Tensor, basis: Tensor) -> Kernel | None:
    fits = x.device == basis.device and x.dtype == basis.dtype
    return kernel("low_rank") if fits and fits_compiled(basis, x.shape[-1]) else None
