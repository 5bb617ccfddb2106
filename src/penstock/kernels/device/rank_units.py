"""rank_units(): scores as a step chooses by them."""

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton


def rank_units(
    scores: Tensor, first: Tensor, end: Tensor, slot_of: Tensor | None, resident_factor: float
) -> Tensor:
    """Hide the units that may not be chosen; multiply the scores of those that slots hold.

    Args:
        scores: any float dtype. [rows, units]
        first: the first unit of each row that may be chosen. int32 [rows]
        end: units from here on may not. int64 [1]
        slot_of: slot of each unit, -1 for none; None: it does not matter. int32 [rows, units]
        resident_factor: on scores of 0 or more.

    Returns:
        Minus infinity where a unit may not be chosen. float32 [rows, units]
    """
    if uses_triton(scores):
        from penstock.kernels.device.rank_units_triton import rank_units_triton

        return rank_units_triton(scores.contiguous(), first, end, slot_of, resident_factor)
    return rank_units_twin(scores, first, end, slot_of, resident_factor)


def rank_units_twin(
    scores: Tensor, first: Tensor, end: Tensor, slot_of: Tensor | None, resident_factor: float
) -> Tensor:
    """The meaning of `rank_units` in plain torch."""
    number = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    hidden = (number >= end) | (number < first[:, None])
    ranked = scores.float()
    if slot_of is not None:
        ranked = torch.where(slot_of >= 0, ranked * resident_factor, ranked)
    return ranked.masked_fill(hidden, -torch.inf)
