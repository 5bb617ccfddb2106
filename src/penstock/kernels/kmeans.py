"""kmeans() and nearest(): Lloyd's algorithm for many sets of points at once, in bounded memory."""

from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import normalize

from penstock.kernels import kmeans_compiled
from penstock.kernels.device.available import uses_triton

FEWEST_ELEMENTS, MOST_ELEMENTS = 1 << 14, 1 << 19
MOST_CHUNK_TOKENS = 4096
FEWEST_POINTS = 4
"""Points of a set looked at together, even where that takes more elements than wanted."""


def chunk_elements(max_tokens: int) -> int:
    """Elements of a chunk's temporaries that befit caches of so many tokens, all rows together."""
    return min(MOST_ELEMENTS, max(FEWEST_ELEMENTS, 2 * max_tokens))


def chunk_tokens(max_tokens: int) -> int:
    """Tokens assigned to centroids at a time; four times as many are scored at a time."""
    return min(max_tokens, MOST_CHUNK_TOKENS, max(256, max_tokens // 16))


def kmeans(
    points: Tensor, clusters: int, *, iterations: int, cosine: bool, seed: int, elements: int
) -> Tensor:
    """Centroids of each set: the means of the points that are nearest to them.

    On a GPU it runs in the current stream and never waits for the device (`kmeans_triton`, where
    there is Triton); on a CPU in compiled code where distances are asked for (`kmeans_compiled`).

    The first centroids are points drawn by `seed`, the same places in every set, so that a set's
    result depends on no other set. A centroid that loses all its points stays where it was.

    Args:
        points: any float dtype. [..., points, dim]
        clusters: centroids of a set; where there are fewer points, some are alike.
        cosine: nearness is the cosine instead of the distance; means are of the points as they are.
        elements: of a chunk's temporaries, float32 (`chunk_elements`).

    Returns:
        float32 [..., clusters, dim]
    """
    count, dim = points.shape[-2:]
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    drawn = drawn.repeat(-(-clusters // count))[:clusters]
    if points.is_cuda:
        # From pageable memory the copy would wait for all that the stream has to do before.
        drawn = drawn.pin_memory().to(points.device, non_blocking=True)
    centroids = points[..., drawn, :].float().reshape(-1, clusters, dim)
    for _ in range(iterations):
        centroids = _means(points, centroids, cosine=cosine, elements=elements)
    return centroids.view(*points.shape[:-2], clusters, dim)


def nearest(points: Tensor, centroids: Tensor, *, cosine: bool, elements: int) -> Tensor:
    """The centroid of each point.

    Args:
        points: [..., points, dim]
        centroids: [..., clusters, dim]
        elements: of a chunk's temporaries, float32 (`chunk_elements`).

    Returns:
        int64 [..., points]
    """
    clusters, dim = centroids.shape[-2:]
    flat = centroids.float().reshape(-1, clusters, dim)
    if (fast := _triton_form(points)) is not None:
        room = _scratch_bytes(flat.shape[0], clusters, dim, elements)
        ids: Tensor = fast.nearest(points, flat, cosine=cosine, scratch_bytes=room)
        return ids.view(points.shape[:-1])
    if kmeans_compiled.can_take(points, cosine=cosine):
        return kmeans_compiled.nearest(points, flat.contiguous(), elements=elements)
    return nearest_twin(points, flat, cosine=cosine, elements=elements)


def nearest_twin(points: Tensor, flat: Tensor, *, cosine: bool, elements: int) -> Tensor:
    """The meaning of `nearest` in plain torch, but for the rounding of products.

    Args:
        flat: the centroids. float32 [sets, clusters, dim]
    """
    clusters, dim = flat.shape[-2:]
    prepared = _prepare(flat, cosine=cosine)
    step = _chunk_points(flat.shape[0], clusters, dim, elements)
    out = torch.empty(points.shape[:-1], dtype=torch.int64, device=points.device)
    for start in range(0, points.shape[-2], step):
        chunk = points[..., start : start + step, :].float().reshape(flat.shape[0], -1, dim)
        part = out[..., start : start + step]
        part.copy_(_nearest(chunk, *prepared).view(part.shape))
    return out


def mean_distances(points: Tensor, centroids: Tensor, labels: Tensor, *, elements: int) -> Tensor:
    """Mean squared distance of the points of each centroid to it, in plain torch.

    Args:
        points: any float dtype. [sets, points, dim]
        centroids: float32 [sets, clusters, dim]
        labels: the centroid of each point. int [sets, points]
        elements: of a chunk's temporaries, float32.

    Returns:
        float32 [sets, clusters], zero where a centroid has no point.
    """
    sets, clusters, dim = centroids.shape
    sums, counts = centroids.new_zeros(sets, clusters), centroids.new_zeros(sets, clusters)
    step = max(1, elements // (2 * sets * dim))
    for start in range(0, points.shape[1], step):
        part = labels[:, start : start + step].long()
        gaps = centroids.gather(1, part.unsqueeze(2).expand(-1, -1, dim))
        gaps -= points[:, start : start + step]
        apart = gaps.square_().sum(dim=2)
        sums.scatter_add_(1, part, apart)
        counts.scatter_add_(1, part, torch.ones_like(apart))
    return sums.div_(counts.clamp_min_(1.0))


def kmeans_bytes(sets: int, clusters: int, dim: int, elements: int) -> int:
    """Temporaries of `kmeans` and `nearest` beside the points and what `nearest` returns.

    Args:
        sets: sets of points, all leading dimensions together.
    """
    return _scratch_bytes(sets, clusters, dim, elements) + 4 * sets * clusters * (4 * dim + 2)


def _scratch_bytes(sets: int, clusters: int, dim: int, elements: int) -> int:
    """Of a chunk's temporaries."""
    step = _chunk_points(sets, clusters, dim, elements)
    return 4 * sets * step * _point_elements(clusters, dim)


def _triton_form(points: Tensor) -> ModuleType | None:
    """The module of kernels that can take these points, if there is one."""
    if not uses_triton(points):
        return None
    from penstock.kernels import kmeans_triton

    return kmeans_triton if kmeans_triton.can_take(points) else None


def _point_elements(clusters: int, dim: int) -> int:
    """Similarities, memberships, the point twice, and where it belongs."""
    return 2 * clusters + 2 * dim + 4


def _chunk_points(sets: int, clusters: int, dim: int, elements: int) -> int:
    return max(FEWEST_POINTS, elements // (sets * _point_elements(clusters, dim)))


def _prepare(centroids: Tensor, *, cosine: bool) -> tuple[Tensor, Tensor]:
    """What makes nearness one product: transposed centroids, and what to add to each column."""
    if cosine:
        centroids = normalize(centroids, dim=-1)
        return centroids.transpose(1, 2), centroids.new_zeros(1, 1, 1)
    return centroids.transpose(1, 2), centroids.square().sum(-1).mul(-0.5).unsqueeze(1)


def _nearest(chunk: Tensor, columns: Tensor, offset: Tensor) -> Tensor:
    return torch.baddbmm(offset, chunk, columns).argmax(dim=-1)


def _means(points: Tensor, centroids: Tensor, *, cosine: bool, elements: int) -> Tensor:
    """One iteration. [sets, clusters, dim]"""
    sets, clusters, dim = centroids.shape
    if (fast := _triton_form(points)) is not None:
        room = _scratch_bytes(sets, clusters, dim, elements)
        moved: Tensor = fast.means(points, centroids, cosine=cosine, scratch_bytes=room)
        return moved
    if kmeans_compiled.can_take(points, cosine=cosine):
        return kmeans_compiled.means(points, centroids.contiguous(), elements=elements)
    return means_twin(points, centroids, cosine=cosine, elements=elements)


def means_twin(points: Tensor, centroids: Tensor, *, cosine: bool, elements: int) -> Tensor:
    """The meaning of a pass in plain torch. [sets, clusters, dim]"""
    sets, clusters, dim = centroids.shape
    prepared = _prepare(centroids, cosine=cosine)
    sums = torch.zeros_like(centroids)
    sizes = centroids.new_zeros(sets, clusters, 1)
    step = _chunk_points(sets, clusters, dim, elements)
    for start in range(0, points.shape[-2], step):
        chunk = points[..., start : start + step, :].float().reshape(sets, -1, dim)
        ids = _nearest(chunk, *prepared).unsqueeze(-1)
        if chunk.is_cuda:
            # Adding by index is not reproducible there.
            members = chunk.new_zeros(sets, chunk.shape[1], clusters).scatter_(2, ids, 1.0)
            sums.baddbmm_(members.transpose(1, 2), chunk)
            sizes.add_(members.sum(dim=1).unsqueeze(-1))
        else:
            sums.scatter_add_(1, ids.expand_as(chunk), chunk)
            sizes.scatter_add_(1, ids, torch.ones_like(ids, dtype=sizes.dtype))
    return torch.where(sizes > 0, sums / sizes.clamp_min(1), centroids)
