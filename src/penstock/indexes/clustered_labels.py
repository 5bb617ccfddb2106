"""clustered_labels(), head_threshold(): a partition by k-means, and what it allows (DynaKV)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.kmeans import chunk_elements, kmeans, kmeans_bytes, nearest

ITERATIONS = 10

Float32Array = NDArray[np.float32]
Int64Array = NDArray[np.int64]


def clustered_labels(keys: Tensor, clusters: int, seed: int) -> tuple[Int64Array, Float32Array]:
    """Cluster each row's keys by distance; clusters without a key have no number.

    Args:
        keys: any float dtype. [rows, tokens, dim]
        clusters: most of a row.

    Returns:
        Labels from 0 on without a gap [rows, tokens], and the keys [rows, tokens, dim].
    """
    elements = chunk_elements(keys.shape[0] * keys.shape[1])
    with torch.no_grad():
        means = kmeans(
            keys, clusters, iterations=ITERATIONS, cosine=False, seed=seed, elements=elements
        )
        found = nearest(keys, means, cosine=False, elements=elements).cpu().numpy()
        wide = keys.detach().float().cpu().numpy()
    labels = np.empty_like(found)
    for row, part in enumerate(found):
        labels[row] = np.unique(part, return_inverse=True)[1]
    return labels, wide


def labels_bytes(rows: int, tokens: int, dim: int, clusters: int) -> int:
    """Temporaries of `clustered_labels`, what it returns included, for the ledger."""
    means = kmeans_bytes(rows, clusters, dim, chunk_elements(rows * tokens))
    return means + 4 * rows * clusters * dim + tokens * rows * (4 * dim + 16)


def head_threshold(
    keys: Float32Array, variances: Float32Array, sizes: NDArray[np.int32], quantile: float
) -> float:
    """A row's threshold: a quantile of its clusters' variances, weighted by size.

    Where that is 0, because clusters of one entry say nothing, it is a cluster's share of the
    spread of all keys.

    Args:
        keys: [tokens, dim]
        variances, sizes: of its clusters. [clusters]
        quantile: from 0 to 1.
    """
    found = weighted_quantile(variances, sizes, quantile)
    if found > 0.0:
        return found
    return float(keys.var(axis=0, dtype=np.float64).sum()) / len(sizes)


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
