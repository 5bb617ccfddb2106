"""clustered_labels(), head_threshold(): a partition by k-means, and what it allows (DynaKV)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.kmeans import chunk_elements, kmeans, kmeans_bytes, nearest
from penstock.methods.dynakv.cluster_statistics import grouped_statistics

ITERATIONS = 10

Float32Array = NDArray[np.float32]
Int64Array = NDArray[np.int64]


def clustered_labels(keys: Tensor, clusters: int, seed: int) -> Int64Array:
    """Cluster one row's keys by distance; clusters without a key have no number.

    Args:
        keys: any float dtype. [tokens, dim]
        clusters: most of them.

    Returns:
        Labels from 0 on without a gap. [tokens]
    """
    elements = _elements(len(keys), keys.shape[1], clusters)
    with torch.no_grad():
        means = kmeans(
            keys, clusters, iterations=ITERATIONS, cosine=False, seed=seed, elements=elements
        )
        found: Int64Array = nearest(keys, means, cosine=False, elements=elements).cpu().numpy()
    numbers = np.cumsum(np.bincount(found, minlength=clusters) > 0) - 1
    # Clipping never happens, but without it `take` makes a copy.
    return numbers.take(found, out=found, mode="clip")


def labels_bytes(tokens: int, dim: int, clusters: int) -> int:
    """Temporaries of `clustered_labels`, what it returns included, for the ledger."""
    elements = _elements(tokens, dim, clusters)
    return kmeans_bytes(1, clusters, dim, elements) + 16 * (tokens + clusters)


def _elements(tokens: int, dim: int, clusters: int) -> int:
    """Of a chunk's temporaries: at least half of what k-means takes for centroids anyway."""
    return max(chunk_elements(tokens), 2 * clusters * dim)


def head_threshold(
    keys: Tensor, variances: Float32Array, sizes: NDArray[np.int32], quantile: float
) -> float:
    """A row's threshold: a quantile of its clusters' variances, weighted by size.

    Where that is 0, because clusters of one entry say nothing, it is a cluster's share of the
    spread of all keys.

    Args:
        keys: any float dtype. [tokens, dim]
        variances, sizes: of its clusters. [clusters]
        quantile: from 0 to 1.
    """
    found = weighted_quantile(variances, sizes, quantile)
    if found > 0.0:
        return found
    together = np.zeros(len(keys), dtype=np.int8)
    spread = float(grouped_statistics(keys, together, 1)[2][0]) / len(keys)
    return spread / len(sizes)


def weighted_quantile(values: Float32Array, weights: NDArray[np.int32], quantile: float) -> float:
    """The smallest value that, with those below it, has at least this share of the weight.

    Args:
        values, weights: at least one weight is not 0. [any]
        quantile: from 0 to 1.
    """
    order = values.argsort()
    below = np.cumsum(weights[order], dtype=np.float64)
    at = int(np.searchsorted(below, max(quantile * below[-1], 1e-9)))
    return float(values[order[min(at, len(order) - 1)]])
