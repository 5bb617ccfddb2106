"""SemanticUnitsIndex: prompt clusters and output segments in one pool of units (LouisKV)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import CacheStateError
from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.indexes.base import KeyIndex
from penstock.indexes.block_clusterer import BlockClusterer
from penstock.indexes.prompt_clusters import integer_dtype
from penstock.indexes.semantic_boundaries import SemanticBoundaries
from penstock.indexes.unit_pool import UnitPool
from penstock.kernels.unit_selection import CHUNK_UNITS, take_units, unit_scores

SPARE_UNITS = 8
"""Units of a pool beside one for every `cluster_tokens` tokens and those that are asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSizes:
    """How large one layer's units, blocks and tables are."""

    cluster_tokens: int
    """Tokens of a cluster on average, or of a page."""
    block_tokens: int
    """Prompt tokens that are clustered together."""
    spare_units: int
    """Units beyond one for every `cluster_tokens` tokens: room for short segments."""
    pages: bool = False
    """Pages of `cluster_tokens` consecutive tokens instead of clusters and segments."""
    cosine: bool = False
    """k-means by the cosine instead of the distance."""

    def capacity(self, max_tokens: int) -> int:
        """Units of the pool."""
        return -(-max_tokens // self.cluster_tokens) + self.spare_units + SPARE_UNITS

    def elements(self, rows: int) -> int:
        """Elements of a chunk's temporaries in k-means."""
        return min(1 << 19, max(1 << 13, 16 * rows * self.block_tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCounters:
    """What one layer has retrieved so far."""

    retrievals: tuple[int, ...]
    """Steps that scored and retrieved, per sequence."""
    reuse_steps: tuple[int, ...]
    """Steps that attended to the retrieved set as it was, per sequence."""
    segment_tokens: dict[int, int]
    """Closed segments by their length in tokens."""
    fetched_bytes: int
    """KV that was moved into slots, padding of the store's sectors aside."""


class SemanticUnitsIndex(KeyIndex):
    """Ranks clusters of prompt tokens and segments of generated ones by their mean keys.

    Source: LouisKV, sections 4.1 and 4.2, algorithm 1. Tokens that come with a decode step's query
    are generated; all others are a prompt's: they are clustered block by block on a thread while
    the prompt is still being taken in, and the last, unfinished block when the first step wants it.
    Fewer than twice `cluster_tokens` of them are one unit as they stand. One KV head a row; all
    rows of a sequence share its boundaries.
    """

    def __init__(
        self, shape: KVShape, sizes: UnitSizes, boundaries: SemanticBoundaries, *, batch: int,
        max_tokens: int, rows_per_sequence: int, scaling: float, every_step: bool,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Allocate the pool of units.

        Args:
            every_step: retrieve at every step; boundaries only cut segments.
        """
        assert shape.num_kv_heads == 1, "one KV head a row"
        self._sizes, self._scaling, self._every_step = sizes, scaling, every_step
        self._rows_per_sequence, self._token_bytes = rows_per_sequence, shape.token_bytes
        self.boundaries = boundaries
        self._pool = UnitPool(
            shape, rows=batch, rows_per_sequence=rows_per_sequence,
            capacity=sizes.capacity(max_tokens), max_tokens=max_tokens, device=device,
        )  # fmt: skip
        self._blocks = BlockClusterer(
            self._pool.means, rows=batch, block_tokens=sizes.block_tokens,
            cluster_tokens=sizes.cluster_tokens, cosine=sizes.cosine,
            elements=sizes.elements(batch),
        )  # fmt: skip
        self._end = 0
        self._kept: Selection | None = None
        self._first_unit = np.zeros(batch, dtype=np.int64)
        self._retrievals = np.zeros(batch // rows_per_sequence, dtype=np.int64)
        self._reuses = np.zeros_like(self._retrievals)
        self._fetched_tokens = 0

    @staticmethod
    def num_bytes(
        shape: KVShape, sizes: UnitSizes, *, batch: int, max_tokens: int, rows_per_sequence: int
    ) -> int:
        """Bytes of one layer's pool of units and of what makes it, for the ledger."""
        pool = UnitPool.num_bytes(
            shape, rows=batch, rows_per_sequence=rows_per_sequence,
            capacity=sizes.capacity(max_tokens), max_tokens=max_tokens,
        )  # fmt: skip
        blocks = BlockClusterer.num_bytes(
            rows=batch, block_tokens=sizes.block_tokens, cluster_tokens=sizes.cluster_tokens,
            head_dim=shape.head_dim, itemsize=shape.dtype.itemsize, elements=sizes.elements(batch),
        )  # fmt: skip
        return pool + blocks + SemanticBoundaries.num_bytes(shape, batch)

    @staticmethod
    def scratch_bytes(shape: KVShape, sizes: UnitSizes, *, batch: int, max_tokens: int) -> int:
        """Temporaries of one retrieval, or of the tables of one block, for the ledger."""
        capacity = sizes.capacity(max_tokens)
        chunk = min(capacity, CHUNK_UNITS) * shape.head_dim * (4 + shape.dtype.itemsize)
        scores = capacity * (8 * shape.num_query_heads + 48) + chunk
        # A subset of rows copies its part of the table of members.
        members = max_tokens * integer_dtype(max_tokens).itemsize
        return batch * max(scores + members, 48 * sizes.block_tokens)

    # Keys -------------------------------------------------------------------------------------

    def append(self, keys: Tensor, first_token: int) -> None:
        """See `KeyIndex.append`; units of the engine are single tokens here."""
        if first_token < self._end:
            self._crop(first_token)
        flat = keys[:, :, 0]
        self._end = first_token + flat.shape[1]
        generated = flat.shape[1] == 1 and first_token == self.boundaries.position
        if self._sizes.pages:
            self._take_pages(flat, first_token)
        elif generated:
            self._pool.grow(flat, first_token)
        else:
            self._take_prompt(flat, first_token)
        if not generated:
            # What was retrieved before a new prompt says nothing about it.
            self.boundaries.forget()
            self._kept = None

    def _take_prompt(self, keys: Tensor, first: int) -> None:
        done = 0
        while done < keys.shape[1]:
            part = keys[:, done : done + self._blocks.room]
            for start, clustering in self._blocks.take(part, first + done):
                self._pool.add_block(start, clustering)
            done += part.shape[1]

    def _finish_prompt(self) -> None:
        """Make units of all prompt tokens that wait or are being clustered."""
        for start, clustering in self._blocks.finish():
            self._pool.add_block(start, clustering)
        waiting, start = self._blocks.waiting, self._blocks.start
        if waiting.shape[1] >= 2 * self._sizes.cluster_tokens:
            self._pool.add_block(start, self._blocks.cluster(waiting))
        elif waiting.shape[1]:
            self._pool.cut_all(start)
            self._pool.grow(waiting, start)
        self._blocks.count = 0

    def _take_pages(self, keys: Tensor, first: int) -> None:
        size, done = self._sizes.cluster_tokens, 0
        while done < keys.shape[1]:
            position = first + done
            if position % size == 0:
                self._pool.cut_all(position)
            part = keys[:, done : done + size - position % size]
            self._pool.grow(part, position)
            done += part.shape[1]

    # Retrieval --------------------------------------------------------------------------------

    def begin_step(
        self, query: Tensor, first_unit: NDArray[np.int64], position: int
    ) -> NDArray[np.bool_]:
        """Look for a boundary, and cut the segments where one is; arguments as in `retrieve`.

        Returns:
            Which sequences are at a boundary. bool [sequences]
        """
        if position < self._end:
            self._crop(position)
        self._finish_prompt()
        self._first_unit = first_unit
        asked_before = self.boundaries.position == position
        boundary = self.boundaries.decide(query, position)
        if not asked_before and not self._sizes.pages and boundary.any():
            self._pool.cut(boundary, position)
        return boundary

    def retrieve(
        self, query: Tensor, first_unit: NDArray[np.int64], end_unit: int, wanted: int,
        position: int,
    ) -> Selection:  # fmt: skip
        """Units for one step: anew at a boundary, the same ones as before everywhere else.

        Where a row has no more tokens than may be selected, it selects them all.

        Args:
            query: the true query. [rows, heads of a row, head_dim]
            first_unit, end_unit, wanted: see `SelectionPolicy.select`.
            position: of the step's token.
        """
        asked_before = self.boundaries.position == position
        boundary = self.begin_step(query, first_unit, position)
        available = end_unit - first_unit
        if self._kept is not None and self._kept.unit_ids.shape[1] != wanted:
            self._kept = None
        if (available <= wanted).all():
            self._kept = None
            ids = np.arange(first_unit.min(), end_unit)
            ids = np.broadcast_to(ids, (len(first_unit), len(ids))).copy()
            return Selection(ids, ids >= first_unit[:, None])
        due = boundary | self._every_step | (self._kept is None)
        if not asked_before:
            self._retrievals += due
            self._reuses += ~due
        rows = due.repeat(self._rows_per_sequence) | (available <= wanted)
        if rows.any() and (self._kept is None or not asked_before):
            self._kept = self._renew(query, rows, end_unit, wanted)
        assert self._kept is not None
        return self._kept

    def _renew(
        self, query: Tensor, rows: NDArray[np.bool_], end_unit: int, wanted: int
    ) -> Selection:
        """Score and select for some rows; the others keep what they have."""
        places, sizes = self._pool.units(self._first_unit, end_unit)
        members, which = self._pool.members, None
        if not rows.all():
            which = torch.from_numpy(rows.nonzero()[0]).to(query.device)
            query, members = query[which], members[which]
            places, sizes = places[which], sizes[which]
        scores = unit_scores(query, self._pool.means, sizes, self._scaling, which)
        tokens, _ = take_units(scores, places, sizes, members, wanted)
        chosen: NDArray[np.int64] = tokens.sort(dim=1).values.cpu().numpy()
        if self._kept is None:
            ids = np.zeros((len(rows), wanted), dtype=np.int64)
        else:
            ids = self._kept.unit_ids.copy()
        ids[rows] = chosen
        taken = np.minimum(end_unit - self._first_unit, wanted)
        if (taken == wanted).all():
            return Selection(ids)
        return Selection(ids, np.arange(wanted) >= (wanted - taken)[:, None])

    def score(self, query: Tensor, num_units: int) -> Tensor:
        """See `KeyIndex.score`: a token is as important as its unit; minus one where it may not be
        selected. `retrieve` does not need it: it is for who ranks single tokens."""
        self._finish_prompt()
        places, sizes = self._pool.units(self._first_unit, num_units)
        scores = unit_scores(query, self._pool.means, sizes, self._scaling)
        tokens, taken = take_units(scores, places, sizes, self._pool.members, num_units)
        ranked = scores.sort(dim=1, descending=True, stable=True)
        ends = sizes.gather(1, ranked.indices).long().cumsum(dim=1)
        at = torch.arange(num_units, device=query.device).expand(tokens.shape).contiguous()
        rank = torch.searchsorted(ends, at, right=True).clamp_max(scores.shape[1] - 1)
        out = scores.new_full((len(scores), num_units + 1), -1.0)
        tokens = torch.where(taken, tokens, num_units)
        return out.scatter_(1, tokens, ranked.values.gather(1, rank))[:, :num_units].contiguous()

    @property
    def score_is_replaced(self) -> bool:
        """Whether somebody laid another score over this one (selection streams)."""
        return "score" in vars(self)

    def rebuild_keys(self, rows: NDArray[np.int64], units: NDArray[np.int64]) -> None:
        """See `KeyIndex.rebuild_keys`; keys are as they were stored, the counter wants to know."""
        self._fetched_tokens += len(rows)

    @property
    def counters(self) -> LayerCounters:
        """What this layer has retrieved so far."""
        return LayerCounters(
            retrievals=tuple(self._retrievals.tolist()), reuse_steps=tuple(self._reuses.tolist()),
            segment_tokens=dict(sorted(self.boundaries.lengths.items())),
            fetched_bytes=self._fetched_tokens * self._token_bytes,
        )  # fmt: skip

    # Changes of shape -------------------------------------------------------------------------

    def _crop(self, length: int) -> None:
        """Forget the tokens at and after `length`."""
        for start, clustering in self._blocks.finish():
            self._pool.add_block(start, clustering)
        if self._blocks.count:
            self._blocks.count = max(0, min(self._blocks.count, length - self._blocks.start))
        self._pool.crop(length, self._sizes.cluster_tokens)
        self._end = length
        self.boundaries.forget()
        self._kept = None
        if length == 0:
            self.boundaries.lengths.clear()
            self._retrievals[:], self._reuses[:], self._fetched_tokens = 0, 0, 0

    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        """See `KeyIndex.take_rows_from`.

        Raises:
            CacheStateError: the two were sized differently.
        """
        assert isinstance(other, SemanticUnitsIndex)
        if self._pool.means.shape[1] != other._pool.means.shape[1]:
            raise CacheStateError(
                "the batch changed and units of the same size no longer fit the budget; set "
                "louiskv's cluster_tokens, or give more memory"
            )
        other._finish_prompt()
        sequences = (rows[:: self._rows_per_sequence] // self._rows_per_sequence).cpu().numpy()
        self._pool.take_rows_from(other._pool, rows)
        self.boundaries.take_rows_from(other.boundaries, rows)
        self._first_unit = other._first_unit[rows.cpu().numpy()]
        self._end, self._fetched_tokens = other._end, other._fetched_tokens
        self._retrievals, self._reuses = other._retrievals[sequences], other._reuses[sequences]
        kept, self._kept = other._kept, None
        if kept is not None:
            rows_np: NDArray[np.int64] = rows.cpu().numpy()
            valid = None if kept.valid is None else kept.valid[rows_np]
            self._kept = Selection(kept.unit_ids[rows_np], valid)
