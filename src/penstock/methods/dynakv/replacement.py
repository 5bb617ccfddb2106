"""Cluster-aligned replacement: small and recently updated clusters stay (DynaKV, section 6.2)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from penstock.core.selection import Selection
from penstock.engine.fetch_plan import FetchPlan, PlanLists
from penstock.engine.tiers.replacement import ReplacementPolicy
from penstock.engine.tiers.slot_table import SlotTable
from penstock.kernels.native.compiled import address, kernel

UPDATED_SHARE = 0.25
"""Share of a row's slots that recently updated clusters may hold against replacement."""
OLDEST = 255
"""Steps after which an update counts as none."""
_SIZE_BITS, _CLOCK_BITS, _CLUSTER_BITS = 16, 24, 20


class SlotContents(NamedTuple):
    """What a layer's slots hold, and what is known of the clusters."""

    unit_in: NDArray[np.int32]
    """Token in each slot, minus one for none. [batch, slots]"""
    owners: NDArray[np.int16] | NDArray[np.int32]
    """Cluster of each token from `base` on, those that wait for a split as -1 - cluster.
    [batch, tokens]"""
    base: int
    sizes: NDArray[np.int32]
    """Entries of each cluster. [batch, clusters]"""
    updated: NDArray[np.int32]
    """Step in which each was appended to or split last, 0 for never. [batch, clusters or more]"""
    now: int
    """This step."""


class ClusterAligned(ReplacementPolicy):
    """Slots of single tokens, given up cluster by cluster.

    Of the clusters that a step does not need, those go first that are largest, and among equals
    the one that was wanted longest ago; those that were appended to or split lately stay, as far as
    a reserved share of the slots holds them, and go last.

    Source: DynaKV, section 6.2 (cluster-aligned replacement: small clusters first, updated ones
    retained).

    Differences: the paper gives neither the size of the reserved space nor what happens when all
    that is wanted does not fit beside it: here a quarter, and then updated clusters go too. The
    last cluster to go may go in part.
    """

    def __init__(
        self, batch: int, num_slots: int, *, updated_share: float = UPDATED_SHARE,
        prefers_small: bool = True,
    ) -> None:  # fmt: skip
        """Begin with nothing known of the slots.

        Args:
            updated_share: 0 for no reserved space.
            prefers_small: false: plain LRU over clusters, to compare with.
        """
        self._share, self.prefers_small = updated_share, prefers_small
        self.reserved = int(updated_share * num_slots)
        """Slots of a row that updated clusters may hold."""
        self.wanted_at = np.zeros((batch, num_slots), dtype=np.int32)
        """When each slot was wanted last, by `clock`. [batch, slots]"""
        self.clock = 0
        self.contents: SlotContents | None = None

    @staticmethod
    def num_bytes(batch: int, num_slots: int) -> int:
        """Bytes of the table, for the ledger."""
        return 4 * batch * num_slots

    @staticmethod
    def scratch_bytes(batch: int, num_slots: int) -> int:
        """Temporaries of one choice, for the ledger."""
        return 6 * 8 * batch * num_slots

    def observe(self, contents: SlotContents) -> None:
        """What the slots hold now, before `victims` is asked; read then, not before."""
        self.contents = contents

    @override
    def plan_at_once(self, selection: Selection, table: SlotTable) -> FetchPlan | None:
        """Cluster by cluster."""
        compiled, contents = kernel("plan_cluster_fetch"), self.contents
        assert contents is not None, "observe() comes first"
        if compiled is None or not contents.owners.flags.c_contiguous:
            return None
        lists, sizes = PlanLists(selection), np.ascontiguousarray(contents.sizes, dtype=np.int32)
        self.clock += 1
        numbers = np.array([
            contents.owners.itemsize, contents.owners.shape[1], contents.base, sizes.shape[1],
            contents.updated.shape[1], contents.now, self.reserved, self.prefers_small, self.clock,
        ], dtype=np.int64)  # fmt: skip
        scratch = np.empty(4 * table.num_slots + 1, dtype=np.int64)
        compiled(
            *lists.asked(table), address(contents.owners), address(sizes),
            address(contents.updated), address(numbers), address(self.wanted_at), address(scratch),
            *lists.places(),
        )  # fmt: skip
        return lists.plan()

    @override
    def note_wanted(self, pinned: NDArray[np.bool_]) -> None:
        self.clock += 1
        self.wanted_at[pinned] = self.clock

    @override
    def victims(self, pinned: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = self._keys(pinned)
        out = []
        for row, count in enumerate(counts.tolist()):
            chosen = keys[row].argsort(kind="stable")[:count]
            assert not pinned[row, chosen].any(), "fewer unpinned slots than units to admit"
            self.wanted_at[row, chosen] = self.clock
            out.append(np.sort(chosen))
        return np.concatenate(out)

    def _keys(self, pinned: NDArray[np.bool_]) -> NDArray[np.int64]:
        """What is to go first has the smallest. [batch, slots]"""
        contents = self.contents
        assert contents is not None, "observe() comes first"
        held = contents.unit_in
        entries = np.maximum(held - contents.base, 0)
        raw = np.take_along_axis(contents.owners, entries, axis=1).astype(np.int64)
        clusters = np.maximum(raw, ~raw)
        most = (1 << _SIZE_BITS) - 1
        sizes = np.zeros_like(clusters)
        if self.prefers_small:
            sizes = np.minimum(np.take_along_axis(contents.sizes, clusters, axis=1), most)
        keys = (most - sizes).astype(np.int64) << (_CLOCK_BITS + _CLUSTER_BITS)
        keys |= (self.wanted_at.astype(np.int64) & ((1 << _CLOCK_BITS) - 1)) << _CLUSTER_BITS
        keys |= clusters & ((1 << _CLUSTER_BITS) - 1)
        updated = np.take_along_axis(contents.updated, clusters, axis=1)
        retained = self._retained(updated, held >= 0, contents.now)
        keys[retained] |= 1 << (_SIZE_BITS + _CLOCK_BITS + _CLUSTER_BITS)
        keys[held < 0] = -1
        keys[pinned] = np.iinfo(np.int64).max
        return keys

    def _retained(
        self, updated: NDArray[np.int32], held: NDArray[np.bool_], now: int
    ) -> NDArray[np.bool_]:
        """Slots of the newest updated clusters, as many as the reserved share holds."""
        ages = np.minimum(now - updated, OLDEST).clip(0)
        ages[updated == 0] = OLDEST
        rows = np.arange(len(ages))[:, None] * (OLDEST + 1)
        counts = np.bincount((ages + rows)[held], minlength=len(ages) * (OLDEST + 1))
        within = counts.reshape(len(ages), -1).cumsum(axis=1) <= self.reserved
        within[:, OLDEST] = False
        retained: NDArray[np.bool_] = ages < within.sum(axis=1)[:, None]
        return retained

    @override
    def copy_rows(self, rows: NDArray[np.int64]) -> "ClusterAligned":
        copy = ClusterAligned(
            len(rows), self.wanted_at.shape[1], updated_share=self._share,
            prefers_small=self.prefers_small,
        )  # fmt: skip
        copy.wanted_at, copy.clock = self.wanted_at[rows].copy(), self.clock
        return copy
