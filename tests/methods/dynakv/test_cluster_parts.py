"""What AdaptiveClusters is made of: the scan, the split in two, statistics of groups."""

import numpy as np
import pytest
import torch

from penstock.kernels.native.compiled import kernel
from penstock.methods.dynakv import centroid_scan
from penstock.methods.dynakv.centroid_scan import CentroidScan
from penstock.methods.dynakv.cluster_split import two_means
from penstock.methods.dynakv.cluster_statistics import grouped_statistics
from penstock.methods.dynakv.clustered_labels import weighted_quantile


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dim", [3, 64, 100])
def test_the_scan_finds_the_nearest(
    dim: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(centroid_scan, "kernel", lambda name: None)
    elif kernel("nearest_centroids") is None:
        pytest.skip("no compiled kernels here")
    rng = np.random.default_rng(dim)
    wide = np.where(np.arange(dim) == 1, 40.0, 1.0)
    centroids = (rng.normal(size=(3, 300, dim)) * wide + 20).astype(np.float32)
    scan = CentroidScan(centroids)
    scan.begin(np.array([300, 250, 200]))
    centroids[0, 5] += 30 * wide
    centroids[1, 249] = centroids[1, 3]
    scan.update(np.array([5, 300 + 249]))
    scan.remove(0, 7)
    left = np.arange(300) < np.array([300, 250, 200])[:, None]
    left[0, 7] = False
    for shift in (0.0, 0.001, 30.0):
        for target in (5, 3, 7, 150):
            keys = (centroids[:, target] + shift * rng.normal(size=(3, dim))).astype(np.float32)
            gaps = np.square(centroids.astype(np.float64) - keys[:, None]).sum(axis=2)
            expected = np.where(left, gaps, np.inf).argmin(axis=1)
            found, squares = scan.nearest(keys, 300)
            assert found.tolist() == expected.tolist()
            nearest = gaps[np.arange(3), expected]
            np.testing.assert_allclose(squares, nearest, rtol=1e-12)


def test_two_means_finds_groups_of_any_size_and_scale() -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-6, 1.0, 1e6):
        for small in (1, 3, 10):
            truth = np.arange(20) < small
            points = scale * (rng.normal(size=(20, 8)) + 30.0 * truth[:, None])
            found = two_means(points)
            assert found is not None
            assert (found == truth).all() or (found == ~truth).all()


def test_two_means_of_points_that_hardly_differ() -> None:
    assert two_means(np.full((5, 3), 0.1)) is None
    assert two_means(np.zeros((1, 3))) is None
    almost = np.ones((4, 2))
    almost[2, 1] = np.nextafter(1.0, 2.0)
    found = two_means(almost)
    assert found is not None
    assert 0 < found.sum() < 4


def test_variance_over_groups() -> None:
    keys = torch.tensor([[0.0], [2.0], [7.0]])
    sizes, means, deviations = grouped_statistics(keys, np.array([2, 2, 0]), 3)
    assert sizes.tolist() == [1, 0, 2]
    assert means.tolist() == [[7.0], [0.0], [1.0]]
    assert deviations.tolist() == [0.0, 0.0, 2.0]


def test_the_quantile_is_weighted_by_size() -> None:
    values, sizes = np.array([3.0, 1.0, 2.0], dtype=np.float32), np.array([1, 8, 1], dtype=np.int32)
    assert [weighted_quantile(values, sizes, q) for q in (0.0, 0.8, 0.85, 0.95, 1.0)] == [
        1.0, 1.0, 2.0, 3.0, 3.0
    ]  # fmt: skip
