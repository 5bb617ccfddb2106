"""Cluster-aligned replacement: small and recently updated clusters stay (DynaKV, section 6.2)."""

import numpy as np
from numpy.typing import NDArray

from penstock.tiers.replacement.base import ReplacementPolicy

UPDATED_SHARE = 0.25
"""Share of a row's slots that recently updated clusters may hold against replacement."""
OLDEST = 255
"""Steps after which an update counts as none."""
_SIZE_BITS, _CLOCK_BITS, _CLUSTER_BITS = 16, 24, 20


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
        self._share, self._prefers_small = updated_share, prefers_small
        self._reserved = int(updated_share * num_slots)
        self._clusters = np.full((batch, num_slots), -1, dtype=np.int32)
        self._sizes = np.zeros((batch, num_slots), dtype=np.int32)
        self._updated = np.zeros((batch, num_slots), dtype=np.int32)
        self._wanted = np.zeros((batch, num_slots), dtype=np.int32)
        self._clock = self._now = 0

    @staticmethod
    def num_bytes(batch: int, num_slots: int) -> int:
        """Bytes of the tables and of one choice, for the ledger."""
        return (4 * 4 + 3 * 8) * batch * num_slots

    def tell(
        self, clusters: NDArray[np.int32], sizes: NDArray[np.int32], updated: NDArray[np.int32],
        now: int,
    ) -> None:  # fmt: skip
        """What the slots hold now, before `victims` is asked.

        Args:
            clusters: of each slot's token, minus one where a slot is empty. [batch, slots]
            sizes: entries of that cluster. [batch, slots]
            updated: step in which it was appended to or split last, 0 for never. [batch, slots]
            now: this step.
        """
        self._now = now
        self._clusters, self._sizes, self._updated = clusters, sizes, updated

    def victims(self, pinned: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `ReplacementPolicy.victims`."""
        self._clock += 1
        self._wanted[pinned] = self._clock
        keys = self._keys(pinned)
        out = []
        for row, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            chosen = np.arange(keys.shape[1])
            if count < len(chosen):
                chosen = keys[row].argpartition(count - 1)[:count]
            assert not pinned[row, chosen].any(), "fewer unpinned slots than units to admit"
            self._wanted[row, chosen] = self._clock
            out.append(np.sort(chosen))
        return np.concatenate(out) if out else np.zeros(0, dtype=np.int64)

    def _keys(self, pinned: NDArray[np.bool_]) -> NDArray[np.int64]:
        """What is to go first has the smallest. [batch, slots]"""
        most = (1 << _SIZE_BITS) - 1
        size = np.minimum(self._sizes, most) if self._prefers_small else np.zeros_like(self._sizes)
        keys = (most - size).astype(np.int64) << (_CLOCK_BITS + _CLUSTER_BITS)
        keys |= (self._wanted.astype(np.int64) & ((1 << _CLOCK_BITS) - 1)) << _CLUSTER_BITS
        keys |= self._clusters & ((1 << _CLUSTER_BITS) - 1)
        keys[self._retained()] |= 1 << (_SIZE_BITS + _CLOCK_BITS + _CLUSTER_BITS)
        keys[self._clusters < 0] = -1
        keys[pinned] = np.iinfo(np.int64).max
        return keys

    def _retained(self) -> NDArray[np.bool_]:
        """Slots of the newest updated clusters, as many as the reserved share holds."""
        ages = np.minimum(self._now - self._updated, OLDEST).clip(0)
        ages[self._updated == 0] = OLDEST
        rows = np.arange(len(ages))[:, None] * (OLDEST + 1)
        counts = np.bincount((ages + rows).ravel(), minlength=len(ages) * (OLDEST + 1))
        within = counts.reshape(len(ages), -1).cumsum(axis=1) <= self._reserved
        within[:, OLDEST] = False
        retained: NDArray[np.bool_] = ages < within.sum(axis=1)[:, None]
        return retained

    def copy_rows(self, rows: NDArray[np.int64]) -> "ClusterAligned":
        """See `ReplacementPolicy.copy_rows`."""
        copy = ClusterAligned(
            len(rows), self._clusters.shape[1], updated_share=self._share,
            prefers_small=self._prefers_small,
        )  # fmt: skip
        for name in ("_clusters", "_sizes", "_updated", "_wanted"):
            setattr(copy, name, getattr(self, name)[rows].copy())
        copy._clock, copy._now = self._clock, self._now
        return copy
