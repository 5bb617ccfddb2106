"""Cluster-aligned replacement: who goes first, and who stays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.selection import Selection
from penstock.engine.fetch_plan import plan_fetch, plan_fetch_twin
from penstock.engine.tiers.slot_table import SlotTable
from penstock.methods.dynakv.replacement import ClusterAligned, SlotContents
from penstock.testing.integrity import check_slots


def told(
    clusters: list[int], sizes: dict[int, int], updated: dict[int, int] | None = None,
    now: int = 100, **options: float,
) -> ClusterAligned:  # fmt: skip
    """One row whose slots hold tokens of these clusters; slot i holds token i."""
    made = ClusterAligned(1, len(clusters), **options)  # type: ignore[arg-type]
    held = np.array([[i if c >= 0 else -1 for i, c in enumerate(clusters)]], dtype=np.int32)
    most = max(clusters) + 1
    made.observe(
        SlotContents(
            held, np.array([[max(c, 0) for c in clusters]], dtype=np.int16), 0,
            np.array([[sizes.get(c, 0) for c in range(most)]], dtype=np.int32),
            np.array([[(updated or {}).get(c, 0) for c in range(most)]], dtype=np.int32), now,
        )
    )  # fmt: skip
    return made


def taken(policy: ClusterAligned, pinned: list[int], count: int) -> list[int]:
    mask = np.zeros((1, policy.wanted_at.shape[1]), dtype=np.bool_)
    mask[0, pinned] = True
    policy.note_wanted(mask)
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


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_compiled_plans_are_the_twins(data: st.DataObject) -> None:
    """The same slots, tables and victims over several steps; nothing pinned is taken."""
    rows, slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 24))
    tokens, number = data.draw(st.integers(slots, 60)), data.draw(st.integers(1, 9))
    options: dict[str, Any] = {
        "updated_share": data.draw(st.sampled_from([0.0, 0.25, 1.0])),
        "prefers_small": data.draw(st.booleans()),
    }
    generator = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    dtype, base = data.draw(st.sampled_from([np.int16, np.int32])), data.draw(st.integers(0, 5))
    pairs = [
        (SlotTable(rows, slots, tokens + base), ClusterAligned(rows, slots, **options))
        for _ in range(2)
    ]
    for now in range(1, 8):
        owners = generator.integers(-number, number, (rows, tokens)).astype(dtype)
        sizes = generator.integers(1, 9, (rows, number)).astype(np.int32)
        updated = generator.integers(0, now + 1, (rows, number + 2)).astype(np.int32)
        count = int(generator.integers(1, slots + 1))
        wanted = np.stack([generator.permutation(tokens)[:count] for _ in range(rows)]) + base
        wanted.sort(axis=1)
        valid = generator.random(wanted.shape) < 0.8 if generator.random() < 0.5 else None
        plans = []
        for (table, policy), compiled in zip(pairs, (True, False), strict=True):
            policy.observe(SlotContents(table.unit_in, owners, base, sizes, updated, now))
            selection = Selection(wanted, valid)
            if compiled:
                plans.append(plan_fetch(selection, table, policy))
            else:
                plans.append(plan_fetch_twin(selection, table, policy))
            check_slots(table)
        for name in ("rows", "units", "slots"):
            np.testing.assert_array_equal(getattr(plans[0], name), getattr(plans[1], name))
        shown = np.ones(wanted.shape, dtype=np.bool_) if valid is None else valid
        found = [plan.selected_slots[shown] for plan in plans]
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_array_equal(pairs[0][0].unit_in, pairs[1][0].unit_in)
        np.testing.assert_array_equal(pairs[0][1].wanted_at, pairs[1][1].wanted_at)
        assert plans[0].num_wanted == plans[1].num_wanted
        assert plans[0].num_hit == plans[1].num_hit
        for row in range(rows):
            held = pairs[0][0].unit_in[row]
            assert set(wanted[row][shown[row]]) <= set(held.tolist())


def test_too_few_slots_is_an_error() -> None:
    with pytest.raises(AssertionError, match="fewer unpinned slots"):
        taken(told([1, 1, 2], {1: 2, 2: 1}), [0, 1], 2)


def test_rows_are_copied() -> None:
    policy = told([1, 1, 2, 2], {1: 2, 2: 2})
    taken(policy, [0, 1], 0)
    copy, known = policy.copy_rows(np.array([0, 0])), policy.contents
    assert known is not None
    twice = [np.repeat(a, 2, axis=0) for a in (known.unit_in, known.sizes, known.updated)]
    copy.observe(
        SlotContents(
            twice[0], np.array([[1, 1, 2, 2]] * 2, dtype=np.int16), 0, twice[1], twice[2], known.now
        )
    )
    mask = np.zeros((2, 4), dtype=np.bool_)
    assert copy.victims(mask, np.array([2, 1])).tolist() == [2, 3, 2]
