"""cluster_counts() and cluster_tokens(): the tokens of the clusters that rank highest."""

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.native.compiled import address, kernel

Owners = NDArray[np.int16] | NDArray[np.int32]
"""The cluster of each token, those that wait for a split as -1 - cluster."""
BoolArray = NDArray[np.bool_]
Int64Array = NDArray[np.int64]


def cluster_counts(owners: Owners, first: Int64Array, end: int, clusters: int) -> Int64Array:
    """Tokens of each cluster among those that may be selected.

    Args:
        owners: of all tokens, and room for more. [rows, at least `end`]
        first: the first token of each row that may be selected. [rows]
        end: tokens from here on may not.
        clusters: their number; every owner is below it.

    Returns:
        [rows, clusters]
    """
    compiled = kernel("cluster_counts")
    if compiled is None or not owners.flags.c_contiguous:
        return cluster_counts_twin(owners, first, end, clusters)
    counts = np.empty((len(owners), clusters), dtype=np.int64)
    first = np.ascontiguousarray(first, dtype=np.int64)
    compiled(
        address(owners), owners.itemsize, *owners.shape, address(first), end, clusters,
        address(counts),
    )  # fmt: skip
    return counts


def cluster_counts_twin(owners: Owners, first: Int64Array, end: int, clusters: int) -> Int64Array:
    """The twin of `cluster_counts`."""
    counts = np.zeros((len(owners), clusters), dtype=np.int64)
    for row, start in enumerate(first.tolist()):
        raw = owners[row, start:end]
        counts[row] = np.bincount(np.maximum(raw, ~raw), minlength=clusters)
    return counts


def cluster_tokens(
    owners: Owners, first: Int64Array, end: int, rank: Int64Array, counts: Int64Array, base: int,
    wanted: int,
) -> tuple[Int64Array, BoolArray, BoolArray]:  # fmt: skip
    """Take whole clusters by rank as long as they fit, and of the first that does not its first
    tokens, until exactly `wanted` are taken.

    Args:
        owners, first, end: as for `cluster_counts`.
        rank: clusters, the best first. [rows, clusters]
        counts: what `cluster_counts` found. [rows, clusters]
        base: added to the tokens' numbers.

    Returns:
        Tokens, ascending, and which are real where a row has fewer, int64 and bool [rows, wanted];
        and which clusters were taken whole, bool [rows, clusters].
    """
    compiled = kernel("cluster_tokens")
    if compiled is None or not owners.flags.c_contiguous:
        return cluster_tokens_twin(owners, first, end, rank, counts, base, wanted)
    rows, clusters = counts.shape
    ids = np.zeros((rows, wanted), dtype=np.int64)
    valid = np.zeros((rows, wanted), dtype=np.bool_)
    whole = np.zeros((rows, clusters), dtype=np.bool_)
    first, rank = (np.ascontiguousarray(a, dtype=np.int64) for a in (first, rank))
    compiled(
        address(owners), owners.itemsize, *owners.shape, address(first), end, clusters,
        address(rank), address(counts), base, wanted, address(ids), address(valid), address(whole),
    )  # fmt: skip
    return ids, valid, whole


def cluster_tokens_twin(
    owners: Owners, first: Int64Array, end: int, rank: Int64Array, counts: Int64Array, base: int,
    wanted: int,
) -> tuple[Int64Array, BoolArray, BoolArray]:  # fmt: skip
    """The twin of `cluster_tokens`."""
    ids = np.zeros((len(rank), wanted), dtype=np.int64)
    valid, whole = np.zeros(ids.shape, dtype=np.bool_), np.zeros(counts.shape, dtype=np.bool_)
    for row, order in enumerate(rank):
        sizes = counts[row, order]
        ends = sizes.cumsum()
        whole[row, order] = (ends <= wanted) & (sizes > 0)
        raw = owners[row, :end]
        own = np.maximum(raw, ~raw)
        chosen = whole[row, own]
        chosen[: first[row]] = False
        room = wanted - int(sizes[ends <= wanted].sum())
        if (ends > wanted).any():
            part = order[(ends > wanted).argmax()]
            at = (own == part).nonzero()[0]
            chosen[at[at >= first[row]][:room]] = True
        found = chosen.nonzero()[0] + base
        ids[row, : len(found)], valid[row, : len(found)] = found, True
    return ids, valid, whole
