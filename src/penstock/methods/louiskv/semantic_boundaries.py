"""SemanticBoundaries: at which decode steps a layer retrieves anew, per sequence (LouisKV)."""

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.kernels.unit_selection import query_similarity


class SemanticBoundaries:
    """Compares each decode step's true query with the one before it.

    Source: LouisKV, section 4.1 and algorithm 1, line 35: a step is a boundary when it is the first
    one, or when the mean cosine similarity over all heads has fallen below tau.
    """

    def __init__(
        self, shape: KVShape, *, rows: int, rows_per_sequence: int, tau: float, stride: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Allocate the room for one query.

        Args:
            shape: of a row.
            stride: a boundary every so many steps instead, whatever the queries; 0: by `tau`.
        """
        size = (rows, shape.num_query_heads, shape.head_dim)
        self._previous = torch.zeros(size, dtype=shape.dtype, device=device)
        self._known = False
        self._rows_per_sequence = rows_per_sequence
        self._tau, self._stride = tau, stride
        sequences = rows // rows_per_sequence
        self._last = np.zeros(sequences, dtype=np.int64)
        self._decision = np.zeros(sequences, dtype=np.bool_)
        self.position = -1
        """Token of the newest step."""
        self.boundaries = np.zeros(sequences, dtype=np.int64)
        """Boundaries so far, first steps included. [sequences]"""
        self._lengths: Counter[int] = Counter()
        """Closed segments by their length in steps."""

    @staticmethod
    def num_bytes(shape: KVShape, rows: int) -> int:
        """Bytes of one layer's query, for the ledger."""
        return rows * (shape.num_query_heads * shape.head_dim * shape.dtype.itemsize + 17)

    def decide(self, query: Tensor, position: int) -> NDArray[np.bool_]:
        """Whether this step begins a new segment; asked again for the same step, says the same.

        Args:
            query: the layer's true query. [rows, heads of a row, head_dim]
            position: of the token that it belongs to.

        Returns:
            bool [sequences]
        """
        if self._known and position == self.position:
            return self._decision
        if not self._known:
            decision = np.ones(len(self._last), dtype=np.bool_)
        elif self._stride:
            decision = position - self._last >= self._stride
        else:
            alike = query_similarity(self._previous, query, self._rows_per_sequence)
            decision = (alike < self._tau).cpu().numpy()
        if self._known:
            self._lengths.update((position - self._last)[decision].tolist())
        self.boundaries += decision
        self._last = np.where(decision, position, self._last)
        self._decision, self.position, self._known = decision, position, True
        self._previous.copy_(query)
        return decision

    @property
    def lengths(self) -> Counter[int]:
        """Segments by their length in steps, open ones as long as they are by now."""
        if not self._known:
            return Counter(self._lengths)
        return self._lengths + Counter((self.position + 1 - self._last).tolist())

    def forget(self) -> None:
        """The next step is a first one: another prompt, or a crop, came between."""
        self._lengths = self.lengths
        self._known, self.position = False, -1

    def clear_counters(self) -> None:
        """Begin to count anew."""
        self._lengths.clear()
        self.boundaries[:] = 0

    def take_rows_from(self, other: "SemanticBoundaries", rows: Tensor) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""
        sequences: NDArray[np.int64] = rows[:: self._rows_per_sequence].cpu().numpy()
        sequences = sequences // self._rows_per_sequence
        self._previous.copy_(other._previous[rows])
        self._known, self.position = other._known, other.position
        self._last = other._last[sequences]
        self._decision = other._decision[sequences]
        self.boundaries = other.boundaries[sequences]
        self._lengths = Counter(other._lengths)
