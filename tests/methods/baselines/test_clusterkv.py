"""ClusterKV: whole clusters in order, the last one in part, and new clusters while decoding."""

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.policy import top_units
from penstock.methods.baselines.clusterkv import ClusterKV
from penstock.methods.baselines.token_clusters import TokenClustersIndex

SHAPE = KVShape(
    num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=2, dtype=torch.float32
)  # fmt: skip
EAST, NORTH, WEST, SOUTH = (1.0, 0.1), (0.1, 1.0), (-1.0, -0.1), (-0.1, -1.0)
FROM_START = np.zeros(1, dtype=np.int64)


def make_index(keys: Tensor, per_cluster: int, together: int, room: int = 0) -> TokenClustersIndex:
    index = TokenClustersIndex(
        SHAPE, batch=keys.shape[0], max_units=keys.shape[1] + room, group_tokens=1,
        tokens_per_cluster=per_cluster, recluster_tokens=together, device=keys.device,
    )  # fmt: skip
    index.fit(keys[:, :1], torch.arange(1))
    index.look(keys, 0)
    index.append(keys, 0)
    return index


def row_of(*keys: tuple[float, float]) -> Tensor:
    return torch.tensor(keys).view(1, len(keys), 1, 2)


def test_by_hand() -> None:
    """East and north in turn, of different lengths; four tokens a cluster, so two clusters."""
    keys = row_of(EAST, NORTH, EAST, NORTH, EAST, NORTH, EAST, NORTH)
    keys = keys * torch.tensor([1, 2, 3, 2, 1, 2, 3, 2]).view(1, 8, 1, 1)
    index = make_index(keys, 4, 0)
    centroids = sorted(index._centroids[0, :2].tolist(), reverse=True)
    # Means of the keys as they are: both have a mean length of 2.
    assert np.allclose(centroids, [[2.0, 0.2], [0.2, 2.0]])
    query = torch.tensor([[[1.0, 0.0], [1.0, 0.5]]])
    scores = index.score(query, 8)
    # East is first, in the order of position; half a rank is spread over 8 positions.
    ranks = [0, 1, 0, 1, 0, 1, 0, 1]
    assert scores.tolist() == [[-rank - i / 16 for i, rank in enumerate(ranks)]]
    assert top_units(scores, FROM_START, 6).unit_ids.tolist() == [[0, 1, 2, 3, 4, 6]]
    flipped = index.score(query.flip(2), 8)
    assert top_units(flipped, FROM_START, 5).unit_ids.tolist() == [[0, 1, 3, 5, 7]]


def test_new_tokens_wait_in_the_nearest_cluster_and_then_get_their_own() -> None:
    index = make_index(row_of(EAST, NORTH, EAST, NORTH), 2, 4, room=6)
    new = (WEST, (0.5, 0.2), WEST, SOUTH)
    for i, key in enumerate(new[:3]):
        index.append(row_of(key), 4 + i)
    assert index._used == 2
    assert index._cluster_of[0, 5] == index._cluster_of[0, 0], "(0.5, 0.2) is nearest to east"
    index.append(row_of(new[3]), 7)
    assert index._used == 4
    assert set(index._cluster_of[0, :4].tolist()) == {0, 1}
    assert set(index._cluster_of[0, 4:8].tolist()) == {2, 3}
    to_the_west = index.score(torch.tensor([[[-1.0, 0.0], [0.0, 0.0]]]), 8)
    assert {4, 6} <= set(top_units(to_the_west, FROM_START, 3).unit_ids[0].tolist())


def test_cropped_tokens_are_not_clustered() -> None:
    index = make_index(row_of(EAST, NORTH, EAST, NORTH), 2, 4, room=8)
    index.append(row_of(WEST, WEST, WEST), 4)
    index.append(row_of(SOUTH), 5)
    assert (index._first_new, index._num_new) == (4, 2)
    index.append(row_of(EAST), 2)
    index.append(row_of(NORTH, SOUTH), 3)
    assert (index._first_new, index._num_new) == (4, 1)
    assert index._used == 2


def test_an_answer_behind_a_cropped_one_has_clusters_of_its_own() -> None:
    """Three answers behind one prompt, with room for the clusters of one: the third is as if it
    were the first."""
    prompt = row_of(EAST, NORTH, EAST, NORTH)
    keys = torch.randn(3, 1, 8, 1, 2, generator=torch.Generator().manual_seed(1))
    index, fresh = (make_index(prompt, 2, 4, room=8) for _ in range(2))
    for number, answer in enumerate(keys):
        for one in (index, fresh) if number == 2 else (index,):
            for i in range(8):
                one.append(answer[:, i : i + 1], 4 + i)
    assert index._used == fresh._used == 6
    query = torch.randn(1, 2, 2, generator=torch.Generator().manual_seed(2))
    assert torch.equal(index.score(query, 12), fresh.score(query, 12))


def test_one_append_of_many_is_the_same_as_many_of_one() -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(2, 300, 1, 2), torch.randn(2, 2, 2)
    once, slowly = (make_index(keys[:, :100], 10, 40, room=200) for _ in range(2))
    once.append(keys[:, 100:], 100)
    for i in range(100, 300):
        slowly.append(keys[:, i : i + 1], i)
    assert once._used == slowly._used == 10 + 5 * 4
    assert torch.equal(once.score(query, 300), slowly.score(query, 300))


def test_a_new_sequence_gets_clusters_of_its_own() -> None:
    index = make_index(row_of(EAST, NORTH), 1, 0)
    index.append(row_of(WEST), 0)
    assert not index.ready


def test_what_was_looked_at_is_forgotten_with_the_fit() -> None:
    """As where reading the prompt's keys fails halfway: rows may change before the next attempt."""
    keys = row_of(EAST, NORTH, EAST, NORTH).repeat(2, 1, 1, 1)
    index, other = make_index(keys, 2, 4), make_index(keys, 2, 4)
    index.fit(keys[:, :1], torch.arange(1))
    index.look(keys[:, :2], 0)
    index.forget_fit()
    other.take_rows_from(index, torch.tensor([1, 0]))
    assert not other.ready


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="recluster_tokens=10"):
        ClusterKV(tokens_per_cluster=20, recluster_tokens=10)
    with pytest.raises(ConfigError, match="tokens_per_cluster=0"):
        ClusterKV(tokens_per_cluster=0)
