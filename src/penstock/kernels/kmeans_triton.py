"""k-means in Triton: the twin of kmeans.py's plain steps, for points that are on a GPU.

Similarities stay in registers: no memory of points times clusters. The product is of the points as
they are with centroids rounded to the points' dtype; what is added to it (minus half the squared
length) is float32 and of the rounded centroids, so that a point goes to the nearest of those.
Products of float32 are made of three of TF32. Sums are float32, of the points as they are.

Nothing is added atomically, so results repeat to the bit: points are put in order of their
clusters (a stable sort of labels), then one program per cluster adds its points up in that order.
Nothing here waits for the device, and everything is launched on the current stream.
"""

# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize

POINT_BYTES = 48
"""Temporaries per point that is sorted: label, label and place in order, and the sort's own."""
MOST_ROW_BYTES = 512
"""Of a point, so that blocks of points and centroids fit into shared memory."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_MEMBERS = 32


@triton.jit(do_not_specialize=["count", "clusters", "inner", "out_set"])
def _assign_kernel(
    points, centroids, offsets, out, count, clusters, inner,
    points_outer, points_inner, points_row, points_column, out_set,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_POINTS: tl.constexpr,
    BLOCK_CLUSTERS: tl.constexpr, ACROSS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A block of points of one set against all its centroids, a block of them at a time."""
    which = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_POINTS + tl.arange(0, BLOCK_POINTS)
    columns = tl.arange(0, WIDTH)
    inside = columns < DIM
    real = rows < count
    at = rows.to(tl.int64)[:, None] * points_row + columns[None, :] * points_column
    points += (which // inner) * points_outer + (which % inner) * points_inner
    x = tl.load(points + at, mask=real[:, None] & inside[None, :], other=0.0)
    if WIDEN:
        x = x.to(tl.float32)
    centroids += which * clusters * DIM
    offsets += which * clusters
    lane = tl.arange(0, BLOCK_CLUSTERS)
    # The best of each column of blocks: earlier ones stay where later ones are no better.
    best = tl.full([BLOCK_POINTS, BLOCK_CLUSTERS], float("-inf"), tl.float32)
    label = tl.zeros([BLOCK_POINTS, BLOCK_CLUSTERS], tl.int32)
    for start in range(0, clusters, BLOCK_CLUSTERS):
        ids = start + lane
        c = tl.load(
            centroids + ids[:, None] * DIM + columns[None, :],
            mask=(ids < clusters)[:, None] & inside[None, :],
            other=0.0,
        )
        if WIDEN:
            c = c.to(tl.float32)
        offset = tl.load(offsets + ids, mask=ids < clusters, other=float("-inf"))
        near = tl.dot(x, tl.trans(c), input_precision="tf32x3") + offset[None, :]
        better = near > best
        best = tl.where(better, near, best)
        label = tl.where(better, ids[None, :], label)
    top = tl.max(best, axis=1)
    first = tl.min(tl.where(best == top[:, None], label, clusters - 1), axis=1)
    if ACROSS:
        first += which.to(tl.int32) * clusters
    tl.store(out + which * out_set + rows, first, mask=real)


@triton.jit(do_not_specialize=["count", "clusters", "inner"])
def _add_kernel(
    points, order, starts, sums, sizes, count, clusters, inner,
    points_outer, points_inner, points_row, points_column,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the points of one cluster to its sum, and how many they are to its size."""
    cluster = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + cluster), tl.load(starts + cluster + 1)
    if begin < end:
        which = cluster // clusters
        columns = tl.arange(0, WIDTH)
        inside = columns < DIM
        points += (which // inner) * points_outer + (which % inner) * points_inner
        total = tl.zeros([BLOCK, WIDTH], tl.float32)
        for start in range(begin, end, BLOCK):
            places = start + tl.arange(0, BLOCK)
            real = places < end
            # Places in order are of all sets together.
            rows = tl.load(order + places, mask=real, other=0) - which * count
            at = rows[:, None] * points_row + columns[None, :] * points_column
            x = tl.load(points + at, mask=real[:, None] & inside[None, :], other=0.0)
            total += x.to(tl.float32)
        to = sums + cluster * DIM + columns
        summed = tl.load(to, mask=inside, other=0.0) + tl.sum(total, axis=0)
        tl.store(to, summed, mask=inside)
        tl.store(sizes + cluster, tl.load(sizes + cluster) + (end - begin))


def can_take(points: Tensor) -> bool:
    """Whether dtype and dim are ones that the kernels are made for."""
    return points.dtype in DTYPES and padded_width(points.shape[-1]) <= (
        MOST_ROW_BYTES // points.element_size()
    )


def means(points: Tensor, centroids: Tensor, *, cosine: bool, scratch_bytes: int) -> Tensor:
    """One iteration of Lloyd's algorithm: the means of the points nearest to each centroid.

    Source: LouisKV, section 4.2 (clusters of the prompt's keys).

    Args:
        points: any strides. bfloat16, float16 or float32 [..., points, dim]
        centroids: float32 [sets, clusters, dim]
        cosine: nearness is the cosine instead of the distance.
        scratch_bytes: of temporaries that grow with the points looked at together.

    Returns:
        float32 [sets, clusters, dim]; a centroid without points is as it was.
    """
    sets, clusters, dim = centroids.shape
    centroids = centroids.contiguous()
    rounded, offsets = prepare(centroids, points.dtype, cosine=cosine)
    sums = torch.zeros_like(centroids)
    sizes = torch.zeros(sets * clusters, dtype=torch.int32, device=points.device)
    bounds = torch.arange(sets * clusters + 1, dtype=torch.int32, device=points.device)
    step = _chunk_points(points, sets, POINT_BYTES, scratch_bytes)
    for start in range(0, points.shape[-2], step):
        chunk = two_leading(points[..., start : start + step, :])
        count = chunk.shape[-2]
        # Narrow numbers are sorted in half the passes.
        narrow = sets * clusters <= torch.iinfo(torch.int16).max
        dtype = torch.int16 if narrow else torch.int32
        keys = torch.empty(sets, count, dtype=dtype, device=points.device)
        assign(chunk, rounded, offsets, keys, across=True)
        ordered, order = torch.sort(keys.view(-1), stable=True)
        starts = torch.searchsorted(ordered, bounds.to(dtype), out_int32=True)
        with torch.cuda.device_of(points):
            _add_kernel[(sets * clusters,)](
                chunk, order, starts, sums, sizes, count, clusters, chunk.shape[1],
                *chunk.stride(),
                DIM=dim, WIDTH=padded_width(dim), BLOCK=BLOCK_MEMBERS, num_warps=4,
            )  # fmt: skip
    del rounded
    counts = sizes.view(sets, clusters, 1)
    return torch.where(counts > 0, sums.div_(counts.clamp_min(1)), centroids)


def nearest(points: Tensor, centroids: Tensor, *, cosine: bool, scratch_bytes: int) -> Tensor:
    """The centroid of each point; the first of those that are equally near.

    Source: LouisKV, section 4.2 (clusters of the prompt's keys).

    Args:
        points: any strides. bfloat16, float16 or float32 [..., points, dim]
        centroids: float32 [sets, clusters, dim]
        cosine: nearness is the cosine instead of the distance.
        scratch_bytes: of copies, where leading dimensions of `points` do not lie as one.

    Returns:
        int64 [sets, points]
    """
    sets = centroids.shape[0]
    centroids = centroids.contiguous()
    rounded, offsets = prepare(centroids, points.dtype, cosine=cosine)
    total = points.shape[-2]
    out = torch.empty(sets, total, dtype=torch.int64, device=points.device)
    step = _chunk_points(points, sets, 0, scratch_bytes)
    for start in range(0, total, step):
        chunk = two_leading(points[..., start : start + step, :])
        assign(chunk, rounded, offsets, out[:, start : start + step], across=False)
    return out


def prepare(centroids: Tensor, dtype: torch.dtype, *, cosine: bool) -> tuple[Tensor, Tensor]:
    """Centroids to multiply with, and what to add to each product. [sets, clusters(, dim)]"""
    if cosine:
        rounded = normalize(centroids, dim=-1).to(dtype)
        return rounded, centroids.new_zeros(centroids.shape[:2])
    rounded = centroids.to(dtype)
    return rounded, rounded.float().square().sum(-1).mul_(-0.5)


def assign(points: Tensor, rounded: Tensor, offsets: Tensor, out: Tensor, *, across: bool) -> None:
    """Write the nearest centroid of each point, numbered within its set or across all sets.

    Args:
        points: [outer, inner, points, dim], outer * inner sets
        rounded, offsets: see `prepare`.
        out: int16, int32 or int64 [sets, points], last dim contiguous
    """
    outer, inner, count, dim = points.shape
    width = padded_width(dim)
    wide = width * points.element_size() > 256  # a row of a block of points
    block_points = 64 if wide else 128
    with torch.cuda.device_of(points):
        _assign_kernel[(triton.cdiv(count, block_points), outer * inner)](
            points, rounded, offsets, out, count, rounded.shape[1], inner, *points.stride(),
            out.stride(0), DIM=dim, WIDTH=width, BLOCK_POINTS=block_points,
            BLOCK_CLUSTERS=32 if wide else 64, ACROSS=across,
            # The interpreter multiplies bfloat16 as if it were whole numbers.
            WIDEN=not points.is_cuda, num_warps=4 if wide else 8, num_stages=3,
        )  # fmt: skip


def _chunk_points(points: Tensor, sets: int, point_bytes: int, scratch_bytes: int) -> int:
    """Points of each set that are looked at together: all of them, where nothing grows with them.

    More than two leading dimensions that do not lie as one are copied, chunk by chunk.
    """
    row_bytes = points.shape[-1] * points.element_size()
    each = sets * (point_bytes + (row_bytes if points.ndim > 4 else 0))
    most = scratch_bytes // each if each else points.shape[-2]
    return max(1, min(points.shape[-2], most))


def two_leading(points: Tensor) -> Tensor:
    """The same points as [outer, inner, points, dim], without a copy of up to four dimensions."""
    if points.ndim > 4:
        return points.flatten(1, -3)
    return points[(None,) * (4 - points.ndim)]


def padded_width(dim: int) -> int:
    """A power of two that holds `dim`, at least what a matrix product takes."""
    return max(16, 1 << (dim - 1).bit_length())
