"""Dual-head pools: random lives against sets of sectors, and each branch on its own."""

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock.methods.dynakv.cluster_pools import EMPTY, ClusterPools, Half
from penstock.methods.dynakv.free_extents import FreeExtents
from penstock.testing.integrity import check_pools


def sectors_of(pools: ClusterPools, cluster: int) -> set[int]:
    """The sectors of a cluster, from its entries' bytes alone."""
    base, side = int(pools.base[cluster]), int(pools.side[cluster])
    num_bytes = int(pools.count[cluster]) * pools.entry_bytes
    first, end = (base - num_bytes, base) if side else (base, base + num_bytes)
    return set(range(first // pools.sector_bytes, -(-end // pools.sector_bytes)))


class PoolsMachine(RuleBasedStateMachine):
    """Places, growth, moves, splits and frees, as a file does them."""

    steps = 0

    @initialize(
        sizes=st.sampled_from([(512, 512), (512, 4096), (100, 512), (1000, 512), (512, 1536)])
    )
    def make(self, sizes: tuple[int, int]) -> None:
        self.pools = ClusterPools(*sizes)
        self.model: dict[int, int] = {}
        self.next = 0

    def new(self) -> int:
        self.next += 1
        return self.next - 1

    def pick(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from(sorted(self.model))) if self.model else None

    @rule(counts=st.lists(st.one_of(st.none(), st.integers(0, 30)), min_size=1, max_size=7))
    def lay_out(self, counts: list[int | None]) -> None:
        order = [EMPTY if count is None else self.new() for count in counts]
        sizes = {c: n for c, n in zip(order, counts, strict=True) if n is not None}
        self.pools.lay_out(order, sizes)
        self.model |= sizes
        for lower, upper in pairwise(range(len(order))):
            a, b = order[lower], order[upper]
            if lower % 2 == 0 or EMPTY in (a, b):
                continue
            assert self.pools.base[a] == self.pools.base[b], "neighbours touch"

    @rule(data=st.data(), more=st.integers(1, 20))
    def grow(self, data: st.DataObject, more: int) -> None:
        if (cluster := self.pick(data)) is None:
            return
        if self.pools.room(cluster) < more:
            mover = self.pools.crowded(cluster, more)
            assert mover in (cluster, self.pools.partner(cluster))
            extra = more if mover == cluster else 0
            half = self.pools.reserve_half(self.model[mover] + extra, near=mover)
            self.pools.put(mover, half, self.model[mover])
        assert self.pools.room(cluster) >= more, "one move makes room"
        self.model[cluster] += more
        self.pools.resize(cluster, self.model[cluster])

    @rule(data=st.data(), succeeds=st.booleans())
    def split(self, data: st.DataObject, succeeds: bool) -> None:
        cluster = self.pick(data)
        if cluster is None or self.model[cluster] < 2:
            return
        leaves = data.draw(st.integers(1, self.model[cluster] - 1))
        before = self.pools.pool_bytes
        half = self.pools.reserve_half(leaves, near=cluster)
        if not succeeds:
            self.pools.give_up(half)
            assert self.pools.pool_bytes == before, "what was reserved is given back"
            return
        child = self.new()
        self.pools.put(child, half, leaves)
        self.model[cluster] -= leaves
        self.model[child] = leaves
        self.pools.resize(cluster, self.model[cluster])

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if (cluster := self.pick(data)) is not None:
            self.pools.free(cluster)
            del self.model[cluster]
            assert cluster not in self.pools

    @invariant()
    def geometry(self) -> None:
        if not hasattr(self, "pools"):
            return
        type(self).steps += 1
        pools = self.pools
        check_pools(pools)
        assert pools.clusters() == sorted(self.model)
        taken: set[int] = set()
        for cluster, count in self.model.items():
            assert pools.count[cluster] == count
            assert pools.base[cluster] % pools.sector_bytes == 0, "begins at a sector"
            sectors = sectors_of(pools, cluster)
            assert len(sectors) == pools.sectors(count)
            assert not sectors & taken, "two clusters share a sector"
            taken |= sectors
            half = pools.half(cluster)
            assert pools.origin(half) == pools.base[cluster]
        assert not taken or max(taken) * pools.sector_bytes < pools.end_bytes
        assert self.model or pools.end_bytes == 0, "an empty file has no length"


def test_random_lives() -> None:
    PoolsMachine.steps = 0
    run_state_machine_as_test(
        PoolsMachine,
        settings=settings(max_examples=50, stateful_step_count=50, deadline=None),
    )
    assert PoolsMachine.steps >= 1_200


def pools_with(*sizes: int, sector_bytes: int = 512) -> ClusterPools:
    """Clusters 0, 1, ... of some sizes; an entry of 512 bytes."""
    pools = ClusterPools(512, sector_bytes)
    pools.lay_out(range(len(sizes)), dict(enumerate(sizes)))
    return pools


def test_a_pool_is_twice_the_largest_cluster_in_whole_sectors() -> None:
    pools = pools_with(3, 9, 5, sector_bytes=4096)
    assert pools.pool_bytes == pools.end_bytes == 2 * 2 * 2 * 4096, "9 entries are two sectors"
    assert pools.base.tolist()[:3] == [0, 4 * 4096, 4 * 4096]
    assert pools.side.tolist()[:3] == [0, 1, 0]
    assert pools.partner(0) == 1
    assert pools.partner(2) == EMPTY
    assert [pools.room(c) for c in range(3)] == [3 * 8 - 3 - 8, 3 * 8 - 9, 4 * 8 - 5]


def test_headroom_leaves_places_free_in_a_full_pool() -> None:
    pools = ClusterPools(512, 512, 1.25)
    pools.lay_out([0, 1], {0: 8, 1: 8})
    assert pools.pool_bytes == 2 * 10 * 512
    assert pools.room(0) == 4


def test_a_cluster_grows_past_the_middle_where_its_partner_is_small() -> None:
    pools = pools_with(8, 2)
    assert pools.room(0) == 16 - 2 - 8
    pools.resize(0, 14)
    assert pools.room(0) == pools.room(1) == 0
    check_pools(pools)


def test_the_smaller_one_makes_way_if_that_is_enough() -> None:
    pools = pools_with(8, 7)
    assert pools.crowded(0, 3) == 1
    assert pools.crowded(1, 3) == 1, "the larger partner stays"
    assert pools.crowded(0, 9) == 0, "16 entries do not hold 17"
    pools.free(1)
    assert pools.crowded(0, 9) == 0


def test_a_child_takes_the_free_half_that_is_nearest() -> None:
    pools = pools_with(4, 4, 4, 4, 4, 4, 4, 4)
    pools.free(1)
    pools.free(6)
    assert pools.reserve_half(3, near=4) == Half(3 * 8, 0), "one pool away, not two"
    assert pools.reserve_half(3, near=4) == Half(0, 1)
    assert pools.reserve_half(3, near=4) == Half(4 * 8, 0), "none is left: a new pool"
    assert pools.reserve_half(3, near=4) == Half(5 * 8, 0), "beside a reserved one is no place yet"


def test_a_child_stays_in_the_pool_of_its_parent() -> None:
    pools = pools_with(8)
    assert pools.reserve_half(3, near=0) == Half(0, 1)


def test_a_half_that_would_soon_be_full_is_not_taken() -> None:
    pools = pools_with(8, 8)
    pools.free(1)
    assert pools.reserve_half(8, near=0).pool == 16, "8 entries and a quarter are not 8"
    other = pools_with(8, 8)
    other.free(1)
    assert other.reserve_half(7, near=0) == Half(0, 1)


def test_a_new_pool_is_large_enough_for_what_outgrew_its_own() -> None:
    pools = pools_with(4, 4)
    half = pools.reserve_half(40, near=0)
    pools.put(0, half, 40)
    assert pools.half(0) == half
    assert pools.room(0) == 2 * 50 - 40
    assert pools.partner(1) == EMPTY
    check_pools(pools)


def test_the_space_of_empty_pools_is_used_again() -> None:
    pools = pools_with(4, 4, 4, 4, 4, 4)
    pools.free(2)
    pools.free(3)
    assert pools.end_bytes == 24 * 512
    pools.lay_out([7, 8], {7: 4, 8: 1})
    assert pools.half(7).pool == 8
    assert pools.end_bytes == 24 * 512
    for cluster in (4, 5):
        pools.free(cluster)
    assert pools.end_bytes == 16 * 512, "what is free at the end is given up"


def test_an_order_of_nothing_but_free_places_takes_no_space() -> None:
    pools = ClusterPools(512, 512)
    pools.lay_out([EMPTY, EMPTY, 3, EMPTY, EMPTY], {3: 5})
    check_pools(pools)
    assert pools.pool_bytes == 2 * 5 * 512


def test_no_growth_into_the_partner() -> None:
    pools = pools_with(2, 2)
    with pytest.raises(AssertionError, match="no room"):
        pools.resize(0, 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [("base", "end"), ("count", "overlap"), ("gone", "two places"), ("pool", "to none")],
)
def test_the_integrity_check_sees_damage(damage: str, message: str) -> None:
    pools = pools_with(2, 2)
    check_pools(pools)
    if damage == "base":
        pools.base[1] -= 512
    elif damage == "count":
        pools.count[1] = 3
    elif damage == "gone":
        pools._pool_of[5] = 0
    else:
        pools._extents.end += 1
    with pytest.raises(AssertionError, match=message):
        check_pools(pools)


def test_extents_take_the_smallest_run_and_merge() -> None:
    extents = FreeExtents()
    assert [extents.take(n) for n in (4, 2, 3, 2, 5)] == [0, 4, 6, 9, 11]
    extents.give(0, 4)
    extents.give(6, 3)
    assert extents.take(2) == 6, "3 is nearer to 2 than 4 is"
    assert extents.runs == [(0, 4), (8, 1)]
    extents.give(4, 2)
    assert extents.runs == [(0, 6), (8, 1)]
    extents.give(6, 2)
    assert extents.runs == [(0, 9)], "both neighbours"
    with pytest.raises(AssertionError, match="twice"):
        extents.give(3, 2)
    extents.give(11, 5)
    assert extents.end == 11
    extents.give(9, 2)
    assert (extents.end, extents.runs) == (0, [])
