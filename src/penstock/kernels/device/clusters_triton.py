"""Triton form of cluster_keys(): a launch for the labels of all points, one for all centroids.

The products, their dtypes and what ties do are those of `kmeans_triton`. Sums are made by a matrix
product as well: memberships (zeros and ones, exact in any dtype) times the points as they are,
added up in float32 in the order of the points. So nothing is sorted, nothing is added atomically,
results repeat to the bit, and what grows with the points is one label each. An iteration is twice
the operations of its assignment, all of them on tensor cores.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import kmeans_triton
from penstock.kernels.device.clusters import MOST_CLUSTERS, drawn_places, label_dtype

BLOCK_CLUSTERS, BLOCK_POINTS = 64, 64
"""Of one product of the sums."""


def can_take(points: Tensor, clusters: int) -> bool:
    """Whether dtype, dim and counts are ones that the kernels are made for."""
    few = clusters <= min(MOST_CLUSTERS, points.shape[2])
    return few and kmeans_triton.can_take(points)


def cluster_keys(
    points: Tensor, clusters: int, *, iterations: int, cosine: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """`clusters.cluster_keys` in Triton: 2 * iterations + 2 launches of kernels and a few short
    ones.

    Nothing waits for the device; all is launched on the current stream.
    """
    rows, blocks, count, dim = points.shape
    sets, device = rows * blocks, points.device
    centroids = torch.empty(sets, clusters, dim, dtype=torch.float32, device=device)
    rounded = torch.empty(sets, clusters, dim, dtype=points.dtype, device=device)
    offsets = torch.zeros(sets, clusters, dtype=torch.float32, device=device)
    # The points that are drawn are the only ones of their clusters: their means are themselves.
    labels = torch.full((sets, count), -1, dtype=label_dtype(clusters), device=device)
    drawn = drawn_places(count, clusters, seed)
    if points.is_cuda:
        # From pageable memory the copy would wait for all that the stream has to do before.
        drawn = drawn.pin_memory().to(device, non_blocking=True)
    labels[:, drawn] = torch.arange(clusters, dtype=labels.dtype, device=device)
    _move(points, labels, centroids, rounded, offsets, cosine=cosine)
    for _ in range(iterations):
        kmeans_triton.assign(points, rounded, offsets, labels, across=False)
        _move(points, labels, centroids, rounded, offsets, cosine=cosine)
    kmeans_triton.assign(points, rounded, offsets, labels, across=False)
    return centroids.view(rows, blocks, clusters, dim), labels.view(rows, blocks, count)


def _move(
    points: Tensor, labels: Tensor, centroids: Tensor, rounded: Tensor, offsets: Tensor, *,
    cosine: bool,
) -> None:  # fmt: skip
    """Move centroids to the means of their points, and make ready what they are multiplied as."""
    outer, inner, count, dim = points.shape
    clusters = centroids.shape[1]
    with torch.cuda.device_of(points):
        _move_kernel[(triton.cdiv(clusters, BLOCK_CLUSTERS), outer * inner)](
            points, labels, centroids, rounded, offsets, count, clusters, inner, *points.stride(),
            DIM=dim, WIDTH=kmeans_triton.padded_width(dim), BLOCK_POINTS=BLOCK_POINTS,
            BLOCK_CLUSTERS=BLOCK_CLUSTERS, COSINE=cosine,
            # The interpreter multiplies bfloat16 as if it were whole numbers.
            WIDEN=not points.is_cuda, num_warps=4, num_stages=3,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "clusters", "inner"])
def _move_kernel(
    points, labels, centroids, rounded, offsets, count, clusters, inner,
    points_outer, points_inner, points_row, points_column,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_POINTS: tl.constexpr,
    BLOCK_CLUSTERS: tl.constexpr, COSINE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Some clusters of one set: the sum of their points, and what follows from it."""
    which = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK_CLUSTERS + tl.arange(0, BLOCK_CLUSTERS)
    columns = tl.arange(0, WIDTH)
    inside = columns < DIM
    points += (which // inner) * points_outer + (which % inner) * points_inner
    labels += which * count
    sums = tl.zeros([BLOCK_CLUSTERS, WIDTH], tl.float32)
    members = tl.zeros([BLOCK_CLUSTERS, BLOCK_POINTS], tl.int32)
    for start in range(0, count, BLOCK_POINTS):
        rows = start + tl.arange(0, BLOCK_POINTS)
        real = rows < count
        label = tl.load(labels + rows, mask=real, other=-1).to(tl.int32)
        at = rows.to(tl.int64)[:, None] * points_row + columns[None, :] * points_column
        x = tl.load(points + at, mask=real[:, None] & inside[None, :], other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
        mine = ids[:, None] == label[None, :]
        members += mine.to(tl.int32)
        sums = tl.dot(mine.to(x.dtype), x, sums, input_precision="tf32x3")
    size = tl.sum(members, axis=1)[:, None]
    used = ids < clusters
    whole = used[:, None] & inside[None, :]
    at = (which * clusters + ids)[:, None] * DIM + columns[None, :]
    old = tl.load(centroids + at, mask=whole & (size == 0), other=0.0)
    moved = tl.where(size > 0, sums / tl.maximum(size, 1).to(tl.float32), old)
    tl.store(centroids + at, moved, mask=whole)
    if COSINE:
        length = tl.maximum(tl.sqrt(tl.sum(moved * moved, axis=1)), 1e-12)
        tl.store(rounded + at, (moved / length[:, None]).to(rounded.dtype.element_ty), mask=whole)
    else:
        near = moved.to(rounded.dtype.element_ty)
        tl.store(rounded + at, near, mask=whole)
        wide = near.to(tl.float32)
        tl.store(offsets + which * clusters + ids, -0.5 * tl.sum(wide * wide, axis=1), mask=used)
