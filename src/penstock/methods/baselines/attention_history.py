"""AttentionHistoryIndex: keeps tokens that attention has valued and forgets the others for good."""

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.engine.key_index import KeyIndex
from penstock.kernels.scaled_query import scaled_down

CHUNK_TOKENS = 128
"""Keys that the prompt's queries are multiplied with at a time; bounds the scratch memory."""
LATER = 1 << 24
"""Positions below it are exact in float32; tokens ranked by position lie in [-LATER, 0)."""
PINNED = float(1 << 25)
"""The value of tokens that are kept before all others."""
DEAD = float("-inf")


class AttentionHistoryIndex(KeyIndex):
    """One value per token and row; the highest values are kept, and what is not kept is dead.

    Units are single tokens, rows are KV heads. The prompt is valued by the attention of its newest
    queries over all its keys, in two passes: `look` for the softmax's sums, `append` for the
    weights; padding in front of a row has no part in either. Afterwards `observe` learns from each
    step and marks as dead what was a candidate and was not selected.

    Tokens that come back by a crop are as dead as they were once they leave the window again; taken
    in anew, they live. Many tokens at once after the first selection (a second prompt) are valued
    as the first prompt was, by a new pass over everything; the dead stay dead.
    """

    observes: ClassVar[bool] = True
    looks_first: ClassVar[bool] = True
    num_prompt_queries: ClassVar[int] = 32

    def __init__(
        self, shape: KVShape, *, batch: int, max_units: int, scaling: float, device: torch.device,
        window_queries: int = 32,
    ) -> None:  # fmt: skip
        """Allocate the values.

        Args:
            shape: of a row, with one KV head.
            scaling: factor on logits.
            window_queries: newest queries of the prompt that value it.
        """
        assert shape.num_kv_heads == 1, "rows are KV heads"
        self._shape = shape
        self._scaling = scaling
        self._window_queries = window_queries
        self._values = torch.zeros(batch, max_units, device=device)
        self._queries: Tensor | None = None
        """While the prompt is being valued. [rows, heads, queries, head_dim]"""
        self._sums: Tensor | None = None
        """Log of each query's softmax sum so far, float32. [rows, heads * queries, 1]"""
        self._start: Tensor | None = None
        """First token of each row, where one has padding before it. int64 [rows]"""
        self._ready = self._filling = False
        self._end = self._clock = 0
        """Tokens taken in, now and when `score` was called."""
        self._known = 0
        """First token of the newest prompt."""
        self._prompt_end = 0
        self._entered = 0
        """Tokens from here on have not been candidates and have no history."""
        self._scored = 0
        """Units of the latest call of `score`."""

    @classmethod
    def num_bytes(cls, shape: KVShape, *, batch: int, max_units: int) -> int:
        """Bytes of one layer's values and prompt queries, for the ledger.

        The queries wait beside the index while the prompt streams in and are gone after it.
        """
        queries = cls.num_prompt_queries * shape.num_query_heads * shape.head_dim
        return batch * (4 * max_units + queries * shape.dtype.itemsize)

    @classmethod
    def scratch_bytes(cls, shape: KVShape, *, batch: int, max_units: int) -> int:
        """Temporaries of one call: copies and masks of the values, and a chunk's weights."""
        weights = shape.num_query_heads * cls.num_prompt_queries
        return batch * (12 * max_units + weights * (8 * min(CHUNK_TOKENS, max_units) + 8))

    @property
    def alive(self) -> Tensor:
        """False for the tokens that have been forgotten. bool [rows, units]"""
        return self._values != DEAD

    # The prompt -------------------------------------------------------------------------------

    @property
    @override
    def ready(self) -> bool:
        """Whether the newest prompt has been valued."""
        return self._ready

    @override
    def see_queries(self, queries: Tensor) -> None:
        self._queries = queries[:, :, -self._window_queries :]

    @override
    def see_start(self, first_unit: NDArray[np.int64]) -> None:
        start = torch.from_numpy(first_unit).to(self._values.device)
        self._start = start if first_unit.any() else None

    @override
    def fit(self, sample: Tensor, positions: Tensor) -> None:
        """Only the prompt's length is taken from the sample's positions."""
        self._ready = self._filling = True
        self._prompt_end = self._end = self._entered = int(positions[-1]) + 1
        self._begin(self._known, self._prompt_end)
        if self._queries is not None:
            self._queries = self._queries[:, :, -self._prompt_end :]
            rows, heads, count, _ = self._queries.shape
            size = (rows, heads * count, 1)
            self._sums = torch.full(size, DEAD, device=self._values.device)
            self._begin_votes()

    @override
    def look(self, keys: Tensor, first_token: int) -> None:
        if self._sums is None:
            return
        for start in range(0, keys.shape[1], CHUNK_TOKENS):
            logits = self._logits(keys[:, start : start + CHUNK_TOKENS], first_token + start)
            self._sums = torch.logaddexp(self._sums, logits.logsumexp(dim=2, keepdim=True))

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        end = first_token + keys.shape[1]
        if not self._filling or first_token >= self._prompt_end:
            self._take(first_token, end)
            return
        if self._queries is not None:
            for start in range(0, keys.shape[1], CHUNK_TOKENS):
                chunk = keys[:, start : start + CHUNK_TOKENS]
                self._vote(self._weights(chunk, first_token + start), first_token + start)
        if end >= self._prompt_end:
            self._end_prompt()
            self._filling, self._queries, self._sums = False, None, None

    def _take(self, first: int, end: int) -> None:
        """Take in decoded tokens, or the first ones of a later prompt."""
        self._filling, self._queries, self._sums = False, None, None
        self._end = end
        self._entered = min(self._entered, first)
        self._begin(first, end)
        if first == 0 or end - first > 1:
            self._ready, self._known = False, first

    def _logits(self, keys: Tensor, first_token: int) -> Tensor:
        """float32 [rows, heads * queries, tokens], minus infinity where a query comes earlier."""
        assert self._queries is not None
        queries, factor = scaled_down(self._queries.flatten(1, 2))
        logits = torch.matmul(queries, keys[:, :, 0].transpose(1, 2)).float()
        logits.mul_(self._scaling * factor)
        count = self._queries.shape[2]
        first_query = self._prompt_end - count
        if first_token + keys.shape[1] > first_query:
            tokens = torch.arange(keys.shape[1], device=keys.device) + first_token
            seen_by = torch.arange(count, device=keys.device) + first_query
            hidden = tokens > seen_by[:, None]
            logits.view(len(logits), -1, count, keys.shape[1]).masked_fill_(hidden, DEAD)
        if self._start is not None:
            tokens = torch.arange(keys.shape[1], device=keys.device) + first_token
            logits.masked_fill_((tokens < self._start[:, None])[:, None], DEAD)
        return logits

    def _weights(self, keys: Tensor, first_token: int) -> Tensor:
        """Shares of the softmax. float32 [rows, heads, queries, tokens]"""
        assert self._queries is not None
        assert self._sums is not None
        # What is padding itself has seen nothing.
        sums = self._sums.masked_fill(self._sums == DEAD, 0.0)
        weights = self._logits(keys, first_token).sub_(sums).exp_()
        return weights.view(*self._queries.shape[:3], -1)

    # What the methods differ in ---------------------------------------------------------------

    @abstractmethod
    def _begin(self, first: int, end: int) -> None:
        """Give tokens without a history their values; they live."""

    def _begin_votes(self) -> None:
        """The newest prompt is about to be voted on."""

    @abstractmethod
    def _vote(self, weights: Tensor, first_token: int) -> None:
        """Value some of the prompt's tokens.

        Args:
            weights: shares of the softmax. float32 [rows, heads, queries, tokens]
        """

    def _end_prompt(self) -> None:
        """All of the prompt has been seen, with queries (`_queries`) or without."""

    def _enter(self, first: int, end: int) -> None:
        """Tokens have left the window and are candidates for the first time."""

    def _learn(self, ids: Tensor, valid: Tensor, weights: Tensor) -> None:
        """Learn from the attention of one step; all [rows, wanted], weights zero if not valid."""

    # Steps ------------------------------------------------------------------------------------

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """The query plays no part. Minus infinity for the dead."""
        if num_units > self._entered:
            self._enter(self._entered, num_units)
            self._entered = num_units
        self._scored, self._clock = num_units, self._end
        return self._values[:, :num_units].clone()

    @override
    def observe(self, selection: Selection, weights: Tensor) -> None:
        """What was scored and not selected is dead."""
        device = self._values.device
        ids = torch.from_numpy(selection.unit_ids).to(device)
        valid = torch.ones_like(ids, dtype=torch.bool)
        if selection.valid is not None:
            valid = torch.from_numpy(selection.valid).to(device)
        candidates = self._values[:, : self._scored]
        kept = torch.zeros(candidates.shape, dtype=torch.bool, device=device)
        candidates.masked_fill_(~kept.scatter_(1, ids, valid), DEAD)
        self._learn(ids, valid, weights.float().masked_fill(~valid, 0.0))

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, AttentionHistoryIndex)
        self._values.copy_(other._values[rows])
        self._queries = None if other._queries is None else other._queries[rows]
        self._sums = None if other._sums is None else other._sums[rows]
        self._ready, self._filling = other._ready, other._filling
        self._end, self._clock, self._scored = other._end, other._clock, other._scored
        self._known, self._prompt_end = other._known, other._prompt_end
        self._entered = other._entered
        self._start = None if other._start is None else other._start[rows]


