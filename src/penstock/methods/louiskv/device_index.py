"""DeviceSemanticUnits: prompt clusters and output segments, kept on the device (LouisKV)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.errors import CacheStateError
from penstock.core.shape import KVShape
from penstock.engine.device_tier.device_index import SETTLE_STEPS, DeviceIndex, StepClock, Wanted
from penstock.kernels.device.boundaries import (
    Leaving,
    UnitSpread,
    UnitState,
    find_boundaries,
    grow_units,
)
from penstock.kernels.device.clusters import cluster_bytes, cluster_keys
from penstock.kernels.device.units import UnitScratch, Upkeep, score_units, select_tokens
from penstock.kernels.kmeans import FEWEST_ELEMENTS
from penstock.methods.louiskv.block_clusterer import ITERATIONS, num_clusters
from penstock.methods.louiskv.index import KEEP
from penstock.methods.louiskv.prompt_clusters import integer_dtype
from penstock.methods.louiskv.segment_runs import SegmentRuns, merge_rows
from penstock.methods.louiskv.unit_spread import add_clusters

ROW_ELEMENTS = 1 << 19
"""Of a row's share of a chunk's temporaries in k-means; a GPU wants more at a time than a CPU."""
POINTS_TOGETHER = 1 << 17
"""Keys of all rows that are clustered in the same launches, where a block of each row is no more:
enough to fill a GPU, and not so many that what the iterations keep grows with the prompt."""
SEED = 0
"""Of the tokens that k-means begins with."""
SPARE_UNITS = 2 * SETTLE_STEPS
"""Units beside those that tokens ask for: segments that begin between two calls of `settle`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUnitSizes:
    """How large one layer's units and tables are."""

    cluster_tokens: int
    """Tokens of a cluster on average."""
    block_tokens: int
    """Prompt tokens that are clustered together at most; never more than one forward pass."""
    spare_units: int
    """Units beyond one for every `cluster_tokens` tokens: room for short segments."""
    cosine: bool = False
    spread: bool = False
    """Whether units have their keys' spread beside the mean (`summary=mean+spread`)."""
    upkeep: bool = False
    """Whether it is known of each unit how much of it is selected (`lost_mass`)."""

    def elements(self, rows: int) -> int:
        """Elements of a chunk's temporaries in k-means, of one block of every row."""
        return min(ROW_ELEMENTS * rows, max(FEWEST_ELEMENTS, 8 * rows * self.block_tokens))

    def blocks_together(self, rows: int) -> int:
        """Blocks of every row that are clustered at once."""
        return max(1, POINTS_TOGETHER // (rows * self.block_tokens))

    def capacity(self, max_tokens: int) -> int:
        """Units of a row."""
        return -(-max_tokens // self.cluster_tokens) + self.spare_units + SPARE_UNITS


class DeviceSemanticUnits(DeviceIndex):
    """LouisKV's units as `SemanticUnitsIndex` has them, without a host in the decode loop.

    Source: LouisKV, sections 4.1 to 4.3, algorithm 1.

    Differences to the paper beyond those of the policy: what one forward pass of the prompt brings
    is clustered by itself (in blocks), while the pass goes on where there is a second stream, with
    fewer clusters where the pool of units is nearly full; a pass of so few tokens that they are one
    unit is a segment. Where the pool is full between two calls of `settle`, the open segment goes
    on. The mean of an open segment counts the step's own token.
    """

    def __init__(
        self, shape: KVShape, sizes: DeviceUnitSizes, *, rows: int, rows_per_sequence: int,
        max_tokens: int, wanted: int, tau: float, stride: int, every_step: bool,
        scaling: float, device: torch.device, lost_mass: float | None = None,
    ) -> None:  # fmt: skip
        """Allocate everything.

        Args:
            shape: of a row, one KV head.
            wanted: tokens of a selection.
            stride: a boundary every so many steps; 0: by `tau`.
            every_step: retrieve at every step; boundaries only cut segments.
            lost_mass: as in `SemanticUnitsIndex`; boundaries then only cut segments, too.
        """
        assert shape.num_kv_heads == 1, "one KV head a row"
        self._sizes, self._scaling = sizes, scaling
        self._tau, self._stride, self._every_step = tau, stride, every_step
        self._rows_per_sequence = rows_per_sequence
        sequences, dim = rows // rows_per_sequence, shape.head_dim
        capacity = sizes.capacity(max_tokens)
        self._capacity = capacity

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.means = zeros(rows, capacity, dim, dtype=shape.dtype)
        """Index vectors. [rows, capacity, head_dim]"""
        self.state = UnitState.allocate(rows, capacity, device)
        self.spread: UnitSpread | None = None
        if sizes.spread:
            self.spread = UnitSpread.allocate(rows, capacity, device)
        places = torch.arange(max_tokens, dtype=integer_dtype(max_tokens), device=device)
        self.members = places.repeat(rows, 1)
        """Positions, those of a unit side by side. [rows, max_tokens]"""
        self.unit_of = zeros(rows, max_tokens, dtype=integer_dtype(capacity))
        """Unit of each position. [rows, max_tokens]"""
        self._open_sum = zeros(rows, dim, dtype=torch.float32)
        self._previous = zeros(rows, shape.num_query_heads, dim, dtype=shape.dtype)
        self._known = zeros(sequences, dtype=torch.bool)
        self._last = zeros(sequences, dtype=torch.int64)
        self.boundary = zeros(sequences, dtype=torch.bool)
        """Whether this step is a semantic boundary. [sequences]"""
        self.counters = zeros(sequences, 3, dtype=torch.int64)
        """Steps, boundaries and retrievals of each sequence; see also `retrievals`.
        [sequences, 3]"""
        self._upkeep: Upkeep | None = None
        if lost_mass is not None:
            self._upkeep = Upkeep.allocate(
                rows, shape.num_query_heads, capacity, device, lost_mass=lost_mass, keep=KEEP
            )
            self.lse = self._upkeep.sums.attended
        self._scores = zeros(rows, capacity, dtype=torch.float32)
        self._wanted = Wanted(
            zeros(rows, wanted), zeros(rows, wanted, dtype=torch.bool),
            zeros(rows, dtype=torch.bool),
        )  # fmt: skip
        self._elements = sizes.elements(rows)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = _clustering_stream(device)
        self._units: int | None = 0
        """Units of every row, where the host knows it."""
        self._runs = SegmentRuns()

    @staticmethod
    def num_bytes(
        shape: KVShape, sizes: DeviceUnitSizes, *, rows: int, rows_per_sequence: int,
        max_tokens: int,
    ) -> int:  # fmt: skip
        """Bytes of one layer's units, for the ledger."""
        capacity, dim = sizes.capacity(max_tokens), shape.head_dim
        units = capacity * (dim * shape.dtype.itemsize + 4)  # index vectors and scores
        tables = max_tokens * (
            integer_dtype(max_tokens).itemsize + integer_dtype(capacity).itemsize
        )
        query = dim * (4 + shape.num_query_heads * shape.dtype.itemsize)
        counted = 34 * (rows // rows_per_sequence)
        if sizes.upkeep:
            counted += Upkeep.num_bytes(rows, shape.num_query_heads, capacity)
        if sizes.spread:
            counted += UnitSpread.num_bytes(rows, capacity)
        return rows * (units + tables + query) + UnitState.num_bytes(rows, capacity) + counted

    @staticmethod
    def scratch_bytes(shape: KVShape, sizes: DeviceUnitSizes, *, rows: int, max_tokens: int) -> int:
        """Temporaries of a block of the prompt or of a step, for the ledger."""
        block = min(sizes.block_tokens, max_tokens)
        blocks = min(sizes.blocks_together(rows), max_tokens // block)
        clusters = num_clusters(block, sizes.cluster_tokens)
        prompt = _order_bytes(block) * rows * blocks * block
        prompt += cluster_bytes(rows, blocks, block, clusters, shape.head_dim, sizes.elements(rows))
        heads, capacity = shape.num_query_heads, sizes.capacity(max_tokens)
        return max(prompt, UnitScratch.num_bytes(rows, heads, capacity))

    # Prompts ----------------------------------------------------------------------------------

    @override
    def take(self, keys: Tensor, first_token: int) -> None:
        """Block by block into clusters, beside the prefill on CUDA."""
        with self._on_stream(keys):
            self._take(keys[:, :, 0], first_token)

    @contextmanager
    def _on_stream(self, keys: Tensor) -> Iterator[None]:
        """Queue what follows on the stream of the clustering, behind all that was queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        keys.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def _join(self) -> None:
        """Queue what follows behind the clustering."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _take(self, flat: Tensor, first_token: int) -> None:
        """Cluster keys, [rows, tokens, head_dim]: some blocks at once, then what is left."""
        block = self._sizes.block_tokens
        done = flat.shape[1] // block * block
        step = block * self._sizes.blocks_together(len(flat))
        for start in range(0, done, step):
            part = flat[:, start : min(start + step, done)]
            self._add_blocks(part.view(len(flat), -1, block, flat.shape[2]), first_token + start)
        if done < flat.shape[1]:
            self._add_blocks(flat[:, done:].unsqueeze(1), first_token + done)
        self._forget_steps()
        self.state.open_tokens.zero_()

    def _forget_steps(self) -> None:
        """The next step is a first one, of which nothing is known."""
        self._known.zero_()
        self._forget_held()
        if self._upkeep is not None:
            self._upkeep.lost.zero_()
            self._upkeep.sums.forget()

    def _forget_held(self) -> None:
        """Every row gains by selecting anew, as far as is known."""
        if self._upkeep is not None:
            self._upkeep.current.zero_()

    @property
    def retrievals(self) -> Tensor:
        """Retrievals of each sequence; a step counts by the share of its rows that retrieved.
        float64 [sequences]"""
        if self._upkeep is None:
            return self.counters[:, 2].double()
        return self._upkeep.renewed.view(-1, self._rows_per_sequence).double().mean(dim=1)

    def _add_blocks(self, keys: Tensor, first: int) -> None:
        """Make units of consecutive tokens, at the same places in all rows.

        Args:
            keys: [rows, blocks, tokens of a block, head_dim]
        """
        rows, blocks, count, _ = keys.shape
        size = self._sizes
        clusters = num_clusters(count, size.cluster_tokens)
        base = self._make_room(first, blocks * clusters)
        clusters = max(1, min(clusters, (self._capacity - SETTLE_STEPS - base) // blocks))
        units = blocks * clusters
        if base + units >= self._capacity:  # a step's segment wants room too
            raise CacheStateError("the pool of units is full; give a larger max_tokens")
        places = slice(first, first + blocks * count)
        means, labels = cluster_keys(
            keys, clusters, iterations=ITERATIONS, cosine=size.cosine, seed=SEED,
            elements=self._elements,
        )  # fmt: skip
        self.means[:, base : base + units] = means.flatten(1, 2)
        if self.spread is not None:
            add_clusters(self.spread, keys, means, labels, base, self._elements)
        order = labels.argsort(dim=2, stable=True)
        starts = torch.arange(blocks, device=keys.device).unsqueeze(1)
        unit_of = labels.to(self.unit_of.dtype)
        unit_of += (starts * clusters + base).to(unit_of.dtype)
        self.unit_of[:, places] = unit_of.view(rows, -1)
        self.members[:, places] = order.add_(starts * count + first).view(rows, -1)
        # All sequences of a batch have the same number of units after a prompt; those that had
        # fewer have some that are empty. A single unit is a segment: its tokens follow each other.
        self._units = base + units
        if units > 1:
            self._runs.put_clusters(base, self._units)
        self.state.count.fill_(self._units)

    @override
    def begin_decode(self, length: int, clock: StepClock) -> None:
        """Count what may be selected of each unit."""
        self._join()
        state = self.state
        state.start.copy_(clock.first_unit)
        units = self.unit_of[:, :length].long()
        places = torch.arange(length, device=units.device)
        hidden = places < state.start[:, None]
        total = torch.zeros_like(state.sizes)
        before, taken = torch.zeros_like(total), torch.zeros_like(total)
        total.scatter_add_(1, units, torch.ones_like(units, dtype=torch.int32))
        before.scatter_add_(1, units, hidden.int())
        # What the first step has in its window counts when it leaves.
        end = max(0, length - clock.window_slots)
        taken.scatter_add_(1, units, (~hidden & (places < end)).int())
        state.first.copy_(total.cumsum(dim=1) - total + before)
        state.sizes.copy_(taken)
        self._units = None

    # Steps ------------------------------------------------------------------------------------

    @override
    def select(self, query: Tensor, clock: StepClock) -> Wanted:
        """Look for a boundary, and select anew where one is; or where that gains enough.

        A row that has no more tokens than may be selected selects them all at every step.
        """
        wanted, state, upkeep = self._wanted, self.state, self._upkeep
        find_boundaries(
            query, self._previous, self._known, self._last, wanted.due, self.boundary,
            clock.position, tau=self._tau, stride=self._stride, every=self._every_step,
            only_first=upkeep is not None, rows_per_sequence=self._rows_per_sequence,
            counters=self.counters,
            leaving=Leaving(
                self.unit_of, state, clock.left, clock.first_unit, clock.end_unit,
                wanted.ids.shape[1],
            ),
        )  # fmt: skip
        score_units(
            query, self.means, state.sizes, state.count, self._scaling,
            wanted.due if upkeep is None else None, self._scores,
            spread=None if self.spread is None else self.spread.halves,
            sums=None if upkeep is None else upkeep.sums,
        )  # fmt: skip
        select_tokens(
            self._scores, state.first, state.sizes, state.count, self.members, wanted.due,
            wanted.ids, wanted.valid, upkeep=upkeep,
        )  # fmt: skip
        return wanted

    @override
    def kept(self) -> Wanted:
        """The newest selection."""
        return self._wanted._replace(due=self._known.repeat_interleave(self._rows_per_sequence))

    @override
    def put(self, keys: Tensor, clock: StepClock) -> None:
        """The open segment goes on, or a new one begins."""
        grow_units(
            keys[:, 0, 0], self.boundary, self.means, self._open_sum, self.state, self.unit_of,
            clock.position, self._rows_per_sequence, self.spread,
        )  # fmt: skip

    @override
    def settle(self, length: int) -> None:
        """Merge neighbouring segments where units are running out."""
        self._make_room(length, SETTLE_STEPS)

    def _make_room(self, length: int, room: int) -> int:
        """Merge segments until `room` units and the usual spare ones are free, as far as it goes.

        Returns:
            Units of the row that has most.
        """
        state, wanted = self.state, max(room, SETTLE_STEPS) + SETTLE_STEPS
        used = int(state.count.max()) if self._units is None else self._units
        while used + wanted > self._capacity:
            for first in range(0, len(self.means), _MERGED_ROWS):
                rows = slice(first, first + _MERGED_ROWS)
                merge = self._runs.merge(state.count[rows], self._capacity)
                units = self.unit_of[:, :length]
                merge_rows(merge, self.means, state, self.spread, units, rows)
            self._runs.merged()
            self._forget_held()
            before, used = used, int(state.count.max())
            if used == before:
                break
        return used

    # Changes of shape -------------------------------------------------------------------------

    @override
    def crop(self, length: int) -> None:
        """A unit of which a part stays keeps its mean."""
        self._join()
        if length == 0:
            self.state.count.zero_()
            self.counters.zero_()
            if self._upkeep is not None:
                self._upkeep.renewed.zero_()
            self._units, self._runs = 0, SegmentRuns()
        else:
            units = self.unit_of[:, :length]
            self.state.count.copy_(units.amax(dim=1) + 1)
            order = units.long().argsort(dim=1, stable=True)
            self.members[:, :length] = order.to(self.members.dtype)
            self._units = None
            self._runs.crop(int(self.state.count.max()))
        dtype, end = self.members.dtype, self.members.shape[1]
        self.members[:, length:] = torch.arange(
            length, end, dtype=dtype, device=self.members.device
        )
        self.state.open_tokens.zero_()
        self._forget_steps()

    @override
    def take_rows_from(self, other: DeviceIndex, rows: Tensor) -> None:
        """Take rows from another of the same sizes.

        Raises:
            CacheStateError: the two were sized differently.
        """
        assert isinstance(other, DeviceSemanticUnits)
        if self.means.shape[1:] != other.means.shape[1:]:
            raise CacheStateError(
                "the batch changed and units of the same size no longer fit the budget; set "
                "louiskv's cluster_tokens, or give more memory"
            )
        self._join()
        sequences = rows[:: self._rows_per_sequence] // self._rows_per_sequence
        for name in ("means", "members", "unit_of", "_open_sum", "_previous"):
            getattr(self, name).copy_(getattr(other, name)[rows])
        if self.spread is not None and other.spread is not None:
            for name in ("halves", "open_square"):
                getattr(self.spread, name).copy_(getattr(other.spread, name)[rows])
        if self._upkeep is not None and other._upkeep is not None:
            for name in ("current", "renewed", "lost"):
                getattr(self._upkeep, name).copy_(getattr(other._upkeep, name)[rows])
            for name in ("attended", "before", "now"):
                sums = getattr(other._upkeep.sums, name)
                getattr(self._upkeep.sums, name).copy_(sums[rows])
        for name in ("_known", "_last", "boundary", "counters"):
            getattr(self, name).copy_(getattr(other, name)[sequences])
        for name in ("count", "open_tokens", "first", "sizes", "start"):
            getattr(self.state, name).copy_(getattr(other.state, name)[rows])
        for mine, theirs in zip(self._wanted, other._wanted, strict=True):
            mine.copy_(theirs[rows])
        self._units, self._runs = other._units, other._runs.copy()


@cache
def _clustering_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers and caches: prompts are clustered beside the prefill."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _order_bytes(block: int) -> int:
    """Of a key: its unit, its place in the order of its block's clusters, what the sort takes.

    torch sorts 4,096 numbers and fewer in place.
    """
    return 16 if block <= 4096 else 40


_MERGED_ROWS = 16
"""Rows whose segments are merged at a time; their index vectors are made float32."""
