"""k-means in compiled code: the nearest centroid exactly, the sums of the plain pass."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from penstock.kernels import kmeans_compiled
from penstock.kernels.kmeans import kmeans, means_twin, nearest, nearest_twin
from penstock.kernels.native.compiled import kernel

ELEMENTS = 1 << 15

needs_kernel = pytest.mark.skipif(
    kernel("nearest_points") is None, reason="no compiled kernels here"
)


def some_points(sets: int, count: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Points about a few centres, one component wide and far off, as keys are."""
    generator = torch.Generator().manual_seed(count + dim)
    centres = torch.randn(sets, 9, dim, generator=generator)
    which = torch.randint(0, 9, (sets, count), generator=generator)
    points = centres.gather(1, which.unsqueeze(2).expand(-1, -1, dim))
    points += 0.3 * torch.randn(points.shape, generator=generator)
    points[..., 0] = 40 * points[..., 0] + 100
    return points.to(dtype)


def brute_force(points: Tensor, centroids: Tensor) -> Tensor:
    """Squared distances in float64. [sets, points, clusters]"""
    gaps = points.double()[:, :, None] - centroids.double()[:, None]
    return gaps.square().sum(dim=-1)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "clusters"), [(3, 1), (16, 31), (64, 100), (70, 33)])
def test_the_nearest_is_found_exactly(dim: int, clusters: int, dtype: torch.dtype) -> None:
    points = some_points(3, 301, dim, dtype)
    centroids = points[:, :clusters].float().contiguous()
    centroids[:, clusters // 2] = centroids[:, 0]  # equal ones: the first is taken
    assert kmeans_compiled.can_take(points, cosine=False)
    found = nearest(points, centroids, cosine=False, elements=ELEMENTS)
    squares = brute_force(points, centroids)
    assert torch.equal(found, squares.argmin(dim=-1))
    assert (found == 0).any()
    plain = nearest_twin(points, centroids, cosine=False, elements=ELEMENTS)
    least = squares.min(dim=-1).values
    theirs = squares.gather(-1, plain.unsqueeze(-1)).squeeze(-1)
    # Its products of float32 are off by a share of the points' own squares, 1e4 and more.
    torch.testing.assert_close(theirs, least, rtol=1e-4, atol=0.05)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 3])
def test_a_pass_adds_up_as_the_plain_one_does(threads: int) -> None:
    points = some_points(2, 3000, 24, torch.bfloat16)
    centroids = points[:, :130].float().contiguous()
    centroids[:, 129] = 1e4  # nobody's
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = kmeans_compiled.means(points, centroids, elements=ELEMENTS)
    finally:
        torch.set_num_threads(before)
    members = one_hot(brute_force(points, centroids).argmin(dim=-1), 130).double()
    sums, sizes = members.transpose(1, 2) @ points.double(), members.sum(dim=1)[..., None]
    expected = torch.where(sizes > 0, sums / sizes, centroids.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[:, 129], centroids[:, 129])
    assert not torch.equal(found, centroids)


@needs_kernel
def test_a_pass_is_the_plain_one_where_nothing_is_near_a_tie() -> None:
    corners = 10.0 * one_hot(torch.arange(12), 12)[torch.randint(0, 12, (2, 900))]
    points = corners + torch.rand(corners.shape)
    centroids = 10.0 * one_hot(torch.arange(12), 12).float().expand(2, -1, -1).contiguous()
    found = kmeans_compiled.means(points, centroids, elements=ELEMENTS)
    plain = means_twin(points, centroids, cosine=False, elements=ELEMENTS)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)


@needs_kernel
def test_views_are_taken_as_they_are() -> None:
    """Parts of keys side by side, as product quantisation cuts them."""
    keys = some_points(2, 400, 32, torch.float32)
    parts = keys.view(2, 400, 4, 8).transpose(1, 2)
    assert not parts.is_contiguous()
    made = kmeans(parts, 20, iterations=3, cosine=False, seed=1, elements=ELEMENTS)
    again = kmeans(parts.contiguous(), 20, iterations=3, cosine=False, seed=1, elements=ELEMENTS)
    assert torch.equal(made, again)
    found = nearest(parts, made, cosine=False, elements=ELEMENTS)
    expected = brute_force(parts.reshape(8, 400, 8), made.view(8, 20, 8)).argmin(dim=-1)
    assert torch.equal(found.view(8, 400), expected)


@needs_kernel
def test_what_is_not_finite_does_no_harm() -> None:
    points = some_points(1, 300, 16, torch.float32)
    points[0, 5, 3], points[0, 7, 0] = torch.nan, torch.inf
    centroids = points[:, 10:60].contiguous()
    found = nearest(points, centroids, cosine=False, elements=ELEMENTS)[0]
    assert found.min() >= 0
    assert found.max() < 50
    fine = torch.ones(300, dtype=torch.bool)
    fine[[5, 7]] = False
    squares = brute_force(points, centroids)[0]
    assert torch.equal(found[fine], squares[fine].argmin(dim=-1))


@needs_kernel
@pytest.mark.parametrize(("clusters", "dim"), [(1000, 64), (33, 5)])
def test_the_kernel_stays_within_its_memory(clusters: int, dim: int) -> None:
    """A guard behind the scratch, the ids and the sums stays what it was."""
    points = some_points(1, 1500, dim, torch.bfloat16)[0]
    centroids = points[:clusters].float().contiguous()
    found = kernel("nearest_points")
    assert found is not None
    fixed, each = kmeans_compiled.scratch_bytes(clusters, dim)
    threads = min(2, torch.get_num_threads())
    scratch = torch.full((fixed + threads * each + 256,), 7, dtype=torch.uint8)
    ids = torch.full((1501,), -5)
    sums, sizes = torch.zeros(clusters + 1, dim), torch.zeros(clusters + 1)
    found(
        points.data_ptr(), 1, dim, len(points), dim, centroids.data_ptr(), clusters, threads,
        scratch.data_ptr(), ids.data_ptr(), sums.data_ptr(), sizes.data_ptr(),
    )  # fmt: skip
    assert (scratch[-256:] == 7).all()
    assert ids[-1] == -5
    assert (ids[:-1] >= 0).all()
    assert sums[-1].eq(0).all()
    assert sizes[-1] == 0
    assert sizes.sum() == 1500


def test_few_points_and_other_dtypes_are_left_to_torch() -> None:
    few = some_points(1, kmeans_compiled.FEWEST_POINTS - 1, 4, torch.float32)
    many = some_points(1, kmeans_compiled.FEWEST_POINTS, 4, torch.float32)
    assert not kmeans_compiled.can_take(few, cosine=False)
    assert not kmeans_compiled.can_take(many, cosine=True)
    assert not kmeans_compiled.can_take(many.double(), cosine=False)
    assert not kmeans_compiled.can_take(many.transpose(-1, -2), cosine=False)