class ObservationVotes(AttentionHistoryIndex):
    """Values the prompt once, by its last queries; later tokens rank below it, the newest first.

    Source: SnapKV (arXiv 2404.14469), section 4: the attention of an observation window, added and
    pooled so that neighbours of an important token are kept with it.
    """

    def __init__(
        self, shape: KVShape, *, batch: int, max_units: int, scaling: float, device: torch.device,
        window_queries: int = 32, kernel_tokens: int = 7,
    ) -> None:  # fmt: skip
        """Allocate the values; arguments as in `AttentionHistoryIndex`.

        Args:
            kernel_tokens: width of the average pooling, odd.
        """
        super().__init__(
            shape, batch=batch, max_units=max_units, scaling=scaling, device=device,
            window_queries=window_queries,
        )  # fmt: skip
        self._kernel_tokens = kernel_tokens

    @override
    def _begin(self, first: int, end: int) -> None:
        positions = torch.arange(first, end, device=self._values.device, dtype=torch.float32)
        self._values[:, first:end] = positions - LATER

    @override
    def _begin_votes(self) -> None:
        prompt = self._values[:, : self._prompt_end]
        prompt.masked_fill_(prompt != DEAD, 0.0)

    @override
    def _vote(self, weights: Tensor, first_token: int) -> None:
        self._values[:, first_token : first_token + weights.shape[3]] += weights.sum(dim=(1, 2))

    @override
    def _end_prompt(self) -> None:
        if self._queries is None:
            return
        start = self._prompt_end - self._queries.shape[2]
        if start > 0:
            votes = self._values[:, :start]
            dead = votes == DEAD
            width = self._kernel_tokens
            pooled = torch.nn.functional.avg_pool1d(
                votes.masked_fill(dead, 0.0)[:, None], width, stride=1, padding=width // 2
            )[:, 0]
            votes.copy_(pooled.masked_fill_(dead, DEAD))
        window = self._values[:, start : self._prompt_end]
        window.masked_fill_(window != DEAD, PINNED)


