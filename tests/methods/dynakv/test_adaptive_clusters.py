"""AdaptiveClusters: the branches of Algorithm 1, the compared updates, crops, bytes."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import CacheStateError
from penstock.methods.dynakv.adaptive_clusters import AdaptiveClusters, UpdateRule

MAX_TOKENS = 80
ADAPTIVE: UpdateRule = "adaptive"


class Life:
    """A partition beside the keys that it was given."""

    def __init__(self, keys: Tensor, **options: object) -> None:
        rows, _, dim = keys.shape
        chosen: dict[str, object] = {
            "max_tokens": MAX_TOKENS, "max_clusters": 30, "tokens_per_cluster": 4, **options
        }  # fmt: skip
        self.clusters = AdaptiveClusters(rows=rows, dim=dim, **chosen)  # type: ignore[arg-type]
        self.clusters.fit(keys)
        self.keys = keys

    def append(self, keys: Tensor) -> NDArray[np.int64]:
        self.keys = torch.cat([self.keys[:, : self.clusters.length], keys], dim=1)
        return self.clusters.append(keys)

    def load(self, row: int, cluster: int) -> tuple[Tensor, NDArray[np.int64]]:
        members, waiting = self.clusters.members(row, cluster), self.clusters.buffered(row, cluster)
        positions = np.concatenate([waiting, members])
        return self.keys[row, positions], positions


# Algorithm 1's branches ---------------------------------------------------------------------------


def two_groups(**options: object) -> Life:
    """Clusters about (0, 0) and (10, 0), four entries and a variance of 1 each; tau is 1.5."""
    cross = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    keys = torch.cat([cross, cross + torch.tensor([10.0, 0.0])])[None]
    # Four points a cluster: k-means finds the groups from any start of one point in each.
    life = Life(keys, threshold_factor=1.5, **options)
    labels = life.clusters.entries.cluster_of[0, :8].tolist()
    assert labels in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)
    assert life.clusters.thresholds.tolist() == [1.5]
    return life


def one(*key: float) -> Tensor:
    return torch.tensor([[key]])


def masks(life: Life, *chosen: int) -> NDArray[np.bool_]:
    mask = np.zeros((1, life.clusters.num_clusters), dtype=np.bool_)
    mask[0, list(chosen)] = True
    return mask


def test_below_the_threshold_an_entry_is_appended() -> None:
    life = two_groups()
    left = int(life.clusters.entries.cluster_of[0, 0])
    assert life.append(one(0.5, 0.5)).tolist() == [[left]]
    assert life.clusters.members(0, left).tolist() == [0, 1, 2, 3, 8]
    np.testing.assert_allclose(life.clusters.statistics.centroids[0, left], [0.1, 0.1], atol=1e-6)
    # Sum of squares 4 + 0.5 * 4 / 5, over 5.
    assert life.clusters.statistics.variances()[0, left] == pytest.approx(0.88)
    done = life.clusters.adapt(masks(life, left), life.load)
    assert not done.splits
    assert not done.loaded


def test_above_it_a_cluster_in_memory_is_split_at_once() -> None:
    life = two_groups()
    left = int(life.clusters.entries.cluster_of[0, 0])
    assert life.append(one(0.0, 4.0)).tolist() == [[~left]]
    done = life.clusters.adapt(masks(life, left), life.load)
    assert done.loaded == []
    assert [(s.row, s.cluster, s.child) for s in done.splits] == [(0, left, 2)]
    # In the order of load(): the buffered entry first.
    assert done.splits[0].moves.tolist() == [True, False, False, False, False]
    assert life.clusters.members(0, left).tolist() == [0, 1, 2, 3]
    assert life.clusters.members(0, 2).tolist() == [8]
    assert life.clusters.entry_counts().tolist() == [[4, 4, 1]]
    assert life.clusters.representatives[0, 2].tolist() == [0.0, 4.0]
    assert life.clusters.num_splits == 1


def test_on_disk_it_is_buffered_and_split_when_retrieved() -> None:
    life = two_groups()
    clusters = life.clusters
    left = int(clusters.entries.cluster_of[0, 0])
    life.append(one(0.0, 4.0))
    before = clusters.statistics.centroids.copy()
    assert clusters.adapt(masks(life, 1 - left), life.load).splits == []
    # A flagged cluster buffers what the variance would allow, too.
    assert life.append(one(0.0, 0.0)).tolist() == [[~left]]
    assert clusters.adapt(masks(life), life.load).splits == []
    np.testing.assert_array_equal(clusters.statistics.centroids, before)
    assert clusters.buffered(0, left).tolist() == [8, 9]
    assert clusters.members(0, left).tolist() == [0, 1, 2, 3]
    assert clusters.entry_counts()[0, left] == 6
    chosen = clusters.entries.entries_of(masks(life, left))
    assert chosen.nonzero()[1].tolist() == [0, 1, 2, 3, 8, 9]
    done = clusters.adapt(masks(life, left), life.load)
    assert len(done.splits) == 1
    assert clusters.entries.num_buffered == 0
    assert sorted([*clusters.members(0, left), *clusters.members(0, 2)]) == [0, 1, 2, 3, 8, 9]


def test_full_buffers_load_the_fullest() -> None:
    life = two_groups(buffer_entries=3)
    clusters = life.clusters
    left = int(clusters.entries.cluster_of[0, 0])
    life.append(one(0.0, 4.0))
    life.append(one(10.0, 4.0))
    assert clusters.overfull() == []
    assert clusters.adapt(masks(life), life.load).loaded == []
    life.append(one(10.0, 4.5))
    assert clusters.overfull() == [(0, 1 - left)]
    done = clusters.adapt(masks(life), life.load)
    assert done.loaded == [(0, 1 - left)]
    assert [s.cluster for s in done.splits] == [1 - left]
    assert clusters.members(0, 2).tolist() == [9, 10]
    assert clusters.buffered(0, left).tolist() == [8]
    assert clusters.num_loaded == 1


def test_with_a_budget_of_one_nothing_waits() -> None:
    life = two_groups(buffer_entries=1)
    life.append(one(0.0, 4.0))
    assert len(life.clusters.adapt(masks(life), life.load).loaded) == 1
    assert life.clusters.entries.num_buffered == 0


def test_several_are_loaded_where_one_is_not_enough() -> None:
    keys = two_groups().keys.expand(3, -1, -1)
    life = Life(keys, threshold_factor=1.5, buffer_entries=2)
    life.append(torch.tensor([[[0.0, 4.0]]]).expand(3, -1, -1))
    done = life.clusters.adapt(np.zeros((3, 2), dtype=np.bool_), life.load)
    assert [row for row, _ in done.loaded] == [0, 1]
    assert life.clusters.entries.num_buffered == 1


def test_equal_keys_stay_together_and_are_asked_once() -> None:
    life = Life(torch.ones(1, 8, 3), max_clusters=9)
    clusters = life.clusters
    clusters.thresholds[:] = -1.0
    life.append(torch.ones(1, 1, 3))
    calls = []

    def load(row: int, cluster: int) -> tuple[Tensor, NDArray[np.int64]]:
        calls.append(cluster)
        return life.load(row, cluster)

    everything = np.ones((1, 9), dtype=np.bool_)
    done = clusters.adapt(everything, load)
    assert [s.child for s in done.splits] == [-1]
    assert clusters.unsplit == 1
    assert clusters.adapt(everything, load).splits == []
    assert calls == [0]
    assert clusters.members(0, 0).tolist() == list(range(9))


def test_a_row_without_numbers_appends_whatever_comes() -> None:
    life = two_groups(max_clusters=3)
    clusters = life.clusters
    life.append(one(0.0, 4.0))
    life.append(one(10.0, 4.0))
    everything = np.ones((1, 3), dtype=np.bool_)
    done = clusters.adapt(everything, life.load)
    assert [s.child for s in done.splits] == [2, -1]
    assert clusters.unsplit == 1
    assert clusters.statistics.variances()[0, done.splits[1].cluster] > 1.5
    assert life.append(one(10.0, -9.0))[0, 0] >= 0
    assert clusters.adapt(everything, life.load).splits == []
    assert life.append(one(-90.0, 0.0))[0, 0] >= 0


def test_what_is_loaded_must_be_the_cluster() -> None:
    life = two_groups()
    left = int(life.clusters.entries.cluster_of[0, 0])
    keys = torch.zeros(4, 2)
    for wrong in ([0, 1, 2, 4], [0, 1, 2, 2], [0, 1, 2, 8], [-1, 0, 1, 2]):
        with pytest.raises(CacheStateError, match="4 entries"):
            life.clusters.split(0, left, keys, np.array(wrong))
    with pytest.raises(CacheStateError, match="4 entries"):
        life.clusters.split(0, left, keys[:3], np.array([0, 1, 2]))


def test_a_key_that_is_not_finite_is_refused() -> None:
    life = two_groups()
    with pytest.raises(CacheStateError, match="finite"):
        life.clusters.append(one(float("nan"), 0.0))
    assert life.clusters.length == 8


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    life = two_groups()
    with pytest.raises(CacheStateError, match=f"room for {MAX_TOKENS} tokens, not 81"):
        life.clusters.append(torch.zeros(1, MAX_TOKENS - 7, 2))
    assert life.clusters.length == 8


# Comparisons, crops -------------------------------------------------------------------------------


def test_static_leaves_the_centroids_where_they_are() -> None:
    life = two_groups(update="static")
    left = int(life.clusters.entries.cluster_of[0, 0])
    assert life.append(one(0.0, 40.0)).tolist() == [[left]]
    assert life.clusters.representatives[0, left].tolist() == [0.0, 0.0]
    assert life.clusters.statistics.variances()[0, left] == pytest.approx((4 + 1600) / 5)
    assert life.clusters.due(masks(life, left)) == life.clusters.overfull() == []


def test_local_makes_clusters_of_new_entries() -> None:
    life = two_groups(update="local", recluster_tokens=8)
    clusters = life.clusters
    old = clusters.statistics.centroids.copy()
    new = life.keys + torch.tensor([0.0, 30.0])
    life.append(new[:, :7])
    assert clusters.entries.num_buffered == 7
    assert clusters.due(np.ones((1, 2), dtype=np.bool_)) == clusters.overfull() == []
    life.append(new[:, 7:])
    assert clusters.entries.num_buffered == 0
    assert clusters.entry_counts().tolist() == [[4, 4, 4, 4]]
    assert {*clusters.members(0, 2), *clusters.members(0, 3)} == set(range(8, 16))
    np.testing.assert_array_equal(clusters.statistics.centroids[:, :2], old[:, :2])
    np.testing.assert_allclose(clusters.statistics.centroids[0, 2:4, 1], 30.0)


def test_crop_without_keys_keeps_centroid_and_variance() -> None:
    life = two_groups()
    clusters = life.clusters
    left = int(clusters.entries.cluster_of[0, 0])
    life.append(one(0.5, 0.5))
    before = clusters.statistics.centroids[0, left].copy(), clusters.statistics.variances()[0, left]
    clusters.crop(8)
    assert clusters.entry_counts()[0, left] == 4
    np.testing.assert_array_equal(clusters.statistics.centroids[0, left], before[0])
    assert clusters.statistics.variances()[0, left] == pytest.approx(before[1])


def test_a_number_that_a_crop_frees_is_used_again() -> None:
    life = two_groups()
    life.clusters.crop(4)
    left = int(life.clusters.entries.cluster_of[0, 0])
    assert life.append(one(10.0, 0.0)).tolist() == [[~left]]
    done = life.clusters.adapt(np.ones((1, 2), dtype=np.bool_), life.load)
    assert done.splits[0].child == 1 - left
    assert life.append(one(10.0, 0.0)).tolist() == [[1 - left]]
    life.clusters.crop(0)
    assert life.clusters.num_clusters == life.clusters.length == 0


def test_local_without_numbers_leaves_entries_where_they_are() -> None:
    life = two_groups(update="local", recluster_tokens=8, max_clusters=3)
    life.append(life.keys + torch.tensor([0.0, 30.0]))
    assert life.clusters.entry_counts().tolist() == [[8, 8]]
    assert life.clusters.unsplit == 1
    # Variance about the old centroids: four entries at 1, four at 900 and 1 more.
    found = life.clusters.statistics.variances()[0, :2]
    np.testing.assert_allclose(found, [451.0, 451.0])


@pytest.mark.parametrize("update", ["adaptive", "static", "local"])
def test_the_ledgers_bytes_are_what_is_allocated(update: UpdateRule) -> None:
    sizes: dict[str, Any] = {"rows": 2, "dim": 70, "max_tokens": 500, "max_clusters": 40}
    clusters = AdaptiveClusters(**sizes, tokens_per_cluster=8, update=update, recluster_tokens=16)
    parts = (clusters, clusters.entries, clusters.statistics, clusters._scan)
    found = [x for part in parts for x in vars(part).values() if isinstance(x, np.ndarray)]
    arrays = {id(x): x for x in found if x.base is None and x.dtype != np.int64}
    held = sum(x.nbytes for x in arrays.values())
    said = AdaptiveClusters.num_bytes(**sizes, update=update, recluster_tokens=16)
    # Beside them a few numbers of each row.
    assert held <= said <= held + 40 * sizes["rows"]
