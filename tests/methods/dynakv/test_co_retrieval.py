"""Co-retrieval of clusters: frequencies against a loop, and orders against all permutations."""

from itertools import permutations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.methods.dynakv import cluster_pools
from penstock.methods.dynakv.co_retrieval import (
    EMPTY,
    co_retrievals,
    pool_order,
    retrieved,
)


def some_counts(number: int, seed: int, high: int = 9) -> NDArray[np.int64]:
    half = np.triu(np.random.default_rng(seed).integers(0, high, (number, number)), 1)
    return half + half.T


def touching(order: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
    """Co-retrievals of clusters that touch across the border of two pools."""
    pairs = [order[i : i + 2] for i in range(1, len(order) - 1, 2)]
    return sum(int(counts[a, b]) for a, b in pairs if EMPTY not in (a, b))


def test_empty_is_what_the_pools_call_empty() -> None:
    assert EMPTY == cluster_pools.EMPTY


def test_clusters_are_taken_by_score_until_the_budget() -> None:
    queries = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    centroids = torch.tensor([[3.0, 0.0], [2.0, 1.0], [0.0, 4.0], [9.0, 9.0]])
    sizes = torch.tensor([5, 5, 5, 0])
    taken = retrieved(queries, centroids, sizes, 6, 1.0)
    assert taken.tolist() == [[True, True, False, False], [False, True, True, False]]
    assert retrieved(queries, centroids, sizes, 5, 1.0).sum(dim=1).tolist() == [1, 1]
    assert retrieved(queries, centroids, sizes, 0, 1.0).sum() == 0
    assert retrieved(queries, centroids, sizes, 99, 1.0).sum(dim=1).tolist() == [3, 3]


def test_heads_of_a_row_share_a_ranking() -> None:
    # One head is loud for cluster 0, two prefer cluster 1: the mean of their softmaxes decides.
    queries = torch.tensor([[[50.0, 0.0], [0.0, 2.0], [0.0, 2.0]]])
    centroids = torch.eye(2)
    taken = retrieved(queries, centroids, torch.tensor([4, 4]), 4, 1.0)
    assert taken.tolist() == [[False, True]]


def test_frequencies_are_those_of_a_loop() -> None:
    taken = torch.rand(40, 7, generator=torch.Generator().manual_seed(1)) < 0.4
    expected = np.zeros((7, 7), dtype=np.int64)
    for row in taken.tolist():
        for i in range(7):
            for j in range(7):
                expected[i, j] += i != j and row[i] and row[j]
    assert (co_retrievals(taken) == expected).all()


@given(st.integers(0, 12), st.integers(0, 1000), st.sampled_from([1, 2, 9]))
def test_an_order_has_every_cluster_once(number: int, seed: int, high: int) -> None:
    counts = some_counts(number, seed, high)
    order = pool_order(counts)
    assert sorted(order[order != EMPTY].tolist()) == list(range(number))
    assert EMPTY not in order[1:], "a place is free only at the beginning"
    assert len(order) % 2 == 1, "every cluster but the first has a neighbour that it touches"


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(0, 1000))
def test_a_greedy_order_is_half_as_good_as_the_best_at_least(number: int, seed: int) -> None:
    counts = some_counts(number, seed)
    every = [np.array(order) for order in permutations(range(number))]
    padded = [np.array([EMPTY, *order]) for order in every] if number % 2 == 0 else every
    best_touching = max(touching(order, counts) for order in padded)
    assert best_touching / 2 <= touching(pool_order(counts), counts) <= best_touching


def test_strong_pairs_touch_across_the_borders_of_pools() -> None:
    counts = some_counts(40, 3, high=4)
    for i in range(0, 40, 2):
        counts[i, i + 1] = counts[i + 1, i] = 20 + i
    order = pool_order(counts)
    assert touching(order, counts) == sum(20 + i for i in range(0, 40, 2))
    in_pools = sum(int(counts[order[i], order[i + 1]]) for i in range(2, 40, 2))
    assert in_pools > 2 * 19, "those of one pool are chosen too: 3 is the most, 1.5 the mean"


def test_clusters_without_a_match_do_not_come_between_a_pair() -> None:
    counts = np.zeros((4, 4), dtype=np.int64)
    counts[1, 2] = counts[2, 1] = 7
    assert touching(pool_order(counts), counts) == 7