class HeavyHitters(AttentionHistoryIndex):
    """Values a token by the attention that it has received so far, all of it added.

    Source: H2O (arXiv 2306.14048), section 4, Algorithm 1.
    """

    @override
    def _begin(self, first: int, end: int) -> None:
        positions = torch.arange(first, end, device=self._values.device, dtype=torch.float32)
        self._values[:, first:end] = (positions - LATER) / LATER

    @override
    def _begin_votes(self) -> None:
        self._values[:, self._known : self._prompt_end] = 0.0

    @override
    def _vote(self, weights: Tensor, first_token: int) -> None:
        self._values[:, first_token : first_token + weights.shape[3]] += weights.sum(dim=(1, 2))

    @override
    def _enter(self, first: int, end: int) -> None:
        """Enter just above the least of the kept ones: a newcomer is tried against the weakest."""
        least = torch.zeros(len(self._values), device=self._values.device)
        if first > 0:
            kept = self._values[:, :first]
            least = kept.masked_fill(kept == DEAD, math.inf).amin(dim=1)
            least.masked_fill_(least == math.inf, 0.0)
        above = torch.nextafter(least, torch.full_like(least, math.inf))
        self._values[:, first:end] = above[:, None]

    @override
    def _learn(self, ids: Tensor, valid: Tensor, weights: Tensor) -> None:
        self._values.scatter_add_(1, ids, weights)


