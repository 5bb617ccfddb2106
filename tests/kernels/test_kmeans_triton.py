"""k-means in Triton, on CUDA or in Triton's interpreter, against its twin and against float64."""

import os

import pytest
import torch
from torch import Tensor

from penstock.kernels import kmeans as twin
from penstock.kernels.kmeans import kmeans, kmeans_bytes, nearest
from penstock.testing.pairs import covering

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")
from penstock.kernels import kmeans_triton  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounds_of_loops")
DEVICE = "cuda" if HAS_CUDA else "cpu"
AMPLE = 1 << 20
SHAPES = [  # sets, points, clusters, dim
    (1, 1, 1, 1),
    (2, 5, 9, 4),
    (3, 33, 7, 16),
    (1, 130, 65, 24),
    (1, 257, 70, 64),
    (1, 100, 31, 128),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def made(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, shift: float = 0.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + shift).to(dtype).to(DEVICE)


def distances(points: Tensor, centroids: Tensor, *, cosine: bool) -> Tensor:
    """Of each point to each centroid as the kernel rounds it; float64, smaller is nearer."""
    wide = points.double()
    if cosine:
        unit = torch.nn.functional.normalize(centroids, dim=-1).to(points.dtype).double()
        return -wide @ unit.transpose(1, 2)
    return torch.cdist(wide, centroids.to(points.dtype).double()).square() / 2


def assert_nearest(points: Tensor, centroids: Tensor, ids: Tensor, *, cosine: bool) -> None:
    """No centroid is nearer than the label's, but for the rounding of sums in float32."""
    away = distances(points, centroids, cosine=cosine)
    own = away.gather(2, ids.unsqueeze(-1)).squeeze(-1)
    scale = points.double().norm(dim=-1) + centroids.double().norm(dim=-1).amax(1, keepdim=True)
    assert bool((own - away.amin(2) <= 4e-6 * scale.square()).all())


@pytest.mark.parametrize(("shape", "dtype", "cosine"), covering(SHAPES, DTYPES, [False, True]))
def test_labels_are_the_nearest(
    shape: tuple[int, int, int, int], dtype: torch.dtype, cosine: bool
) -> None:
    sets, count, clusters, dim = shape
    points = made(sets, count, dim, dtype=dtype, shift=0.5)
    centroids = made(sets, clusters, dim, seed=1, shift=0.5)
    ids = kmeans_triton.nearest(points, centroids, cosine=cosine, scratch_bytes=AMPLE)
    assert ids.dtype == torch.int64
    assert ids.shape == (sets, count)
    assert_nearest(points, centroids, ids, cosine=cosine)
    if dtype == torch.float32:
        same = ids == nearest(points.cpu(), centroids.cpu(), cosine=cosine, elements=AMPLE).to(
            DEVICE
        )
        away = distances(points, centroids, cosine=cosine).sort(dim=2).values
        apart = away[..., min(1, clusters - 1)] - away[..., 0] > 1e-3
        assert bool(same[apart | (clusters == 1)].all())


@pytest.mark.parametrize("clusters", [32, 50])
def test_equally_near_goes_to_the_first(clusters: int) -> None:
    """Within a block of centroids and across blocks, at one place of them (32) and at others."""
    points = made(1, 40, 8, dtype=torch.bfloat16)
    once = made(1, clusters, 8, seed=1)
    doubled = once.repeat_interleave(2, dim=1).repeat(1, 3, 1)
    ids = kmeans_triton.nearest(points, doubled, cosine=False, scratch_bytes=AMPLE)
    alone = kmeans_triton.nearest(points, once, cosine=False, scratch_bytes=AMPLE)
    assert torch.equal(ids, 2 * alone)
    assert len(set(alone.flatten().tolist())) > 3
    broken = torch.full_like(points, float("nan"))
    ids = kmeans_triton.nearest(broken, doubled, cosine=False, scratch_bytes=AMPLE)
    assert not ids.any()


@pytest.mark.parametrize(
    ("shape", "dtype", "cosine", "scratch_bytes"),
    covering(SHAPES, DTYPES, [False, True], [AMPLE, 1]),
)
def test_means_are_those_of_the_labels(
    shape: tuple[int, int, int, int], dtype: torch.dtype, cosine: bool, scratch_bytes: int
) -> None:
    sets, count, clusters, dim = shape
    if scratch_bytes == 1 and count > 10:  # some chunks, the last one shorter
        scratch_bytes = sets * kmeans_triton.POINT_BYTES * min(37, count // 3 + 1)
    points = made(sets, count, dim, dtype=dtype, shift=0.5)
    centroids = made(sets, clusters, dim, seed=1, shift=0.5)
    centroids[:, clusters // 2] = 100.0  # far from all, unless it is the only one
    before = centroids.clone()
    means = kmeans_triton.means(points, centroids, cosine=cosine, scratch_bytes=scratch_bytes)
    ids = kmeans_triton.nearest(points, centroids, cosine=cosine, scratch_bytes=AMPLE)
    members = torch.nn.functional.one_hot(ids, clusters).double()
    sizes = members.sum(dim=1).unsqueeze(-1)
    expected = members.transpose(1, 2) @ points.double() / sizes.clamp_min(1)
    expected = torch.where(sizes > 0, expected, before.double())
    assert torch.equal(centroids, before)
    assert means.dtype == torch.float32
    assert torch.allclose(means.double(), expected, atol=1e-5)
    if clusters > 2:
        assert bool((sizes == 0).any())


def test_one_large_cluster() -> None:
    """A cluster of several blocks of members, beside small ones and empty ones."""
    points = made(2, 200, 16)
    points[:, ::40] += 50.0
    centroids = made(2, 5, 16, seed=1) + torch.tensor([90.0, 0, 50, 95, 99], device=DEVICE)[:, None]
    means = kmeans_triton.means(points, centroids, cosine=False, scratch_bytes=AMPLE)
    few = points[:, ::40].mean(dim=1)
    many = points.view(2, 5, 40, 16)[:, :, 1:].reshape(2, -1, 16).mean(dim=1)
    assert torch.allclose(means[:, 2], few, atol=1e-5)
    assert torch.allclose(means[:, 1], many, atol=1e-5)
    assert torch.equal(means[:, [0, 3, 4]], centroids[:, [0, 3, 4]])


def test_any_strides() -> None:
    """Keys as caches hold them (heads inside of tokens), and parts of keys (no common stride)."""
    held = made(2, 40, 2, 32, dtype=torch.bfloat16)
    by_head = held[0].transpose(0, 1)
    parts = held.view(2, 40, 2, 2, 16).flatten(2, 3)[:, :, 1:3].transpose(1, 2)
    assert not by_head.is_contiguous()
    for points, bytes_ in (
        (by_head, 6000), (by_head, AMPLE), (parts, AMPLE), (parts[:, :, 5:], 6000),
        (by_head.flip(-1).transpose(1, 2), AMPLE),
    ):  # fmt: skip
        flat = points.reshape(-1, *points.shape[-2:]).contiguous()
        centroids = made(flat.shape[0], 5, flat.shape[2], seed=1)
        straight, wanted = (
            form(flat, centroids, cosine=False, scratch_bytes=AMPLE)
            for form in (kmeans_triton.nearest, kmeans_triton.means)
        )
        ids, means = (
            form(points, centroids, cosine=False, scratch_bytes=bytes_)
            for form in (kmeans_triton.nearest, kmeans_triton.means)
        )
        assert torch.equal(ids, straight)
        assert torch.allclose(means, wanted, atol=1e-5)


@pytest.mark.parametrize("cosine", [False, True])
def test_whole_algorithm_equals_the_twin(cosine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same start, same clusters of points that are apart, same centroids; and twice the same."""
    centres = 6.0 * torch.nn.functional.normalize(made(2, 1, 12, 32, seed=3), dim=-1)
    points = (centres + 0.1 * made(2, 10, 12, 32)).flatten(1, 2).unsqueeze(1)
    points[:, :, :7] *= 1.01  # no even sets

    def both(room: int) -> tuple[Tensor, Tensor]:
        means = kmeans(points, 12, iterations=2, cosine=cosine, seed=5, elements=room)
        return means, nearest(points, means, cosine=cosine, elements=room)

    monkeypatch.setattr(twin, "uses_triton", lambda tensor: False)
    plain, plain_ids = both(AMPLE)
    calls = []

    def yes(tensor: Tensor) -> bool:
        calls.append(tensor)
        return True

    monkeypatch.setattr(twin, "uses_triton", yes)
    means, ids = both(AMPLE)
    assert len(calls) == 3
    assert means.shape == (2, 1, 12, 32)
    assert ids.shape == (2, 1, 120)
    assert torch.equal(ids, plain_ids)
    assert torch.allclose(means, plain, atol=1e-4)
    assert torch.equal(both(AMPLE)[0], means)
    assert torch.allclose(both(3000)[0], means, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "dim", "takes"),
    [
        (torch.bfloat16, 256, True),
        (torch.bfloat16, 257, False),
        (torch.float32, 128, True),
        (torch.float32, 130, False),
        (torch.float64, 16, False),
    ],
)
def test_what_it_takes(
    dtype: torch.dtype, dim: int, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other points are for the twin, which never fails."""
    points = made(1, 10, dim, dtype=dtype)
    monkeypatch.setattr(twin, "uses_triton", lambda tensor: True)
    assert kmeans_triton.can_take(points) == takes
    means = kmeans(points, 2, iterations=1, cosine=False, seed=0, elements=AMPLE)
    assert_nearest(
        points, means, nearest(points, means, cosine=False, elements=AMPLE), cosine=False
    )


@pytest.mark.skipif(not HAS_CUDA, reason="needs CUDA")
@pytest.mark.parametrize("elements", [1 << 14, 1 << 19, 1 << 23])
def test_memory_and_waiting_on_cuda(elements: int) -> None:
    """Within what the ledger is told, and without a wait for the device, on another stream too."""
    sets, clusters, dim = 4, 500, 128
    points = made(sets, 8000, dim, dtype=torch.bfloat16)

    def once() -> tuple[Tensor, Tensor]:
        means = kmeans(points, clusters, iterations=3, cosine=False, seed=0, elements=elements)
        return means, nearest(points, means, cosine=False, elements=elements)

    expected = once()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            found = once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    taken = torch.cuda.max_memory_allocated() - base
    kept = sum(tensor.numel() * tensor.element_size() for tensor in found)
    assert taken <= kept + kmeans_bytes(sets, clusters, dim, elements) + (1 << 16)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
