"""check_slots() and check_pools(): whether bookkeeping agrees with itself after a test's step."""

import numpy as np

from penstock.engine.tiers.slot_table import ABSENT, SlotTable
from penstock.methods.dynakv.cluster_pools import EMPTY, ClusterPools, Half


def check_slots(table: SlotTable) -> None:
    """Raise AssertionError unless both directions of a slot table agree."""
    rows, slots = np.nonzero(table.unit_in != ABSENT)
    points_back = table.slot_of[rows, table.unit_in[rows, slots]] == slots
    assert points_back.all(), "slot table: a slot's unit does not point back to it"
    assert (table.slot_of != ABSENT).sum() == len(rows), (
        "slot table: a unit points to a slot that holds another"
    )


def check_pools(pools: ClusterPools) -> None:
    """Raise AssertionError unless places are aligned, disjoint, and at their pools' ends."""
    spans = [(first, pool.sectors) for first, pool in pools._pools.items()]
    spans += pools._extents.runs
    spans.sort()
    ends = [0, *(first + sectors for first, sectors in spans)]
    fits = [first for first, _ in spans] == ends[:-1] and ends[-1] == pools._extents.end
    assert fits, "the cluster pools overlap or leave sectors to none"
    for first, pool in pools._pools.items():
        held = [c for c in pool.clusters if c >= 0]
        for cluster in held:
            side = pool.clusters.index(cluster)
            at = (first + side * pool.sectors) * pools.sector_bytes
            is_there = pools.half(cluster) == Half(first, side) and pools.base[cluster] == at
            assert is_there, f"cluster {cluster} is not at its pool's end"
        used = sum(pools.sectors(int(pools.count[c])) for c in held)
        assert used <= pool.sectors, f"the clusters {held} overlap in their pool"
        is_booked = (first in pools._half_free) == (pool.clusters.count(EMPTY) == 1)
        assert is_booked, f"the free half of pool {first} is not booked"
    placed = sorted(c for p in pools._pools.values() for c in p.clusters if c >= 0)
    assert placed == pools.clusters(), "a cluster has two places or none"