class TimeStamps(AttentionHistoryIndex):
    """Values a token by the last step at which it was attended to.

    Source: RaaS (arXiv 2502.11147), section 3: weights above a threshold renew a token's time
    stamp, and the oldest stamp goes. A stamp is the position of the query; equal stamps are ordered
    by the weight that renewed them, as a fraction of a step.
    """

    def __init__(
        self, shape: KVShape, *, batch: int, max_units: int, scaling: float, device: torch.device,
        selected_units: int, window_queries: int = 32, threshold: float = 1e-4,
    ) -> None:  # fmt: skip
        """Allocate the values; arguments as in `AttentionHistoryIndex`.

        Args:
            selected_units: tokens of a selection; prompts that fit in it are never forgotten.
            threshold: least weight, of the mean over query heads, that renews a stamp; below 1.
        """
        super().__init__(
            shape, batch=batch, max_units=max_units, scaling=scaling, device=device,
            window_queries=window_queries,
        )  # fmt: skip
        self._selected_units = selected_units
        self._threshold = threshold
        self._pinned = 0

    @override
    def _begin(self, first: int, end: int) -> None:
        positions = torch.arange(first, end, device=self._values.device, dtype=torch.float32)
        self._values[:, first:end] = positions

    def _stamps(self, shares: Tensor, steps: Tensor | int) -> Tensor:
        """Stamp of each share of the softmax; minus infinity where it is below the threshold."""
        rank = 1.0 - shares.log() / math.log(self._threshold)
        below = shares < self._threshold
        return rank.clamp_(0.0, 0.99).add_(steps).masked_fill_(below, DEAD)

    @override
    def _vote(self, weights: Tensor, first_token: int) -> None:
        count, tokens = weights.shape[2:]
        steps = torch.arange(count, device=weights.device)[:, None] + self._prompt_end - count
        stamps = self._stamps(weights.mean(dim=1), steps).amax(dim=1)
        values = self._values[:, first_token : first_token + tokens]
        values.copy_(torch.maximum(values, stamps).masked_fill_(values == DEAD, DEAD))

    @override
    def _end_prompt(self) -> None:
        if self._known == 0:
            self._pinned = 0
        size = self._prompt_end - self._known
        if self._pinned + size <= self._selected_units:
            self._values[:, self._known : self._prompt_end] = PINNED
            self._pinned += size

    @override
    def _enter(self, first: int, end: int) -> None:
        """The window counts as attended to: a token leaves it with the stamp of this step."""
        self._values[:, first:end] = self._end

    @override
    def _learn(self, ids: Tensor, valid: Tensor, weights: Tensor) -> None:
        stamps = self._stamps(weights / self._shape.num_query_heads, self._clock)
        self._values.scatter_(1, ids, torch.maximum(self._values.gather(1, ids), stamps))

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, TimeStamps)
        super().take_rows_from(other, rows)
        self._pinned = other._pinned
