"""UnitPool: clusters and segments of one layer in one pool, each with its mean key (LouisKV)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import CacheStateError
from penstock.core.shape import KVShape
from penstock.methods.louiskv.block_clusterer import Clustering
from penstock.methods.louiskv.prompt_clusters import PromptClusters
from penstock.methods.louiskv.segment_table import SegmentTable


class UnitPool:
    """Index vectors of all units, clusters first, and where their tokens are.

    A segment belongs to all rows (KV heads) of its sequence; each row has a mean of its own. Where
    it is asked for, the mean squared length of a unit's keys stands beside its mean key.
    """

    def __init__(
        self, shape: KVShape, *, rows: int, rows_per_sequence: int, capacity: int, max_tokens: int,
        device: torch.device, squares: bool = False,
    ) -> None:  # fmt: skip
        """Allocate everything.

        Args:
            capacity: units.
            squares: hold mean squared lengths.
        """
        self._rows_per_sequence = rows_per_sequence
        self.means = torch.zeros(rows, capacity, shape.head_dim, dtype=shape.dtype, device=device)
        """[rows, capacity, head_dim]"""
        self.squares: Tensor | None = None
        """Mean squared lengths of keys. float32 [rows, capacity]"""
        self._open_squares: Tensor | None = None
        if squares:
            self.squares = torch.zeros(rows, capacity, dtype=torch.float32, device=device)
            self._open_squares = torch.zeros(rows, dtype=torch.float32, device=device)
        self._clusters = PromptClusters(
            rows=rows, max_tokens=max_tokens, capacity=capacity, device=device
        )
        self._segments = SegmentTable(rows // rows_per_sequence, capacity)
        self._open_sum = torch.zeros(rows, shape.head_dim, dtype=torch.float32, device=device)
        self.renumbered = 0
        """How often units have got other numbers."""

    @staticmethod
    def num_bytes(
        shape: KVShape, *, rows: int, rows_per_sequence: int, capacity: int, max_tokens: int,
        squares: bool = False,
    ) -> int:  # fmt: skip
        """Bytes of a pool, for the ledger."""
        means = rows * shape.head_dim * (capacity * shape.dtype.itemsize + 4)
        means += 4 * rows * (capacity + 1) * squares
        tables = PromptClusters.num_bytes(rows, max_tokens, capacity)
        return means + tables + SegmentTable.num_bytes(rows // rows_per_sequence, capacity)

    @property
    def members(self) -> Tensor:
        """Positions of tokens, those of a unit side by side. int [rows, max_tokens]"""
        return self._clusters.members

    @property
    def num_units(self) -> int:
        """Units of the sequence that has most."""
        return self._clusters.used + self._segments.columns

    # Taking tokens in -------------------------------------------------------------------------

    def add_block(self, start: int, clustering: Clustering) -> None:
        """Take in a block of prompt tokens that was clustered.

        Raises:
            CacheStateError: there is no room, even with segments merged.
        """
        clusters = clustering.means.shape[1]
        self._make_room(clusters)
        base, held = self._clusters.used, self._segments.columns
        self._move(base, base + clusters, held)
        self.means[:, base : base + clusters] = clustering.means.to(self.means.dtype)
        if self.squares is not None:
            assert clustering.squares is not None
            self.squares[:, base : base + clusters] = clustering.squares
        self._clusters.add(start, clustering.labels, clusters)

    def cut(self, boundary: NDArray[np.bool_], position: int) -> None:
        """Begin a new segment in some sequences.

        Args:
            boundary: which. [sequences]
            position: of the segment's first token.

        Raises:
            CacheStateError: there is no room, even with segments merged.
        """
        self._write_open_means()
        self._make_room(1)
        self._segments.cut(boundary, position)
        rows = self._rows_of(boundary.nonzero()[0])
        self._open_sum[rows] = 0.0
        if self._open_squares is not None:
            self._open_squares[rows] = 0.0

    def cut_all(self, position: int) -> None:
        """Begin a new segment in every sequence."""
        self.cut(np.ones(len(self._segments.counts), dtype=np.bool_), position)

    def grow(self, keys: Tensor, first: int) -> None:
        """Let the open segment of every sequence go on.

        Args:
            keys: [rows, tokens, head_dim]
            first: position of the first of them.
        """
        self._open_sum += keys.sum(dim=1, dtype=torch.float32)
        if self._open_squares is not None:
            lengths = torch.linalg.vector_norm(keys, dim=2, dtype=torch.float32)
            self._open_squares += lengths.square_().sum(dim=1)
        self._segments.grow(first + keys.shape[1])

    def _open_segments(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The last segment of each sequence, and its tokens (0 where there is none)."""
        table = self._segments
        at = np.maximum(table.counts - 1, 0)
        tokens = (table.ends - table.starts)[np.arange(len(at)), at]
        return at, np.where(table.counts > 0, tokens, 0).astype(np.int32)

    def _write_open_means(self) -> None:
        """Bring the index vectors of the open segments up to date."""
        at, tokens = self._open_segments()
        held = tokens.nonzero()[0]
        rows = self._rows_of(held)
        columns = self._spread(self._clusters.used + at[held])
        counts = self._spread(tokens[held])
        means = self._open_sum[rows] / counts.unsqueeze(1)
        self.means[rows, columns] = means.to(self.means.dtype)
        if self.squares is not None and self._open_squares is not None:
            self.squares[rows, columns] = self._open_squares[rows] / counts

    def _make_room(self, units: int) -> None:
        """Merge neighbouring segments until so many units more have room."""
        table, capacity = self._segments, self.means.shape[1]
        while self.num_units + units > capacity:
            self._write_open_means()
            before = table.columns
            weights = (table.ends - table.starts)[:, :before]
            weights[np.arange(before) >= table.counts[:, None]] = 0
            target = self._spread(table.merge()[:, :before])
            if table.columns == before:
                raise CacheStateError(
                    "the pool of units is full; give louiskv a larger cluster_tokens"
                )
            self.renumbered += 1
            base, spread = self._clusters.used, self._spread(weights)
            for row in range(len(self.means)):
                at, held = slice(row, row + 1), slice(base, base + before)
                for values in self._values:
                    part = values[at, held]
                    part.copy_(_weighted(part.float(), target[at], spread[at]))

    def _move(self, start: int, target: int, units: int) -> None:
        """Move index vectors, row by row: that takes the memory of one row."""
        if start != target:
            self.renumbered += 1
            for values in self._values:
                for row in values:
                    row[target : target + units] = row[start : start + units].clone()

    @property
    def _values(self) -> list[Tensor]:
        """All that is an average over a unit's tokens. [rows, capacity, 1 or head_dim]"""
        return [self.means] if self.squares is None else [self.means, self.squares.unsqueeze(2)]

    def _rows_of(self, sequences: NDArray[np.int64]) -> Tensor:
        """Rows of some sequences, as indices."""
        heads = np.arange(self._rows_per_sequence)
        rows = (sequences[:, None] * self._rows_per_sequence + heads).reshape(-1)
        return torch.from_numpy(rows).to(self.means.device)

    def _spread(self, values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        """What holds for a sequence, for each of its rows."""
        rows = np.ascontiguousarray(values.repeat(self._rows_per_sequence, axis=0))
        return torch.from_numpy(rows).to(self.means.device)

    # Looking up -------------------------------------------------------------------------------

    def units(self, first_unit: NDArray[np.int64], end: int) -> tuple[Tensor, Tensor]:
        """Where each unit's tokens begin in `members`, and how many may be selected.

        Args:
            first_unit: first position that may be, per row. [rows]
            end: positions from here on are in the window.

        Returns:
            Two tensors, int32 [rows, num_units].
        """
        self._write_open_means()
        self._clusters.count(torch.from_numpy(first_unit).to(self.means.device), end)
        used = self._clusters.used
        starts, sizes = self._segments.sizes(first_unit[:: self._rows_per_sequence], end)
        return (
            torch.cat([self._clusters.first[:, :used], self._spread(starts)], dim=1),
            torch.cat([self._clusters.sizes[:, :used], self._spread(sizes)], dim=1),
        )

    # Changes of shape -------------------------------------------------------------------------

    def crop(self, length: int, cluster_tokens: int) -> None:
        """Forget the tokens at and after `length`; a unit of which a part stays keeps its mean."""
        before = self._clusters.used
        self.renumbered += 1
        self._write_open_means()
        folded = self._clusters.crop(length, cluster_tokens)
        if folded is not None:
            block, (into, counts) = folded
            for values in self._values:
                merged = _weighted(values[:, block].float(), into, counts)
                values[:, block] = merged.to(values.dtype)
        self._segments.crop(length)
        base = self._clusters.used
        self._move(before, base, self._segments.columns)
        at, tokens = self._open_segments()
        rows = torch.arange(len(self._open_sum), device=self.means.device)
        columns, counts = self._spread(base + at), self._spread(tokens)
        self._open_sum.copy_(self.means[rows, columns].float() * counts.unsqueeze(1))
        if self.squares is not None and self._open_squares is not None:
            self._open_squares.copy_(self.squares[rows, columns] * counts)

    def take_rows_from(self, other: "UnitPool", rows: Tensor) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""
        sequences = (rows[:: self._rows_per_sequence] // self._rows_per_sequence).cpu().numpy()
        self.means.copy_(other.means[rows])
        self._clusters.take_rows_from(other._clusters, rows)
        self._segments.take_rows_from(other._segments, sequences)
        self._open_sum.copy_(other._open_sum[rows])
        self.renumbered += 1
        for mine, its in (
            (self.squares, other.squares), (self._open_squares, other._open_squares),
        ):  # fmt: skip
            if mine is not None and its is not None:
                mine.copy_(its[rows])


def _weighted(means: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Means of what goes into each target, by weight; where nothing does, zero.

    Args:
        means: float32 [rows, units, any]
        target, weights: int [rows, units]
    """
    target, weight = target.long().unsqueeze(-1), weights.float().unsqueeze(-1)
    sums = torch.zeros_like(means).scatter_add_(1, target.expand_as(means), means * weight)
    totals = torch.zeros_like(weight).scatter_add_(1, target, weight)
    return sums / totals.clamp_min(1.0)
