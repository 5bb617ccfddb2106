"""ClusterMembers: which cluster each position is in, as a member or in its buffer (DynaKV)."""

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


class ClusterMembers:
    """One number for each position of each row, so that none is lost and none is there twice.

    Number c is a member of cluster c; number -1 - c is buffered until cluster c is split.
    """

    def __init__(self, rows: int, max_tokens: int, max_clusters: int) -> None:
        self.cluster_of = np.zeros((rows, max_tokens), dtype=_number_type(max_clusters))
        """[rows, max_tokens]"""
        self.buffer_counts = np.zeros((rows, max_clusters), dtype=np.int32)
        """Buffered entries of each cluster; it is flagged where there are any. [rows, capacity]"""
        self.length = 0
        """Positions that are in a cluster, from 0 on; the same in all rows."""
        self.num_buffered = 0
        """Of all clusters and rows."""
        self._flagged: set[tuple[int, int]] = set()

    @staticmethod
    def num_bytes(rows: int, max_tokens: int, max_clusters: int) -> int:
        """Bytes of the tables, for the ledger."""
        return rows * (4 * max_clusters + max_tokens * _number_type(max_clusters).itemsize)

    def add(self, clusters: Int64Array, joins: NDArray[np.bool_]) -> None:
        """Take in the next position of every row.

        Args:
            clusters: of the entries. [rows]
            joins: which are members; the others are buffered. [rows]
        """
        waits = (~joins).nonzero()[0]
        self.buffer_counts[waits, clusters[waits]] += 1
        self.num_buffered += len(waits)
        self._flagged.update(zip(waits.tolist(), clusters[waits].tolist(), strict=True))
        self.cluster_of[:, self.length] = np.where(joins, clusters, ~clusters)
        self.length += 1

    def taken(self, numbers: Int64Array, waiting: int) -> None:
        """As `add`, where a kernel has filled the tables.

        Args:
            numbers: as in `cluster_of`. [rows]
            waiting: how many are buffered.
        """
        self.length += 1
        if waiting == 0:
            return
        self.num_buffered += waiting
        for row, number in enumerate(numbers.tolist()):
            if number < 0:
                self._flagged.add((row, ~number))

    def empty_buffer(self, row: int, cluster: int) -> None:
        """The buffered entries of a cluster become members; the caller sets their numbers."""
        self.num_buffered -= int(self.buffer_counts[row, cluster])
        self.buffer_counts[row, cluster] = 0
        self._flagged.discard((row, cluster))

    def empty_buffers(self) -> None:
        """As `empty_buffer`, for all of them."""
        self.buffer_counts[:] = 0
        self._flagged.clear()
        self.num_buffered = 0

    def flagged(self) -> list[tuple[int, int]]:
        """Row and cluster of the clusters that have buffered entries, ascending."""
        return sorted(self._flagged)

    def fullest(self, limit: int) -> list[tuple[int, int]]:
        """Row and cluster of the buffers to empty, the fullest first, until fewer than `limit`
        entries are left."""
        chosen, left = [], self.num_buffered
        for at in sorted(self._flagged, key=lambda at: (-int(self.buffer_counts[at]), at)):
            if left < limit:
                break
            chosen.append(at)
            left -= int(self.buffer_counts[at])
        return chosen

    def members(self, row: int, cluster: int) -> Int64Array:
        """Positions of a cluster's members, ascending. [members]"""
        return np.flatnonzero(self.cluster_of[row, : self.length] == cluster)

    def buffered(self, row: int, cluster: int) -> Int64Array:
        """Positions of the entries that wait for a cluster's split, ascending. [buffered]"""
        return np.flatnonzero(self.cluster_of[row, : self.length] == ~cluster)

    def entries_of(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which positions are in chosen clusters, members and buffered alike.

        Args:
            chosen: [rows, num_clusters or more]

        Returns:
            [rows, length]
        """
        owners = self.cluster_of[:, : self.length]
        numbers = np.maximum(owners, ~owners).astype(np.int64)
        numbers += np.arange(len(numbers))[:, None] * chosen.shape[1]
        return chosen.ravel()[numbers]

    def is_all(self, row: int, cluster: int, positions: Int64Array, held: int) -> bool:
        """Whether these are the `held` entries of a cluster, each once. [entries]"""
        if len(positions) != held or held == 0:
            return False
        # Few entries: lists are quicker than arrays.
        different = set(positions.tolist())
        if len(different) != held or min(different) < 0 or max(different) >= self.length:
            return False
        owners = set(self.cluster_of[row].take(positions).tolist())
        return owners <= {cluster, ~cluster}

    def crop(self, length: int) -> list[tuple[int, int]]:
        """Forget the positions at and after `length`; row and cluster of what lost a member."""
        gone = self.cluster_of[:, length : self.length].astype(np.int64)
        rows, columns = (gone < 0).nonzero()
        np.subtract.at(self.buffer_counts, (rows, ~gone[rows, columns]), 1)
        self.num_buffered -= len(rows)
        self._flagged = {at for at in self._flagged if self.buffer_counts[at]}
        self.length = length
        return [
            (row, cluster)
            for row, part in enumerate(gone)
            for cluster in np.unique(part[part >= 0]).tolist()
        ]

    def reset(self) -> None:
        """Forget everything."""
        self.length = 0
        self.empty_buffers()

    def take_rows_from(self, other: "ClusterMembers", rows: Int64Array) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""
        self.cluster_of[:] = other.cluster_of[rows]
        self.buffer_counts[:] = other.buffer_counts[rows]
        self.num_buffered = int(self.buffer_counts.sum())
        rows, clusters = self.buffer_counts.nonzero()
        self._flagged = set(zip(rows.tolist(), clusters.tolist(), strict=True))
        self.length = other.length


def _number_type(clusters: int) -> np.dtype[np.signedinteger]:
    """Of a cluster's number, or minus that less one."""
    small = clusters <= np.iinfo(np.int16).max
    return np.dtype(np.int16) if small else np.dtype(np.int32)
