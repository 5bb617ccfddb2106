"""top_units(): the highest-scoring units of each row, ascending; favour_resident()."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.native.compiled import kernel


def top_units(scores: Tensor, first: int, wanted: int) -> NDArray[np.int64]:
    """Pick the `wanted` highest-scoring units from `first` on; the twin of `top_units_twin`.

    Equal scores are broken in no particular order.

    Args:
        scores: float32. [batch, units]
        first: units before it are not chosen.
        wanted: at least 1; all are taken where there are fewer.

    Returns:
        Ascending in each row. [batch, min(wanted, units - first)]
    """
    compiled = kernel("top_units")
    if compiled is None or scores.device.type != "cpu" or scores.dtype != torch.float32:
        return top_units_twin(scores, first, wanted)
    batch, units = scores.shape
    count = min(wanted, units - first)
    chosen = np.empty((batch, max(0, count)), dtype=np.int64)
    if count <= 0:
        return chosen
    scores = scores.contiguous()
    scratch = np.empty(units, dtype=np.uint32)
    for row in range(batch):
        compiled(
            scores[row].data_ptr(), first, units, count, scratch.ctypes.data,
            chosen[row].ctypes.data,
        )  # fmt: skip
    return chosen


def top_units_twin(scores: Tensor, first: int, wanted: int) -> NDArray[np.int64]:
    """The meaning of `top_units` in plain torch."""
    candidates = scores[:, first:]
    count = max(0, min(wanted, candidates.shape[1]))
    ids = torch.topk(candidates, count, dim=1, sorted=False).indices.add_(first)
    chosen: NDArray[np.int64] = np.sort(ids.cpu().numpy(), axis=1)
    return chosen


def favour_resident(scores: Tensor, resident: NDArray[np.bool_], factor: float) -> Tensor:
    """Scores of which those of units in memory count for more; negative ones are not known here.

    Args:
        scores: shares, 0 or more. float [batch, units]
        resident: whether a unit is in memory. [batch, units]
        factor: on the scores of those.

    Returns:
        As `scores`.
    """
    if factor == 1:
        return scores
    return torch.where(torch.from_numpy(resident).to(scores.device), scores * factor, scores)
