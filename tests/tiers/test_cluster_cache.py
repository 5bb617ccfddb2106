"""ClusterCache never gives a place twice, keeps what it must, and lets the right clusters go."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core.errors import CacheStateError
from penstock.tiers.cluster_cache import ClusterCache

PLACES, ROWS = 40, 2


class Lives(RuleBasedStateMachine):
    """Random admissions, growth, splits and drops beside a plain model of who has what."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = ClusterCache(ROWS, PLACES)
        self.sizes: list[dict[int, int]] = [{} for _ in range(ROWS)]
        self.next = 0

    def forget(self, row: int, gone: list[int], kept: set[int]) -> None:
        assert not kept.intersection(gone)
        for cluster in gone:
            del self.sizes[row][cluster]

    @rule(row=st.integers(0, ROWS - 1), entries=st.integers(1, 12), keep=st.integers(0, 4))
    def admit(self, row: int, entries: int, keep: int) -> None:
        kept = set(sorted(self.sizes[row])[-keep:] if keep else [])
        if sum(self.sizes[row][c] for c in kept) + entries > PLACES:
            with pytest.raises(CacheStateError, match="do not fit"):
                self.cache.admit(row, self.next, entries, kept)
            # What could go is gone; nothing that had to stay.
            self.sizes[row] = {c: len(p) for c, p in self.cache.held(row).items()}
            assert kept <= set(self.sizes[row])
            return
        places, gone = self.cache.admit(row, self.next, entries, kept)
        self.forget(row, gone, kept)
        assert len(places) == entries
        self.sizes[row][self.next] = entries
        self.next += 1

    @rule(row=st.integers(0, ROWS - 1), which=st.integers(0, 99), entries=st.integers(1, 3))
    def grow(self, row: int, which: int, entries: int) -> None:
        if not self.sizes[row]:
            return
        cluster = sorted(self.sizes[row])[which % len(self.sizes[row])]
        before = self.cache.held(row)[cluster].copy()
        if len(before) + entries > PLACES:
            return
        _, gone = self.cache.grow(row, cluster, entries, ())
        self.forget(row, gone, {cluster})
        assert (self.cache.held(row)[cluster][: len(before)] == before).all()
        self.sizes[row][cluster] += entries

    @rule(row=st.integers(0, ROWS - 1), which=st.integers(0, 99), seed=st.integers(0, 9))
    def split(self, row: int, which: int, seed: int) -> None:
        if not self.sizes[row]:
            return
        cluster = sorted(self.sizes[row])[which % len(self.sizes[row])]
        stays = np.random.default_rng(seed).random(self.sizes[row][cluster]) < 0.5
        places = self.cache.held(row)[cluster].copy()
        self.cache.split(row, cluster, self.next, stays)
        assert (self.cache.held(row)[cluster] == places[stays]).all()
        self.sizes[row][cluster] = int(stays.sum())
        self.sizes[row][self.next] = int((~stays).sum())
        self.next += 1

    @rule(row=st.integers(0, ROWS - 1), which=st.integers(0, 99))
    def drop(self, row: int, which: int) -> None:
        if self.sizes[row]:
            cluster = sorted(self.sizes[row])[which % len(self.sizes[row])]
            self.cache.drop(row, cluster)
            del self.sizes[row][cluster]

    @rule(row=st.integers(0, ROWS - 1), which=st.lists(st.integers(0, 40), max_size=5))
    def want(self, row: int, which: list[int]) -> None:
        missing = self.cache.missing(row, dict.fromkeys(which))
        assert set(missing) == set(which) - set(self.sizes[row])

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.sizes = [{} for _ in range(ROWS)]

    @invariant()
    def places_are_given_once(self) -> None:
        for row in range(ROWS):
            held = self.cache.held(row)
            assert {cluster: len(places) for cluster, places in held.items()} == self.sizes[row]
            taken = [int(place) for places in held.values() for place in places]
            free = self.cache._free[row][: self.cache._num_free[row]].tolist()
            assert sorted(taken + free) == list(range(PLACES))


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_large_clusters_go_before_small_ones() -> None:
    cache = ClusterCache(1, 20, updated_share=0.0)
    for cluster, entries in enumerate([4, 9, 6]):
        cache.admit(0, cluster, entries, ())
    _, gone = cache.admit(0, 3, 5, ())
    assert gone == [1]
    plain = ClusterCache(1, 20, updated_share=0.0, prefers_small=False)
    for cluster, entries in enumerate([4, 9, 6]):
        plain.missing(0, ())
        plain.admit(0, cluster, entries, ())
    _, gone = plain.admit(0, 3, 5, ())
    assert gone == [0], "the one that was wanted longest ago frees just enough"


def test_updated_clusters_stay_while_their_share_lasts() -> None:
    cache = ClusterCache(1, 20, updated_share=0.5)
    for cluster, entries in enumerate([8, 6, 5]):
        cache.admit(0, cluster, entries, ())
    cache.note_update(0, 0)  # the largest, and within the ten reserved places
    _, gone = cache.admit(0, 3, 6, ())
    assert gone == [1]
    cache.note_update(0, 3)  # 6 and 8 are more than ten: the newer one is retained
    _, gone = cache.admit(0, 4, 7, ())
    assert gone == [0]


def test_nothing_that_must_stay_goes() -> None:
    cache = ClusterCache(1, 10, updated_share=0.0)
    cache.admit(0, 0, 6, ())
    cache.admit(0, 1, 3, ())
    with pytest.raises(CacheStateError, match="do not fit"):
        cache.admit(0, 2, 5, {0})
    assert set(cache.held(0)) == {0}
