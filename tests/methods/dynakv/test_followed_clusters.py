"""What FollowedClusters selects: whole clusters by rank, and never what is not to be selected."""

import numpy as np
import pytest
import torch

from penstock.core.shape import KVShape
from penstock.kernels.unit_selection import unit_scores
from penstock.methods.dynakv.index import ClusterSizes, FollowedClusters

SHAPE = KVShape(num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)


def make(rows: int = 2, tokens: int = 96, base: int = 4, seed: int = 0) -> FollowedClusters:
    """Clustered: `tokens` tokens of a few topics, from position `base` on."""
    sizes = ClusterSizes(
        tokens_per_cluster=8, update="adaptive", buffer_entries=4, recluster_tokens=16,
        threshold_quantile=0.9, threshold_factor=1.0,
    )  # fmt: skip
    index = FollowedClusters(SHAPE, sizes, batch=rows, max_tokens=160, scaling=0.3)
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(10, 8, generator=generator)
    index.begin_fit(base, tokens)
    for row in range(rows):
        topics = torch.randint(0, 10, (tokens,), generator=generator)
        index.fit_row(row, centres[topics] + 0.2 * torch.randn(tokens, 8, generator=generator))
    index.end_fit()
    return index


def test_scores_are_those_of_the_units_kernel() -> None:
    index, query = make(), torch.randn(2, 2, 8)
    sizes = index.clusters.entry_counts().astype(np.int64)
    sizes[0, :3] = 0
    expected = unit_scores(query, index.clusters.representatives, torch.from_numpy(sizes), 0.3)
    torch.testing.assert_close(torch.from_numpy(index._scores(query, sizes)), expected)
    sizes[0] = 0
    assert (index._scores(query, sizes)[0] == -1).all()


@pytest.mark.parametrize("wanted", [1, 7, 20, 60])
def test_a_selection_is_exactly_as_large_as_wanted(wanted: int) -> None:
    index = make()
    first, end = np.array([4, 11]), 90
    chosen = index.retrieve(torch.randn(2, 2, 8), first, end, wanted)
    assert chosen.valid is None
    owners = index.owners()
    for row, ids in enumerate(chosen.unit_ids):
        assert len(np.unique(ids)) == wanted
        assert ids.min() >= first[row]
        assert ids.max() < end
        inside = np.arange(4, 100)
        may = (inside >= first[row]) & (inside < end)
        for cluster in index.whole[row].nonzero()[0]:
            assert set(inside[may & (owners[row] == cluster)]) <= set(ids.tolist())
        partly = set(owners[row, ids - 4].tolist()) - set(index.whole[row].nonzero()[0].tolist())
        assert len(partly) <= 1


def test_all_are_selected_where_they_fit() -> None:
    index = make()
    chosen = index.retrieve(torch.randn(2, 2, 8), np.array([4, 11]), 20, 16)
    assert chosen.valid is not None
    assert [set(ids[v]) for ids, v in zip(chosen.unit_ids, chosen.valid, strict=True)] == [
        set(range(4, 20)), set(range(11, 20))
    ]  # fmt: skip


def test_the_best_cluster_comes_first() -> None:
    index = make(rows=1)
    query = 5 * index.clusters.representatives[:, 3:4].expand(1, 2, 8)
    best = int((index.clusters.representatives[0] @ query[0, 0]).argmax())
    count = int(index.clusters.entry_counts()[0, best])
    chosen = index.retrieve(query, np.array([4]), 100, count)
    assert (index.owners()[0, chosen.unit_ids[0] - 4] == best).all()
    token_scores = index.score(query, 100)
    assert token_scores.shape == (1, 100)
    assert (token_scores[0, :4] == -1).all()
