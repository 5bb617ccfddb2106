"""ClusterStep: the compiled kernel and its twin give the same partition, bit for bit."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import CacheStateError
from penstock.kernels.native import compiled
from penstock.methods.dynakv import centroid_scan
from penstock.methods.dynakv.adaptive_clusters import AdaptiveClusters
from penstock.methods.dynakv.cluster_step import UpdateRule

needs = pytest.mark.skipif(compiled.kernel("cluster_step") is None, reason="no VNNI here")
RULES: list[UpdateRule] = ["adaptive", "static", "local"]


def both_forms(make: Callable[[], AdaptiveClusters]) -> tuple[AdaptiveClusters, AdaptiveClusters]:
    """The same object with the compiled kernel, and without."""
    fast = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(centroid_scan, "kernel", lambda name: None)
        slow = make()
    assert fast._scan.is_compiled
    assert not slow._scan.is_compiled
    return fast, slow


def assert_same(fast: AdaptiveClusters, slow: AdaptiveClusters) -> None:
    for name in ("sizes", "counts", "free"):
        a, b = getattr(fast.statistics, name), getattr(slow.statistics, name)
        np.testing.assert_array_equal(a, b, err_msg=name)
    live = slow.statistics.sizes > 0
    for name in ("centroids", "deviations"):
        a, b = getattr(fast.statistics, name), getattr(slow.statistics, name)
        np.testing.assert_array_equal(a[live], b[live], err_msg=name)
    mine, theirs = fast.entries, slow.entries
    assert mine.length == theirs.length
    used = slice(mine.length)
    np.testing.assert_array_equal(mine.cluster_of[:, used], theirs.cluster_of[:, used])
    np.testing.assert_array_equal(mine.buffer_counts, theirs.buffer_counts)
    assert mine.num_buffered == theirs.num_buffered == mine.buffer_counts.sum()
    assert mine.flagged() == theirs.flagged()
    assert (fast.num_splits, fast.unsplit) == (slow.num_splits, slow.unsplit)
    np.testing.assert_array_equal(fast.thresholds, slow.thresholds)


def some_keys(seed: int, tokens: int, dim: int, scale: float, shift: float, grid: bool) -> Tensor:
    """Two rows; on a grid many distances are equal, and many keys."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(3).normal(size=(2, 6, dim)) * 3
    which = rng.integers(0, 6, size=(2, tokens, 1))
    keys = np.take_along_axis(centres, which, axis=1) + rng.normal(size=(2, tokens, dim))
    keys = np.rint(keys) if grid else keys * np.linspace(0.05, 3.0, dim)
    return torch.from_numpy(scale * keys + shift).float()


def chosen_clusters(seed: int, clusters: AdaptiveClusters, share: float) -> NDArray[np.bool_]:
    return np.random.default_rng(seed).random(clusters.entries.buffer_counts.shape) < share


