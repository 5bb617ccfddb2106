"""cluster_keys(): k-means of a prompt's keys, two launches an iteration, and their clusters."""

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton
from penstock.kernels.kmeans import kmeans, kmeans_bytes, nearest

MOST_CLUSTERS = 1024
"""Of a set whose sums the fast form makes: its products grow with them, a sort does not."""


def cluster_keys(
    points: Tensor, clusters: int, *, iterations: int, cosine: bool, seed: int, elements: int
) -> tuple[Tensor, Tensor]:
    """Cluster the keys of many rows and blocks: `kmeans` and then `nearest`.

    The fast form sums by a matrix product of memberships with points, all blocks at once; a set of
    more than `MOST_CLUSTERS` is for the plain one, whose steps may be kernels as well.

    Source: LouisKV, section 4.2 (clusters of the prompt's keys).

    Args:
        points: any strides and float dtype; finite. [rows, blocks, points, dim]
        clusters: of a row's block.
        iterations, cosine, seed: see `kmeans`.
        elements: of a chunk's temporaries of one block of all rows, float32; the plain form's.

    Returns:
        Centroids, float32 [rows, blocks, clusters, dim], and the one that is nearest to each point,
        int16 (int32 where there are more) [rows, blocks, points].
    """
    if uses_triton(points):
        from penstock.kernels.device import clusters_triton

        if clusters_triton.can_take(points, clusters):
            return clusters_triton.cluster_keys(
                points, clusters, iterations=iterations, cosine=cosine, seed=seed
            )
    return cluster_keys_twin(
        points, clusters, iterations=iterations, cosine=cosine, seed=seed, elements=elements
    )


def cluster_keys_twin(
    points: Tensor, clusters: int, *, iterations: int, cosine: bool, seed: int, elements: int
) -> tuple[Tensor, Tensor]:
    """The meaning of `cluster_keys` in plain torch: block after block."""
    rows, blocks, count, dim = points.shape
    means = torch.empty(rows, blocks, clusters, dim, dtype=torch.float32, device=points.device)
    labels = torch.empty(rows, blocks, count, dtype=label_dtype(clusters), device=points.device)
    for block in range(blocks):
        part = points[:, block]
        found = kmeans(
            part, clusters, iterations=iterations, cosine=cosine, seed=seed, elements=elements
        )
        means[:, block] = found
        labels[:, block] = nearest(part, found, cosine=cosine, elements=elements)
    return means, labels


def drawn_places(count: int, clusters: int, seed: int) -> Tensor:
    """Points that k-means begins with, on the CPU: those of `kmeans`. int64 [clusters]"""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:clusters]


def label_dtype(clusters: int) -> torch.dtype:
    """Integers that hold the number of a cluster, and minus one."""
    return torch.int16 if clusters <= torch.iinfo(torch.int16).max else torch.int32


def cluster_bytes(
    rows: int, blocks: int, count: int, clusters: int, dim: int, elements: int
) -> int:
    """Bytes of what `cluster_keys` returns and of its temporaries, whatever its form.

    Args:
        count: points of a block.
    """
    sets = rows * blocks
    returned = sets * (4 * clusters * dim + label_dtype(clusters).itemsize * count)
    # Labels, and the sort's counts and places of each cluster (measured on a GPU: 20 bytes).
    one = kmeans_bytes(rows, clusters, dim, elements) + 8 * rows * count + 24 * rows * clusters
    # Centroids as they are multiplied, at most float32, and what is added to each product.
    fast = 4 * sets * clusters * (dim + 1) if clusters <= MOST_CLUSTERS else 0
    return returned + max(one, fast)
