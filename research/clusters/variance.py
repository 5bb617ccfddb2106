"""How tight clusters are: variance within them, recomputed from keys and labels (table 5)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.kmeans import kmeans, nearest
from research.clusters.drift import ELEMENTS, ITERATIONS


@dataclass(frozen=True, kw_only=True)
class Tightness:
    """Of one head's clusters, of the keys given, in float64."""

    by_key: float
    """Mean squared distance of a key from the mean of its cluster."""
    by_cluster: float
    """The mean over clusters of their variance: large and small ones count alike."""
    clusters: int
    largest: int
    """Keys of the largest cluster."""


def tightness(keys: Tensor, labels: Tensor) -> Tightness:
    """Variance within clusters, about the true mean of each.

    Args:
        keys: of one head. [tokens, head_dim]
        labels: each key's cluster, any numbers. int64 [tokens]
    """
    count, dense = renumbered(labels)
    points = keys.double()
    sizes = torch.bincount(dense, minlength=count)
    means = points.new_zeros(count, points.shape[1]).index_add_(0, dense, points)
    means /= sizes[:, None]
    squares = (points - means[dense]).square().sum(dim=1)
    variance = points.new_zeros(count).index_add_(0, dense, squares) / sizes
    return Tightness(
        by_key=float(squares.mean()), by_cluster=float(variance.mean()), clusters=count,
        largest=int(sizes.max()),
    )  # fmt: skip


def renumbered(labels: Tensor) -> tuple[int, Tensor]:
    """How many different labels there are, and labels from 0 on in their place. int64 [tokens]"""
    names, dense = np.unique(labels.numpy(), return_inverse=True)
    return len(names), torch.from_numpy(dense)


def global_labels(keys: Tensor, clusters: int, seed: int) -> Tensor:
    """The optimal partition of the paper's figure 4a, as k-means finds it: all keys at once.

    Args:
        keys: of one head. [tokens, head_dim]
    """
    centroids = kmeans(
        keys[None], clusters, iterations=ITERATIONS, cosine=False, seed=seed, elements=ELEMENTS
    )
    return nearest(keys[None], centroids, cosine=False, elements=ELEMENTS)[0]
