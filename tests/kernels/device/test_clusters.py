"""k-means of keys in two launches an iteration: both forms against kmeans() and nearest()."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.device import clusters as public
from penstock.kernels.device.clusters import (
    MOST_CLUSTERS,
    cluster_bytes,
    cluster_keys,
    cluster_keys_twin,
)
from penstock.kernels.kmeans import kmeans, nearest
from penstock.testing.pairs import covering

pytestmark = pytest.mark.usefixtures("bounds_of_loops")
AMPLE = 1 << 20
SHAPES = [  # rows, blocks, points, clusters, dim
    (1, 1, 1, 1, 1),
    (2, 1, 9, 9, 4),
    (2, 3, 33, 7, 24),
    (1, 2, 130, 70, 64),
    (2, 1, 100, 31, 128),
]


@pytest.fixture
def fast(triton: None) -> Any:
    from penstock.kernels.device import clusters_triton

    return clusters_triton


def keys(
    *size: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator) + 0.5).to(device, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "cosine"),
    covering(SHAPES, [torch.float32, torch.bfloat16, torch.float16], [False, True]),
)
def test_centroids_are_the_means_of_their_points(
    fast: Any, device: torch.device, shape: tuple[int, int, int, int, int], dtype: torch.dtype,
    cosine: bool,
) -> None:  # fmt: skip
    """After one iteration centroids are means by the labels of none, and labels are nearest."""
    rows, blocks, count, clusters, dim = shape
    points = keys(rows, blocks, count, dim, device=device, dtype=dtype)
    given: dict[str, Any] = {"cosine": cosine, "seed": 3}
    start, labels = fast.cluster_keys(points, clusters, iterations=0, **given)
    first = kmeans(points, clusters, iterations=0, elements=AMPLE, **given)
    # The same points are drawn; float32 is made of three parts of 11 bits on a GPU.
    assert torch.allclose(start, first, atol=1e-6 if dtype == torch.float32 else 0.0, rtol=0.0)
    moved, after = fast.cluster_keys(points, clusters, iterations=1, **given)
    assert moved.dtype == torch.float32
    members = torch.nn.functional.one_hot(labels.long(), clusters).double()
    sizes = members.sum(dim=2).unsqueeze(-1)
    expected = members.transpose(2, 3) @ points.double() / sizes.clamp_min(1)
    expected = torch.where(sizes > 0, expected, start.double())
    assert torch.allclose(moved.double(), expected, atol=1e-5)
    wide, centroids = points.double(), moved.double()
    if cosine:
        centroids = torch.nn.functional.normalize(centroids, dim=-1)
    centroids = centroids.to(dtype).double()
    away = wide @ centroids.transpose(2, 3)
    if not cosine:
        away -= centroids.square().sum(-1).unsqueeze(2) / 2
    own = away.gather(3, after.long().unsqueeze(-1)).squeeze(-1)
    assert bool((away.amax(3) - own <= 1e-4 * (1 + away.abs().amax(3))).all())
    assert after.shape == (rows, blocks, count)


def test_an_empty_cluster_stays_where_it_was(fast: Any, device: torch.device) -> None:
    """Points that are alike all go to the first of the centroids that are drawn from them."""
    whole = keys(1, 1, 1, 16, device=device).mul(4).round()  # sums and means are exact
    points = whole.expand(1, 2, 40, 16).contiguous()
    means, labels = fast.cluster_keys(points, 5, iterations=3, cosine=False, seed=0)
    assert not labels.any()
    assert torch.equal(means, points[:, :, :5])


@pytest.mark.parametrize("cosine", [False, True])
def test_both_forms_agree(fast: Any, device: torch.device, cosine: bool) -> None:
    """Keys as caches hold them (heads inside of tokens), that lie apart; and twice the same."""
    centres = 6.0 * torch.nn.functional.normalize(keys(2, 1, 12, 32, device=device, seed=3), dim=-1)
    held = centres + 0.1 * keys(2, 20, 12, 32, device=device)
    points = held.view(2, 3, 80, 32)
    strided = points.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    assert not strided.is_contiguous()
    given: dict[str, Any] = {"iterations": 2, "cosine": cosine, "seed": 5}
    expected, ids = cluster_keys_twin(points, 12, elements=AMPLE, **given)
    for made in (points, strided):
        means, labels = fast.cluster_keys(made, 12, **given)
        assert torch.equal(labels, ids)
        assert torch.allclose(means, expected, atol=1e-4)
        assert torch.equal(fast.cluster_keys(made, 12, **given)[0], means)
    for block in range(3):
        alone = kmeans(points[:, block], 12, elements=AMPLE, **given)
        assert torch.allclose(expected[:, block], alone, atol=1e-6)
        near = nearest(points[:, block], alone, cosine=cosine, elements=AMPLE)
        assert torch.equal(ids[:, block].long(), near)


def test_what_the_fast_form_takes(
    fast: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few clusters of a dtype that kernels know; all else is for the plain form."""
    points = keys(1, 1, 40, 16, device=device)
    assert fast.can_take(points, 40)
    assert not fast.can_take(points, 41), "more clusters than points"
    assert not fast.can_take(points.double(), 4)
    assert not fast.can_take(points.expand(1, 1, -1, -1).repeat(1, 1, 40, 1), MOST_CLUSTERS + 1)
    asked: list[int] = []

    def form(points: Tensor, clusters: int, **given: Any) -> tuple[Tensor, Tensor]:
        asked.append(clusters)
        return points, points

    monkeypatch.setattr(public, "uses_triton", lambda tensor: True)
    monkeypatch.setattr(fast, "cluster_keys", form)
    given: dict[str, Any] = {"iterations": 1, "cosine": False, "seed": 0, "elements": AMPLE}
    cluster_keys(points, 4, **given)
    assert asked == [4]
    monkeypatch.setattr(public, "cluster_keys_twin", form)
    cluster_keys(points, 41, **given)
    assert asked == [4, 41]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("count", "clusters"), [(4096, 255), (20000, 1249)])
def test_memory_and_waiting_on_cuda(count: int, clusters: int) -> None:
    """Within what the ledger is told, and without a wait for the device, on another stream too."""
    rows, blocks, dim, elements = 4, 2, 128, 1 << 18
    points = keys(rows, blocks, count, dim, device=torch.device("cuda"), dtype=torch.bfloat16)

    def once() -> tuple[Tensor, Tensor]:
        return cluster_keys(
            points, clusters, iterations=3, cosine=False, seed=0, elements=elements
        )  # fmt: skip

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
    assert taken <= cluster_bytes(rows, blocks, count, clusters, dim, elements) + (1 << 16)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
