"""Cluster-aligned replacement: who goes first, and who stays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tiers.replacement.cluster_aligned import ClusterAligned


def told(
    clusters: list[int], sizes: dict[int, int], updated: dict[int, int] | None = None,
    now: int = 100, **options: float,
) -> ClusterAligned:  # fmt: skip
    """One row whose slots hold tokens of these clusters."""
    held = np.array([clusters], dtype=np.int32)
    made = ClusterAligned(1, len(clusters), **options)  # type: ignore[arg-type]
    made.tell(
        held, np.array([[sizes.get(c, 0) for c in clusters]], dtype=np.int32),
        np.array([[(updated or {}).get(c, 0) for c in clusters]], dtype=np.int32), now,
    )  # fmt: skip
    return made


def taken(policy: ClusterAligned, pinned: list[int], count: int) -> list[int]:
    mask = np.zeros((1, policy._clusters.shape[1]), dtype=np.bool_)
    mask[0, pinned] = True
    victims: list[int] = policy.victims(mask, np.array([count])).tolist()
    return victims


def test_empty_slots_go_first_then_the_largest_cluster() -> None:
    policy = told([3, 3, 3, -1, 5, 5], {3: 3, 5: 2})
    assert taken(policy, [], 1) == [3]
    assert taken(told([3, 3, 3, -1, 5, 5], {3: 3, 5: 2}), [], 4) == [0, 1, 2, 3]
    assert taken(told([3, 3, 3, -1, 5, 5], {3: 3, 5: 2}), [0, 1, 2], 2) == [3, 4]


def test_among_equals_the_one_wanted_longest_ago_goes() -> None:
    policy = told([1, 1, 2, 2], {1: 2, 2: 2})
    assert taken(policy, [0, 1], 0) == []
    assert taken(policy, [], 2) == [2, 3]


def test_plain_lru_ignores_sizes() -> None:
    policy = told([1, 2, 2, 2], {1: 1, 2: 3}, prefers_small=False)
    taken(policy, [1, 2, 3], 0)
    assert taken(policy, [], 1) == [0]


def test_updated_clusters_stay_as_far_as_the_share_goes_newest_first() -> None:
    clusters, sizes = [1, 1, 1, 1, 2, 2, 3, 3], {1: 4, 2: 2, 3: 2}
    updated = {1: 90, 2: 95}
    assert taken(told(clusters, sizes, updated, updated_share=0.25), [], 4) == [0, 1, 2, 3]
    # Half of the slots: the largest cluster fits no more beside the newest one.
    assert taken(told(clusters, sizes, updated, updated_share=0.5), [], 4) == [0, 1, 2, 3]
    # Three quarters: both stay until the rest is gone.
    assert taken(told(clusters, sizes, updated, updated_share=0.75), [], 2) == [6, 7]
    assert taken(told(clusters, sizes, updated, updated_share=0.75), [], 4)[-2:] == [6, 7]


def test_an_old_update_is_none() -> None:
    policy = told([1, 1, 2], {1: 2, 2: 1}, {1: 100}, now=1000, updated_share=1.0)
    assert taken(policy, [], 2) == [0, 1]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_as_many_as_asked_and_nothing_pinned(data: st.DataObject) -> None:
    rows, slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 24))
    generator = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    policy = ClusterAligned(rows, slots, updated_share=data.draw(st.sampled_from([0, 0.25, 1.0])))
    for now in range(1, 6):
        clusters = generator.integers(-1, 6, (rows, slots)).astype(np.int32)
        by_cluster = generator.integers(1, 9, 7).astype(np.int32)
        updated = generator.integers(0, now + 1, 7).astype(np.int32)
        policy.tell(clusters, by_cluster[clusters], updated[clusters], now)
        pinned = generator.random((rows, slots)) < 0.4
        counts = generator.integers(0, (~pinned).sum(axis=1) + 1)
        victims = policy.victims(pinned, counts)
        assert len(victims) == counts.sum()
        for row, slots_taken in enumerate(np.split(victims, counts.cumsum())[:-1]):
            assert len(set(slots_taken.tolist())) == counts[row]
            assert not pinned[row, slots_taken].any()
            free = clusters[row] == -1
            if counts[row] >= (free & ~pinned[row]).sum():
                assert set((free & ~pinned[row]).nonzero()[0]) <= set(slots_taken.tolist())


def test_too_few_slots_is_an_error() -> None:
    with pytest.raises(AssertionError, match="fewer unpinned slots"):
        taken(told([1, 1, 2], {1: 2, 2: 1}), [0, 1], 2)


def test_rows_are_copied() -> None:
    policy = told([1, 1, 2], {1: 2, 2: 1})
    copy = policy.copy_rows(np.array([0, 0]))
    mask = np.zeros((2, 3), dtype=np.bool_)
    assert copy.victims(mask, np.array([2, 1])).tolist() == [0, 1, 0]
