"""group_scores(): softmax per head over groups' best products with quantised keys, as one score."""

import torch
from torch import Tensor

from penstock.kernels.group_products import group_products
from penstock.kernels.native.compiled import kernel

_COMPILED_LANES = 16
"""Heads that the compiled kernel takes at a time, and bytes of its alignment."""


def group_scores(
    codes: Tensor, queries: Tensor, bits: int, num_groups: int, first: Tensor | None = None,
    *, squares: bool = False,
) -> Tensor:  # fmt: skip
    """Score each group: over the heads, the sum of its share in a softmax over all groups.

    A head's logit for a group is its largest product with one of the group's tokens. The twin of
    `group_scores_twin`; compiled for quantised codes in host memory.

    Args:
        codes: as in `group_products`. [batch, blocks, group_tokens, block_groups, width]
        queries: float32, in units where a code's step is 1, `scaling` applied.
            [batch, heads, rank]
        bits: 16, 8 or 4.
        num_groups: the first so many groups count, at most blocks * block_groups.
        first: groups before it have no share, and the score 0; None: all have. int64 [batch]
        squares: the root of the sum of the shares' squares instead.

    Returns:
        float32 [batch, num_groups]
    """
    compiled = kernel("group_scores")
    if compiled is None or not is_compiled(codes, bits):
        return group_scores_twin(codes, queries, bits, num_groups, first, squares=squares)
    batch, heads, rank = queries.shape
    _, blocks, group_tokens, block_groups, width = codes.shape
    assert batch <= len(codes), queries.shape
    assert rank <= width * 8 // bits, (rank, width)
    assert num_groups <= blocks * block_groups, (num_groups, codes.shape)
    queries = queries.contiguous()
    scores = torch.empty(batch, num_groups)
    scratch = torch.empty(compiled_scratch_bytes(num_groups, width), dtype=torch.uint8)
    begins = [0] * batch if first is None else first.tolist()
    for row in range(batch):
        compiled(
            codes[row].data_ptr(), group_tokens, block_groups, width, bits,
            queries[row].data_ptr(), rank, heads, begins[row], num_groups, squares,
            scratch.data_ptr(), scores[row].data_ptr(),
        )  # fmt: skip
    return scores


def is_compiled(codes: Tensor, bits: int) -> bool:
    """Whether a compiled kernel scores these codes; it needs little memory at any length."""
    fits = codes.shape[-1] % 4 == 0 and codes.shape[-2] % 4 == 0
    return bits != 16 and fits and codes.device.type == "cpu" and kernel("group_scores") is not None


def compiled_scratch_bytes(num_groups: int, width: int) -> int:
    """Temporaries of the compiled kernel, whatever the batch."""
    return (num_groups + 3) // 4 * 4 * 4 * _COMPILED_LANES + 8 * _COMPILED_LANES * (width + 1)


def group_scores_twin(
    codes: Tensor, queries: Tensor, bits: int, num_groups: int, first: Tensor | None = None,
    *, squares: bool = False,
) -> Tensor:  # fmt: skip
    """The meaning of `group_scores` in plain torch."""
    products = group_products(codes, queries, bits)
    return scores_of_shares(products, num_groups, first, squares=squares)


def scores_of_shares(
    logits: Tensor, num_groups: int, first: Tensor | None = None, *, squares: bool = False
) -> Tensor:
    """Softmax per head over the first `num_groups` groups, then one score of the heads, in place.

    Args:
        logits: float32; overwritten. [batch, groups, heads]
        first, squares: as in `group_scores`.

    Returns:
        float32 [batch, num_groups]
    """
    logits[:, num_groups:] = float("-inf")
    if first is not None:
        hide_before(first, logits)
    # exp, then one product with 1 / sums.
    weights = logits.sub_(_largest_per_head(logits)).exp_()
    factor = weights.sum(dim=1).reciprocal_().unsqueeze(2)
    if squares:
        scores = torch.matmul(weights.square_(), factor.square_()).sqrt_()
    else:
        scores = torch.matmul(weights, factor)
    if first is not None:  # where nothing is left, all have equal shares of nothing
        scores.masked_fill_(_before(first, logits), 0.0)
    return scores[:, :num_groups, 0]


def hide_before(first: Tensor, logits: Tensor) -> None:
    """Leave the groups before `first`, [batch], no share of a softmax. [batch, groups, heads]"""
    logits.masked_fill_(_before(first, logits), torch.finfo(logits.dtype).min)


def _before(first: Tensor, logits: Tensor) -> Tensor:
    """bool [batch, groups, 1]"""
    numbers = torch.arange(logits.shape[1], device=logits.device)
    return (numbers < first[:, None]).unsqueeze(2)


def _largest_per_head(logits: Tensor) -> Tensor:
    """Maximum over groups in two steps: torch is slow on a long axis with a short one inside.

    Args:
        logits: [batch, groups, heads]

    Returns:
        [batch, 1, heads]
    """
    batch, groups, heads = logits.shape
    fold = 64 if groups % 64 == 0 else 1
    rows = logits.view(batch, groups // fold, fold * heads).amax(dim=1)
    return rows.view(batch, fold, heads).amax(dim=1, keepdim=True)
