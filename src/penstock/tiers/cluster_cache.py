"""ClusterCache: which clusters of entries are in fast memory, and who goes when room is needed."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import CacheStateError

UPDATED_SHARE = 0.25
"""Share of a row's places that recently updated clusters may hold against replacement."""


class ClusterCache:
    """Places of one layer's fast memory, given to whole clusters of any size, row by row.

    A cluster's places need not lie side by side: attention masks what it does not want. Of the
    clusters that a step does not need, those go first that are largest, and among equals the one
    that was wanted longest ago; those that were appended to or split lately stay, as far as a
    reserved share of the places holds them.

    Source: DynaKV, section 6.2 (cluster-aligned replacement: small clusters first, updated ones
    retained).

    Differences: the paper gives neither the size of the reserved space nor what happens when all
    that is wanted does not fit beside it: here a quarter, and then updated clusters go too, the
    one that was updated longest ago first.
    """

    def __init__(
        self, rows: int, places: int, *, updated_share: float = UPDATED_SHARE,
        prefers_small: bool = True,
    ) -> None:  # fmt: skip
        """Begin empty.

        Args:
            places: entries of each row.
            updated_share: 0 for no reserved space.
            prefers_small: false: plain LRU over clusters, to compare with.
        """
        self.places = places
        self._reserved = int(updated_share * places)
        self._prefers_small = prefers_small
        self._held: list[dict[int, NDArray[np.int64]]] = [{} for _ in range(rows)]
        self._free = [np.arange(places)[::-1].copy() for _ in range(rows)]
        self._num_free = [places] * rows
        self._wanted: list[dict[int, int]] = [{} for _ in range(rows)]
        """When each held cluster was wanted last."""
        self._updated: list[dict[int, int]] = [{} for _ in range(rows)]
        """When each held cluster was appended to or split last, oldest first."""
        self._clock = 0

    @staticmethod
    def num_bytes(rows: int, places: int) -> int:
        """Bytes of the tables, for the ledger: a number for each place, free or held, twice."""
        return 16 * rows * places

    def held(self, row: int) -> dict[int, NDArray[np.int64]]:
        """Clusters of a row that are in memory, and their places in the order of their entries."""
        return self._held[row]

    def missing(self, row: int, wanted: Collection[int]) -> list[int]:
        """Those of the wanted clusters that are not there; all of them count as wanted now."""
        self._clock += 1
        here = self._held[row]
        for cluster in wanted:
            if cluster in here:
                self._wanted[row][cluster] = self._clock
        return [cluster for cluster in wanted if cluster not in here]

    def admit(
        self, row: int, cluster: int, entries: int, keep: Collection[int]
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Give a cluster places, in exchange for others.

        Args:
            entries: of the cluster.
            keep: clusters that may not go (those of this step).

        Returns:
            Its places, int64 [entries], and the clusters that had to go.

        Raises:
            CacheStateError: what must be kept leaves too little room.
        """
        assert cluster not in self._held[row], "it is here already"
        gone = self._make_room(row, entries, {*keep, cluster})
        self._held[row][cluster] = self._take(row, entries)
        self._wanted[row][cluster] = self._clock
        return self._held[row][cluster], gone

    def grow(
        self, row: int, cluster: int, entries: int, keep: Collection[int]
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Give a cluster that is here more places, behind those it has; as `admit`."""
        gone = self._make_room(row, entries, {*keep, cluster})
        new = self._take(row, entries)
        self._held[row][cluster] = np.concatenate([self._held[row][cluster], new])
        self.note_update(row, cluster)
        return new, gone

    def split(self, row: int, cluster: int, second: int, stays: NDArray[np.bool_]) -> None:
        """Divide a cluster that is here: entries that do not stay are of cluster `second` now.

        Args:
            stays: by entry. bool [entries of the cluster]
        """
        places = self._held[row][cluster]
        assert second not in self._held[row], "a new cluster"
        self._held[row][cluster], self._held[row][second] = places[stays], places[~stays]
        self._wanted[row][second] = self._wanted[row][cluster]
        self.note_update(row, cluster)
        self.note_update(row, second)

    def note_update(self, row: int, cluster: int) -> None:
        """The cluster was appended to or split: it is likely to be wanted soon (Table 2)."""
        self._updated[row].pop(cluster, None)
        self._updated[row][cluster] = self._clock

    def drop(self, row: int, cluster: int) -> None:
        """Forget a cluster that is here."""
        places = self._held[row].pop(cluster)
        free = self._num_free[row]
        self._free[row][free : free + len(places)] = places
        self._num_free[row] += len(places)
        self._wanted[row].pop(cluster, None)
        self._updated[row].pop(cluster, None)

    def clear(self) -> None:
        """Forget everything."""
        for row in range(len(self._held)):
            for cluster in list(self._held[row]):
                self.drop(row, cluster)

    # Replacement ------------------------------------------------------------------------------

    def _take(self, row: int, entries: int) -> NDArray[np.int64]:
        self._num_free[row] -= entries
        free = self._num_free[row]
        return self._free[row][free : free + entries][::-1].copy()

    def _make_room(self, row: int, entries: int, keep: set[int]) -> list[int]:
        gone: list[int] = []
        if self._num_free[row] >= entries:
            return gone
        retained = self._retained(row)
        order = self._victims(row, keep | retained)
        # Updated ones last, the one updated longest ago first.
        order += [cluster for cluster in self._updated[row] if cluster in retained - keep]
        for cluster in order:
            self.drop(row, cluster)
            gone.append(cluster)
            if self._num_free[row] >= entries:
                return gone
        raise CacheStateError(
            f"{entries} entries do not fit: a row has {self.places} places, and what this step "
            "attends to leaves fewer"
        )

    def _victims(self, row: int, keep: set[int]) -> list[int]:
        wanted, held = self._wanted[row], self._held[row]
        able = [cluster for cluster in held if cluster not in keep]
        if self._prefers_small:
            return sorted(able, key=lambda cluster: (-len(held[cluster]), wanted[cluster]))
        return sorted(able, key=wanted.__getitem__)

    def _retained(self, row: int) -> set[int]:
        """The newest updated clusters, as many as the reserved share holds."""
        found: set[int] = set()
        room = self._reserved
        for cluster in reversed(self._updated[row]):
            size = len(self._held[row].get(cluster, ()))
            if size > room:
                break
            room -= size
            found.add(cluster)
        return found