@needs
@settings(max_examples=25, deadline=None)
@given(data=st.data(), update=st.sampled_from(RULES))
def test_the_kernel_is_its_twin(data: st.DataObject, update: UpdateRule) -> None:
    dim, grid = data.draw(st.integers(1, 40)), data.draw(st.booleans())
    scale, shift = data.draw(st.sampled_from([1e-3, 1.0, 1e3])), data.draw(st.floats(-50, 50))
    first, total = data.draw(st.integers(1, 60)), 100
    keys = some_keys(data.draw(st.integers(0, 999)), total, dim, scale, shift, grid)
    capacity = data.draw(st.sampled_from([2, 9, 40, 33_000]))
    buffer_entries = data.draw(st.integers(1, 9))
    quantile = data.draw(st.sampled_from([0.2, 0.9]))

    def make() -> AdaptiveClusters:
        return AdaptiveClusters(
            rows=2, dim=dim, max_tokens=total, max_clusters=capacity, tokens_per_cluster=4,
            buffer_entries=buffer_entries, update=update, recluster_tokens=7,
            threshold_quantile=quantile,
        )  # fmt: skip

    pair = both_forms(make)
    for clusters in pair:
        clusters.fit(keys[:, :first])
    assert_same(*pair)
    at = first
    for seed in range(data.draw(st.integers(1, 25))):
        count = data.draw(st.integers(1, 4))
        if at + count > total:
            break
        # Rows of a larger tensor, and a dimension that is not the innermost.
        part = keys[:, at : at + count]
        part = part if seed % 2 else part.transpose(1, 2).contiguous().transpose(1, 2)
        found = [clusters.append(part) for clusters in pair]
        np.testing.assert_array_equal(found[0], found[1])
        at += count
        assert_same(*pair)
        if update == "adaptive":
            mask = chosen_clusters(seed, pair[0], data.draw(st.sampled_from([0.0, 0.3])))
            done = [clusters.adapt(mask, Load(clusters, keys)) for clusters in pair]
            assert done[0].loaded == done[1].loaded
            assert [s[:3] for s in done[0].splits] == [s[:3] for s in done[1].splits]
        if data.draw(st.integers(0, 5)) == 0:
            # Clusters become empty, and their numbers free.
            at = data.draw(st.integers(max(1, at // 2), at))
            for clusters in pair:
                clusters.crop(at, Load(clusters, keys))
        if data.draw(st.integers(0, 5)) == 0:
            rows = torch.tensor(data.draw(st.sampled_from([[1, 0], [0, 0]])))
            keys = keys[rows]
            for clusters in pair:
                clusters.take_rows_from(clusters, rows)
        assert_same(*pair)


class Load:
    """Gives a cluster's entries from all keys."""

    def __init__(self, clusters: AdaptiveClusters, keys: Tensor) -> None:
        self._clusters, self._keys = clusters, keys

    def __call__(self, row: int, cluster: int) -> tuple[Tensor, NDArray[np.int64]]:
        parts = self._clusters.members(row, cluster), self._clusters.buffered(row, cluster)
        positions = np.concatenate(parts)
        return self._keys[row, positions], positions


@needs
@pytest.mark.parametrize("update", RULES)
def test_a_key_that_is_not_finite_changes_nothing(update: UpdateRule) -> None:
    keys = some_keys(0, 40, 5, 1.0, 0.0, grid=False)

    def make() -> AdaptiveClusters:
        return AdaptiveClusters(
            rows=2, dim=5, max_tokens=60, max_clusters=20, tokens_per_cluster=4, update=update
        )

    pair = both_forms(make)
    for clusters in pair:
        clusters.fit(keys)
    for wrong in (float("nan"), float("inf"), -float("inf")):
        key = keys[:, :1].clone()
        key[1, 0, 4] = wrong
        for clusters in pair:
            with pytest.raises(CacheStateError, match="finite"):
                clusters.append(key)
    assert_same(*pair)
    assert pair[0].length == 40


@needs
def test_equal_distances_go_to_the_lowest_number_and_large_keys_to_the_nearest() -> None:
    # Four clusters of two equal keys, at +-1 of either axis; the key is in their midst.
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).repeat(2, 1)[None]

    def make() -> AdaptiveClusters:
        return AdaptiveClusters(rows=1, dim=2, max_tokens=20, max_clusters=9, tokens_per_cluster=2)

    for clusters in both_forms(make):
        clusters.fit(keys)
        live = clusters.statistics.num_clusters
        assert live > 1
        found, squares = clusters._scan.nearest(np.zeros((1, 2), dtype=np.float32), live)
        own = np.square(clusters.statistics.centroids[0, :live]).sum(axis=1)
        assert found[0] == own.argmin()
        assert squares[0] == own.min()
        far = np.array([[3e8, 1.0]], dtype=np.float32)
        gaps = clusters.statistics.centroids[0, :live].astype(np.float64) - far
        assert clusters._scan.nearest(far, live)[0][0] == np.square(gaps).sum(axis=1).argmin()


@needs
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999), count=st.integers(1, 300), dim=st.integers(1, 40),
    scale=st.sampled_from([1e-9, 1.0, 1e6]), kind=st.sampled_from(["any", "grid", "equal", "near"]),
)  # fmt: skip
def test_a_split_is_its_twins(seed: int, count: int, dim: int, scale: float, kind: str) -> None:
    keys = some_keys(seed, count, dim, scale, 0.0, grid=kind == "grid")[:1]
    if kind in ("equal", "near"):
        keys[:] = keys[:, :1].clone()
    if kind == "near":  # two values, one float32 apart
        keys[0, count // 2, dim // 2] = torch.nextafter(keys[0, 0, dim // 2], torch.tensor(9e9))

    def make() -> AdaptiveClusters:
        return AdaptiveClusters(
            rows=1, dim=dim, max_tokens=count + 1, max_clusters=4, tokens_per_cluster=count
        )

    pair = both_forms(make)
    for clusters in pair:
        clusters.fit(keys)
    order = np.random.default_rng(seed).permutation(count)
    done = [clusters.split(0, 0, keys[0, order], order) for clusters in pair]
    assert done[0][:3] == done[1][:3]
    np.testing.assert_array_equal(done[0].moves, done[1].moves)
    assert_same(*pair)
    different = len(np.unique(keys[0].numpy(), axis=0))
    assert (done[0].child == 1) == (different > 1)
    if different > 1:
        assert 0 < done[0].moves.sum() <= count / 2
        assert done[0].moves.sum() < count / 2 or pair[0].entries.cluster_of[0, 0] == 0
    # The copy in the scan is that of the new centroids.
    live = pair[0].statistics.num_clusters
    for point in keys[0, :3].numpy():
        found = [clusters._scan.nearest(point[None], live) for clusters in pair]
        # Centroids one float32 apart are as near as each other, as far as rounding tells.
        assert found[0][0] == found[1][0] or kind == "near"
        assert found[0][1] == found[1][1]
