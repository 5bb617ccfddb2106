"""Passes of k-means on a CPU, in compiled code (`native/kmeans.c`); `kmeans` has the twins."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.native.compiled import Kernel, kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES

POINTS, TILE, CHUNK = 4, 32, 1024
"""As in `kmeans.c`: points and centroids looked at together, points between two additions."""
FEWEST_POINTS = 256
"""Of a set; the copy of the centroids that is made first is not worth it for fewer."""


def can_take(points: Tensor, *, cosine: bool) -> bool:
    """Whether these can be clustered here: many, on a CPU that can, by distance.

    Args:
        points: [..., points, dim]
    """
    return (
        not cosine and points.device.type == "cpu" and points.dtype in DTYPE_CODES
        and points.shape[-2] >= FEWEST_POINTS and points.stride(-1) == 1
        and kernel("nearest_points") is not None
    )  # fmt: skip


def nearest(points: Tensor, centroids: Tensor, *, elements: int) -> Tensor:
    """The nearest centroid of each point, exactly; of equals the first.

    Args:
        points: [..., points, dim]
        centroids: float32, contiguous. [sets, clusters, dim]
        elements: of temporaries, float32, where that is enough for one thread.

    Returns:
        int64 [..., points]
    """
    out = torch.empty(points.shape[:-1], dtype=torch.int64)
    ids = out.view(len(centroids), -1)
    run = _Passes(points, centroids, elements)
    for number, part in enumerate(_sets(points)):
        run(number, part, ids[number].data_ptr(), None, None)
    return out


def means(points: Tensor, centroids: Tensor, *, elements: int) -> Tensor:
    """The means of the points that are nearest to each centroid; those of none stay.

    Args:
        points: [..., points, dim]
        centroids, elements: as of `nearest`.

    Returns:
        float32 [sets, clusters, dim]
    """
    sums = torch.zeros_like(centroids)
    sizes = centroids.new_zeros(*centroids.shape[:2], 1)
    run = _Passes(points, centroids, elements)
    for number, part in enumerate(_sets(points)):
        run(number, part, None, sums[number].data_ptr(), sizes[number].data_ptr())
    return torch.where(sizes > 0, sums.div_(sizes.clamp_min(1)), centroids)


class _Passes:
    """Calls of the kernel for sets of one shape, which share the memory that it works in."""

    def __init__(self, points: Tensor, centroids: Tensor, elements: int) -> None:
        found = kernel("nearest_points")
        assert found is not None, "can_take() comes first"
        assert centroids.is_contiguous()
        self._kernel: Kernel = found
        self._centroids = centroids
        _, clusters, dim = centroids.shape
        fixed, each = scratch_bytes(clusters, dim)
        self._threads = max(1, min(torch.get_num_threads(), (4 * elements - fixed) // each))
        self._scratch = torch.empty(fixed + self._threads * each, dtype=torch.uint8)

    def __call__(
        self, number: int, points: Tensor, ids: int | None, sums: int | None, sizes: int | None
    ) -> None:
        """One set. points: [points, dim]; the others are addresses."""
        _, clusters, dim = self._centroids.shape
        self._kernel(
            points.data_ptr(), DTYPE_CODES[points.dtype], points.stride(0), len(points), dim,
            self._centroids[number].data_ptr(), clusters, self._threads, self._scratch.data_ptr(),
            ids, sums, sizes,
        )  # fmt: skip


def scratch_bytes(clusters: int, dim: int) -> tuple[int, int]:
    """Bytes that the kernel works in: for the copy of the centroids, and for each thread."""
    width, padded = -(-dim // 16) * 16, -(-clusters // TILE) * TILE
    fixed = 8 * CHUNK + 4 * (2 * width + 2 * padded + 16) + padded * width
    return fixed, POINTS * (4 * padded + width)


def _sets(points: Tensor) -> Iterator[Tensor]:
    """Set by set, in the order of the leading dimensions. [points, dim] each"""
    for place in itertools.product(*map(range, points.shape[:-2])):
        yield points[place]
