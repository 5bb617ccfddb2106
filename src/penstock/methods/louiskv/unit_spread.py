"""add_clusters() and merge_units(): the spread of units that a step does not make."""

import torch
from torch import Tensor

from penstock.kernels.device.boundaries import UnitSpread
from penstock.kernels.kmeans import mean_distances


def add_clusters(
    spread: UnitSpread, keys: Tensor, means: Tensor, labels: Tensor, first: int, elements: int
) -> None:
    """Measure the spread of some blocks' clusters.

    Args:
        spread: receives it, from unit `first` on.
        keys: any float dtype. [rows, blocks, tokens of a block, head_dim]
        means: float32 [rows, blocks, clusters of a block, head_dim]
        labels: the cluster of each key. int [rows, blocks, tokens of a block]
        first: the first block's first unit.
        elements: of a chunk's temporaries, float32.
    """
    _, blocks, clusters, dim = means.shape
    for block in range(blocks):
        at = first + block * clusters
        spread.halves[:, at : at + clusters] = mean_distances(
            keys[:, block], means[:, block], labels[:, block], elements=elements
        ).div_(2 * dim)


def merge_units(
    halves: Tensor, means: Tensor, merged: Tensor, target: Tensor, tokens: Tensor, total: Tensor
) -> Tensor:
    """Spread of units that were made of others: within these, and between their means.

    Args:
        halves: of the units before. float32 [rows, units]
        means: of the units before. [rows, units, head_dim]
        merged: means of the units that they were made into. float32 [rows, units, head_dim]
        target: the unit that each became part of. int64 [rows, units]
        tokens: of each unit before. float32 [rows, units]
        total: of each unit after, at least 1. float32 [rows, units]

    Returns:
        float32 [rows, units]
    """
    twice = 2 * means.shape[2]
    squares = (halves + means.float().square().sum(dim=2) / twice) * tokens
    sums = torch.zeros_like(halves).scatter_add_(1, target, squares)
    return (sums / total - merged.square().sum(dim=2) / twice).clamp_min_(0.0)
