"""ClusterPools: where clusters lie on flash: two to a pool, growing from its ends (DynaKV)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.methods.dynakv.free_extents import FreeExtents
from penstock.storage.file import Int64Array

EMPTY = -1
"""In an order of clusters: this place stays free."""
_RESERVED = -2
_NOWHERE = -1


class Half(NamedTuple):
    """One of the two places of a pool."""

    pool: int
    """First sector of the pool."""
    side: int
    """0: grows up from the pool's first byte; 1: down from its last."""


@dataclass(slots=True)
class _Pool:
    sectors: int
    clusters: list[int] = field(default_factory=lambda: [EMPTY, EMPTY])


class ClusterPools:
    """The geometry alone: no byte is moved here. Clusters have small numbers of the caller's.

    Source: DynaKV, section 5.2 (dual-head cluster layout). A pool has room for twice the largest
    cluster, rounded up to sectors; its two clusters grow towards each other. When one is split, one
    child keeps the place and the other takes a free half of a pool, or a new pool.

    Differences: two clusters never share a sector, so that neither is rewritten for the other. A
    new child looks for a place that can take a quarter more than it has: the half free pool that
    is nearest to its parent, else a new pool of its parent's size or of twice its own need. The
    paper does not say what happens when the two meet: `room` tells, and `crowded` names the one
    that costs less to move. An empty pool is given back, and runs of free sectors are merged.

    Entry i of a cluster lies at `base + i * entry_bytes` in the lower half, and at
    `base - (i + 1) * entry_bytes` in the upper.

    Attributes:
        base: byte that a cluster grows from. int64 [clusters]
        side: 0 up, 1 down, -1 no such cluster. int64 [clusters]
        count: entries. int64 [clusters]
    """

    def __init__(self, entry_bytes: int, sector_bytes: int, headroom: float = 1.0) -> None:
        """No cluster has a place yet.

        Args:
            headroom: a half of a pool made by `lay_out` is so many times the largest cluster; 1 as
                in the paper, where two clusters of that size fill their pool from the first.
        """
        assert entry_bytes > 0, entry_bytes
        assert sector_bytes > 0, sector_bytes
        assert headroom >= 1, headroom
        self.entry_bytes = entry_bytes
        self.sector_bytes = sector_bytes
        self._headroom = headroom
        self.base = np.zeros(0, dtype=np.int64)
        self.side = np.zeros(0, dtype=np.int64)
        self.count = np.zeros(0, dtype=np.int64)
        self._pools: dict[int, _Pool] = {}  # by first sector
        self._pool_of: dict[int, int] = {}
        self._half_free: set[int] = set()
        self._extents = FreeExtents()

    # Questions --------------------------------------------------------------------------------

    @property
    def end_bytes(self) -> int:
        """Length that the file needs."""
        return self._extents.end * self.sector_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools, free places in them included."""
        return sum(pool.sectors for pool in self._pools.values()) * self.sector_bytes

    def __contains__(self, cluster: object) -> bool:
        return cluster in self._pool_of

    def __len__(self) -> int:
        return len(self._pool_of)

    def clusters(self) -> list[int]:
        """All clusters that have a place."""
        return sorted(self._pool_of)

    def half(self, cluster: int) -> Half:
        """The place of a cluster."""
        return Half(self._pool_of[cluster], int(self.side[cluster]))

    def sectors(self, num_entries: int) -> int:
        """Sectors that so many entries take."""
        return -(-num_entries * self.entry_bytes // self.sector_bytes)

    def origin(self, half: Half) -> int:
        """Byte that a cluster in this place grows from."""
        sectors = self._pools[half.pool].sectors if half.side else 0
        return (half.pool + sectors) * self.sector_bytes

    def partner(self, cluster: int) -> int:
        """The other cluster of the pool, or EMPTY."""
        return self._pools[self._pool_of[cluster]].clusters[1 - int(self.side[cluster])]

    def room(self, cluster: int, *, alone: bool = False) -> int:
        """Entries that can be appended in place.

        Args:
            alone: as if the partner were gone.
        """
        sectors = self._pools[self._pool_of[cluster]].sectors
        partner = EMPTY if alone else self.partner(cluster)
        if partner != EMPTY:
            sectors -= self.sectors(int(self.count[partner]))
        return sectors * self.sector_bytes // self.entry_bytes - int(self.count[cluster])

    def crowded(self, cluster: int, num_entries: int) -> int:
        """Which of the two to move when `cluster` lacks room for `num_entries` more.

        The partner where that is enough and it is the smaller one, else the cluster itself.
        """
        partner = self.partner(cluster)
        smaller = partner != EMPTY and self.count[partner] < self.count[cluster]
        return partner if smaller and self.room(cluster, alone=True) >= num_entries else cluster

    # Changes ----------------------------------------------------------------------------------

    def lay_out(self, order: Sequence[int], sizes: Mapping[int, int]) -> None:
        """Give clusters consecutive new pools: order[0] and order[1] share one, and so on.

        order[2i + 1] and order[2i + 2] touch, where the lower pool ends and the upper begins.

        Args:
            order: numbers of clusters that have no place yet, each once, or EMPTY.
            sizes: entries of each. The largest makes the pools' size.
        """
        largest = max((sizes[c] for c in order if c != EMPTY), default=0)
        half = max(1, self.sectors(math.ceil(largest * self._headroom)))
        num_pools = -(-len(order) // 2)
        first = self._extents.take(num_pools * 2 * half)
        for number in range(num_pools):
            at = first + number * 2 * half
            self._pools[at] = pool = _Pool(2 * half)
            for side, cluster in enumerate(order[2 * number : 2 * number + 2]):
                if cluster != EMPTY:
                    pool.clusters[side] = _RESERVED
                    self.put(cluster, Half(at, side), sizes[cluster])
            self._note(at)
            if pool.clusters == [EMPTY, EMPTY]:
                self._drop(at)

    def reserve_half(self, num_entries: int, near: int) -> Half:
        """Hold a place for so many entries and a quarter more; `put` or `give_up` must follow.

        Args:
            near: the cluster that they came from.
        """
        need = max(1, self.sectors(num_entries + num_entries // 4))
        home = self._pool_of[near]
        fitting = [first for first in self._half_free if self._free_sectors(first) >= need]
        if fitting:
            first = min(fitting, key=lambda at: (abs(at - home), at))
        else:
            half_sectors = max(need, self._pools[home].sectors // 2)
            first = self._extents.take(2 * half_sectors)
            self._pools[first] = _Pool(2 * half_sectors)
        pool = self._pools[first]
        side = pool.clusters.index(EMPTY)
        pool.clusters[side] = _RESERVED
        self._note(first)
        return Half(first, side)

    def give_up(self, half: Half) -> None:
        """Free a place that was reserved, or that a cluster has left."""
        pool = self._pools[half.pool]
        assert pool.clusters[half.side] != EMPTY, "freed twice"
        pool.clusters[half.side] = EMPTY
        self._note(half.pool)
        if pool.clusters == [EMPTY, EMPTY]:
            self._drop(half.pool)

    def put(self, cluster: int, half: Half, num_entries: int) -> None:
        """Settle a cluster in a reserved place; the place that it may have had becomes free."""
        assert self._pools[half.pool].clusters[half.side] == _RESERVED, "not reserved"
        self._grow_table(cluster)
        former = self.half(cluster) if cluster in self else None
        self._pools[half.pool].clusters[half.side] = cluster
        self._pool_of[cluster] = half.pool
        self.base[cluster], self.side[cluster] = self.origin(half), half.side
        self.count[cluster] = num_entries
        if former is not None:
            self.give_up(former)

    def resize(self, cluster: int, num_entries: int) -> None:
        """A cluster now has so many entries, in its place."""
        assert num_entries <= int(self.count[cluster]) + self.room(cluster), "no room"
        self.count[cluster] = num_entries

    def free(self, cluster: int) -> None:
        """Forget a cluster."""
        half = self.half(cluster)
        del self._pool_of[cluster]
        self.side[cluster] = _NOWHERE
        self.count[cluster] = 0
        self.give_up(half)

    def clear(self) -> None:
        """Forget all clusters; the numbers may be used again."""
        self.side[:] = _NOWHERE
        self.count[:] = 0
        self._pools.clear()
        self._pool_of.clear()
        self._half_free.clear()
        self._extents = FreeExtents()

    def _note(self, first: int) -> None:
        """Book whether a pool has one free half."""
        if self._pools[first].clusters.count(EMPTY) == 1:
            self._half_free.add(first)
        else:
            self._half_free.discard(first)

    def _drop(self, first: int) -> None:
        self._half_free.discard(first)
        self._extents.give(first, self._pools.pop(first).sectors)

    def _free_sectors(self, first: int) -> int:
        pool = self._pools[first]
        held = [c for c in pool.clusters if c != EMPTY]
        if held == [_RESERVED]:
            return 0
        return pool.sectors - sum(self.sectors(int(self.count[c])) for c in held)

    def _grow_table(self, cluster: int) -> None:
        assert cluster >= 0, cluster
        present = len(self.count)
        if cluster >= present:
            more = max(cluster + 1, 2 * present, 64) - present
            self.base = _extended(self.base, more, 0)
            self.side = _extended(self.side, more, _NOWHERE)
            self.count = _extended(self.count, more, 0)


def _extended(array: Int64Array, more: int, value: int) -> Int64Array:
    return np.concatenate([array, np.full(more, value, dtype=np.int64)])
