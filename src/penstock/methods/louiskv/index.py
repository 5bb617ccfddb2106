"""SemanticUnitsIndex: prompt clusters and output segments in one pool of units (LouisKV)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.errors import CacheStateError
from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.engine.key_index import KeyIndex
from penstock.kernels.kmeans import chunk_elements
from penstock.kernels.unit_selection import (
    CHUNK_UNITS,
    renew_units,
    take_units,
    taken_tokens,
    unit_scores,
    unit_weights,
)
from penstock.methods.louiskv.block_clusterer import BlockClusterer
from penstock.methods.louiskv.prompt_clusters import integer_dtype
from penstock.methods.louiskv.semantic_boundaries import SemanticBoundaries
from penstock.methods.louiskv.unit_pool import UnitPool

SPARE_UNITS = 8
"""Units of a pool beside one for every `cluster_tokens` tokens and those that are asked for."""

KEEP = 2.0
"""How much better an unheld unit's score has to be than a held one's to take its place, where
`lost_mass` decides: half of what is read for hardly any attention
(research/notes/2026-11-26-louiskv-trigger.md)."""

StepObserver = Callable[[int, NDArray[np.bool_], NDArray[np.float64]], None]
"""From a step's position, whether it is a boundary, and which share of its rows retrieves.
[sequences]"""


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
    squares: bool = False
    """Units have the mean squared length of their keys beside the mean key, and are weighed by it
    too (`unit_scores`)."""
    upkeep: bool = False
    """It is known of each unit how much of it is selected."""
    beside: bool = True
    """Prompts are clustered while they are taken in; otherwise when the first step wants it."""

    def capacity(self, max_tokens: int) -> int:
        """Units of the pool."""
        return -(-max_tokens // self.cluster_tokens) + self.spare_units + SPARE_UNITS

    def elements(self, rows: int) -> int:
        """Elements of a chunk's temporaries in k-means."""
        return chunk_elements(8 * rows * self.block_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCounters:
    """What one layer has retrieved so far."""

    retrievals: tuple[float, ...]
    """Steps that retrieved, per sequence; a step counts by the share of its rows that did."""
    reuse_steps: tuple[float, ...]
    """Steps that attended to the retrieved set as it was, per sequence, alike."""
    segment_tokens: dict[int, int]
    """Segments of all sequences by their length in tokens, the open ones as they are by now."""
    fetched_bytes: int
    """KV that was moved into slots, padding of the store's sectors aside."""


class SemanticUnitsIndex(KeyIndex):
    """Ranks clusters of prompt tokens and segments of generated ones by their mean keys.

    Source: LouisKV, sections 4.1 and 4.2, algorithm 1. Tokens that come with a decode step's query
    are generated; all others are a prompt's. They are clustered block by block: either on a thread
    while the prompt is still being taken in, and the last, unfinished block when the first step
    wants it; or all then (`UnitSizes.beside`), from the store and with one layer's keys in memory,
    and again with all that came between when another prompt follows. Fewer than twice
    `cluster_tokens` of them are one unit as they stand. One KV head a row; all rows of a sequence
    share its boundaries.
    """

    def __init__(
        self, shape: KVShape, sizes: UnitSizes, boundaries: SemanticBoundaries, *, batch: int,
        max_tokens: int, rows_per_sequence: int, scaling: float, every_step: bool,
        device: torch.device, lost_mass: float | None = None,
    ) -> None:  # fmt: skip
        """Allocate the pool of units.

        Args:
            every_step: retrieve at every step; boundaries only cut segments.
            lost_mass: a row retrieves where what it has is estimated to have lost more than this
                share of its attention against new selections; None: all rows do at boundaries.
        """
        assert shape.num_kv_heads == 1, "one KV head a row"
        self._sizes, self._scaling, self._every_step = sizes, scaling, every_step
        self._rows_per_sequence, self._token_bytes = rows_per_sequence, shape.token_bytes
        self.boundaries = boundaries
        self._pool = UnitPool(
            shape, rows=batch, rows_per_sequence=rows_per_sequence,
            capacity=sizes.capacity(max_tokens), max_tokens=max_tokens, device=device,
            squares=sizes.squares,
        )  # fmt: skip
        self._blocks = BlockClusterer(
            self._pool.means, rows=batch, block_tokens=sizes.block_tokens,
            cluster_tokens=sizes.cluster_tokens, cosine=sizes.cosine,
            elements=sizes.elements(batch), threaded=sizes.beside, squares=sizes.squares,
        )  # fmt: skip
        self._ready = self._always_ready = sizes.beside or sizes.pages
        self._fitting = False
        self._lost_mass = lost_mass
        self._held: Tensor | None = None
        self._held_numbers = -1
        if lost_mass is not None:
            size = (batch, shape.num_query_heads)
            self.lse = torch.full(size, -torch.inf, dtype=torch.float32, device=device)
            self._units_lse = torch.zeros(size, dtype=torch.float32, device=device)
            self._lost = torch.zeros(batch, dtype=torch.float32, device=device)
        self._end = 0
        self._kept: Selection | None = None
        self._first_unit = np.zeros(batch, dtype=np.int64)
        self._boundary = np.zeros(batch // rows_per_sequence, dtype=np.bool_)
        self._asked_before = False
        self._renewed = np.zeros(batch, dtype=np.bool_)
        self._retrievals = np.zeros(batch // rows_per_sequence, dtype=np.float64)
        self._reuses = np.zeros_like(self._retrievals)
        self._fetched_tokens = 0
        self.observer: StepObserver | None = None
        """Called with every step that selects (benchmarks)."""

    @staticmethod
    def num_bytes(
        shape: KVShape, sizes: UnitSizes, *, batch: int, max_tokens: int, rows_per_sequence: int
    ) -> int:
        """Bytes of one layer's pool of units and of what makes it, for the ledger."""
        pool = UnitPool.num_bytes(
            shape, rows=batch, rows_per_sequence=rows_per_sequence,
            capacity=sizes.capacity(max_tokens), max_tokens=max_tokens, squares=sizes.squares,
        )  # fmt: skip
        blocks = _block_bytes(shape, sizes, batch) if sizes.beside else 0
        if sizes.upkeep:
            pool += 4 * batch * (sizes.capacity(max_tokens) + 2 * shape.num_query_heads + 1)
        return pool + blocks + SemanticBoundaries.num_bytes(shape, batch)

    @staticmethod
    def scratch_bytes(shape: KVShape, sizes: UnitSizes, *, batch: int, max_tokens: int) -> int:
        """Temporaries of one retrieval, or of the tables of one block, for the ledger."""
        capacity = sizes.capacity(max_tokens)
        chunk = min(capacity, CHUNK_UNITS) * shape.head_dim * (4 + shape.dtype.itemsize)
        chunk *= 1 + sizes.squares
        each = 8 * shape.num_query_heads + 48
        if sizes.upkeep:
            each += 4 * shape.num_query_heads + 32
        scores = capacity * each + chunk
        # A subset of rows copies its part of the table of members.
        members = max_tokens * integer_dtype(max_tokens).itemsize
        blocks = 0 if sizes.beside else _block_bytes(shape, sizes, batch)
        # Merging and moving segments is done row by row.
        merging = 12 * capacity * shape.head_dim
        labels = 48 * batch * sizes.block_tokens
        return max(batch * (scores + members), blocks + labels, merging)

    # Keys -------------------------------------------------------------------------------------

    @property
    @override
    def ready(self) -> bool:
        return self._ready

    @override
    def fit(self, sample: Tensor, positions: Tensor) -> None:
        """All keys come next, to be clustered before the step that waits."""
        if self._end:
            self._crop(0)
        self._ready = self._fitting = True

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        """Units of the engine are single tokens here."""
        if first_token < self._end:
            self._crop(first_token)
            if first_token == 0:
                self._clear_counters()
        flat = keys[:, :, 0]
        generated = flat.shape[1] == 1 and first_token == self.boundaries.position
        if not (generated or self._always_ready or self._fitting):
            # Another prompt: everything is clustered when its first step wants it.
            self._ready = False
            return
        self._end = first_token + flat.shape[1]
        if self._sizes.pages:
            self._take_pages(flat, first_token)
        elif generated:
            self._pool.grow(flat, first_token)
        else:
            self._take_prompt(flat, first_token)
        if not generated:
            # What was retrieved before a new prompt says nothing about it.
            self._forget_steps()

    def _forget_steps(self) -> None:
        """The next step is a first one, of which nothing is known."""
        self.boundaries.forget()
        self._kept = self._held = None
        if self.lse is not None:
            self.lse.fill_(-torch.inf)
            self._units_lse.zero_()
            self._lost.zero_()

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
        count, start = self._blocks.count, self._blocks.start
        if count >= 2 * self._sizes.cluster_tokens:
            self._pool.add_block(start, self._blocks.cluster(self._blocks.waiting))
        elif count:
            self._pool.cut_all(start)
            self._pool.grow(self._blocks.waiting, start)
        self._blocks.release()
        self._fitting = False

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

    @override
    def begin_step(self, query: Tensor, first_unit: NDArray[np.int64], position: int) -> None:
        """Look for a boundary, and cut the segments where one is.

        Args:
            query: the true query. [rows, heads of a row, head_dim]
            first_unit, position: see `KeyIndex.begin_step`.
        """
        if position < self._end:
            self._crop(position)
        self._finish_prompt()
        self._first_unit = first_unit
        self._asked_before = self.boundaries.position == position
        self._boundary = self.boundaries.decide(query, position)
        if not self._asked_before and not self._sizes.pages and self._boundary.any():
            self._pool.cut(self._boundary, position)

    def retrieve(
        self, query: Tensor, first_unit: NDArray[np.int64], end_unit: int, wanted: int
    ) -> Selection:
        """Units for the step begun: anew where it is due, the same ones as before everywhere else.

        Where a row has no more tokens than may be selected, it selects them all.

        Args:
            query: the true query. [rows, heads of a row, head_dim]
            first_unit, end_unit, wanted: see `SelectionPolicy.select`.
        """
        boundary, asked_before = self._boundary, self._asked_before
        available = end_unit - first_unit
        if self._kept is not None and self._kept.unit_ids.shape[1] != wanted:
            self._kept = self._held = None
        if (available <= wanted).all():
            self._kept = self._held = None
            ids = np.arange(first_unit.min(), end_unit)
            ids = np.broadcast_to(ids, (len(first_unit), len(ids))).copy()
            return Selection(ids, ids >= first_unit[:, None])
        first, anew = self._kept is None, self._kept is None or not asked_before
        due = (boundary | self._every_step | first).repeat(self._rows_per_sequence)
        rows = due | (available <= wanted)
        if self._lost_mass is not None:
            if anew:
                rows = (available <= wanted) | first
                rows = self._renew_where_due(query, rows, end_unit, wanted, self._lost_mass)
                self._renewed = rows
            due = rows = self._renewed
        elif rows.any() and anew:
            self._kept = self._renew(query, rows, end_unit, wanted)
        if not asked_before:
            share = due.reshape(-1, self._rows_per_sequence).mean(axis=1)
            self._retrievals += share
            self._reuses += 1 - share
            if self.observer is not None:
                self.observer(self.boundaries.position, boundary, share)
        assert self._kept is not None
        return replace(self._kept, reused=~rows)

    def _renew_where_due(
        self, query: Tensor, rows: NDArray[np.bool_], end_unit: int, wanted: int, lost_mass: float
    ) -> NDArray[np.bool_]:
        """Score all rows, and select for those that are due or have lost too much.

        Args:
            rows: those that are due. [rows]

        Returns:
            The rows that have selected. [rows]
        """
        pool = self._pool
        places, sizes = pool.units(self._first_unit, end_unit)
        scores = unit_scores(
            query, pool.means, sizes, self._scaling, squares=pool.squares,
            weights=self._weights, sums=self._units_lse,
        )  # fmt: skip
        held = self._held_of(sizes)
        renewal = renew_units(scores, sizes, held, wanted, KEEP)
        self._lost += renewal.gain.clamp_min(0.0)
        rows = rows | (self._lost > lost_mass).cpu().numpy()
        which = torch.from_numpy(rows.nonzero()[0]).to(query.device)
        if len(which):
            taken = renewal.taken[which]
            tokens, _ = taken_tokens(taken, places[which], pool.members[which], wanted)
            held[which], self._lost[which] = taken.to(held.dtype), 0.0
            self._kept = self._with_rows(tokens, rows, end_unit, wanted)
        self._held, self._held_numbers = held, pool.renumbered
        return rows

    @property
    def _weights(self) -> Tensor | None:
        """What each head had on units in the step before; None where that does not matter."""
        return None if self.lse is None else unit_weights(self._units_lse, self.lse)

    def _held_of(self, sizes: Tensor) -> Tensor:
        """Tokens of each unit that are selected; none where units have other numbers by now, so
        that every row gains by selecting. int32, like `sizes`"""
        held = torch.zeros_like(sizes, dtype=torch.int32)
        if self._held is not None and self._held_numbers == self._pool.renumbered:
            held[:, : self._held.shape[1]] = self._held
        return held

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
        scores = unit_scores(
            query, self._pool.means, sizes, self._scaling, which, squares=self._pool.squares
        )
        tokens, _ = take_units(scores, places, sizes, members, wanted)
        return self._with_rows(tokens, rows, end_unit, wanted)

    def _with_rows(
        self, tokens: Tensor, rows: NDArray[np.bool_], end_unit: int, wanted: int
    ) -> Selection:
        """What is kept with some rows' tokens, [rows that are true, wanted], in place of theirs."""
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

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """A token is as important as its unit; minus one where it may not be
        selected. `retrieve` does not need it: it is for who ranks single tokens."""
        self._finish_prompt()
        places, sizes = self._pool.units(self._first_unit, num_units)
        scores = unit_scores(
            query, self._pool.means, sizes, self._scaling, squares=self._pool.squares,
            weights=self._weights,
        )  # fmt: skip
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
        """Whether another score lies over this one (selection streams)."""
        return "score" in vars(self)

    @override
    def rebuild_keys(self, rows: NDArray[np.int64], units: NDArray[np.int64]) -> None:
        """Keys are as they were stored, the counter wants to know."""
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
        self._blocks.forget_from(length)
        for start, clustering in self._blocks.finish():
            self._pool.add_block(start, clustering)
        self._pool.crop(length, self._sizes.cluster_tokens)
        self._end = length
        self._forget_steps()

    @override
    def close(self) -> None:
        """No thread outlives the memory that was booked for it."""
        self._blocks.forget_from(0)

    def _clear_counters(self) -> None:
        self.boundaries.clear_counters()
        self._retrievals[:], self._reuses[:], self._fetched_tokens = 0, 0, 0

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        """Take rows from another of the same sizes.

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
        self._ready, self._fitting = other._ready, other._fitting
        self._end, self._fetched_tokens = other._end, other._fetched_tokens
        self._retrievals, self._reuses = other._retrievals[sequences], other._reuses[sequences]
        self._held = None
        if self.lse is not None and other.lse is not None:
            self.lse.copy_(other.lse[rows])
            self._units_lse.copy_(other._units_lse[rows])
            self._lost.copy_(other._lost[rows])
        kept, self._kept = other._kept, None
        if kept is not None:
            rows_np: NDArray[np.int64] = rows.cpu().numpy()
            valid = None if kept.valid is None else kept.valid[rows_np]
            self._kept = Selection(kept.unit_ids[rows_np], valid)


def _block_bytes(shape: KVShape, sizes: UnitSizes, rows: int) -> int:
    """Keys that wait to be clustered, and what clustering them takes."""
    return BlockClusterer.num_bytes(
        rows=rows, block_tokens=sizes.block_tokens, cluster_tokens=sizes.cluster_tokens,
        head_dim=shape.head_dim, itemsize=shape.dtype.itemsize, elements=sizes.elements(rows),
        threaded=sizes.beside, squares=sizes.squares,
    )  # fmt: skip
