"""group_shares(): each group's share of every head's softmax, as one score of the heads."""

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton


def group_shares(logits: Tensor, end: Tensor, *, squares: bool = False) -> Tensor:
    """Softmax of each head over the groups before `end`, then the sum over heads.

    `group_scores.scores_of_shares` with an end that only the device knows.

    Source: KVSwap, section 3.3 (the sum over heads; `LowRankIndex` says why shares are added).

    Args:
        logits: rows may be strided, groups and heads lie as one. float32 [batch, groups, heads]
        end: groups from here on have no share. int64 [1], on the device of the logits
        squares: the root of the sum of the shares' squares instead.

    Returns:
        float32 [batch, groups]; where there is no group before `end` it means nothing, but has no
        not-a-numbers. Of groups from `end` on it is 0 where there is one before.
    """
    if uses_triton(logits):
        from penstock.kernels.device.group_shares_triton import group_shares_triton

        return group_shares_triton(logits, end, squares=squares)
    return group_shares_twin(logits, end, squares=squares)


def group_shares_twin(logits: Tensor, end: Tensor, *, squares: bool = False) -> Tensor:
    """The meaning of `group_shares` in plain torch.

    Heads are put in front first: on a GPU torch's softmax along a dimension that is not the last
    one is of so few threads that it takes longer than all else in a selection (0.75 ms of 0.25 MB).
    """
    hidden = torch.arange(logits.shape[1], device=logits.device) >= end
    # Where there are none at all, scores mean nothing, but are numbers.
    lines = logits.transpose(1, 2).contiguous()
    lines.masked_fill_(hidden, torch.finfo(logits.dtype).min)
    shares = torch.softmax(lines, dim=2)
    return shares.square_().sum(dim=1).sqrt_() if squares else shares.sum(dim=1)
