"""NearIndex: ranks all tokens of a layer, hot ones here, cold ones where they lie (HillInfer)."""

import math
import time
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.engine.key_index import KeyIndex
from penstock.engine.tiers.rolling_window import RollingWindow
from penstock.engine.tiers.slot_table import ABSENT, SlotTable
from penstock.engine.tiers.token_pool import TokenPool
from penstock.kernels.pool_scores import key_logits, logit_sums, pool_logits
from penstock.methods.hillinfer.near_storage.channel import ScorerError
from penstock.methods.hillinfer.near_storage.scorer import Moved, Scorer
from penstock.methods.hillinfer.near_storage.settings import ScoreSettings
from penstock.methods.hillinfer.near_storage.shared_memory import MOST_NEW


class Places(NamedTuple):
    """What an index is shown of its layer."""

    scorer: Scorer
    layer: int
    pool: TokenPool
    table: SlotTable
    units: Callable[[], NDArray[np.int64]]
    """Where the units of all rows are, now. [rows, max_tokens]"""
    kept: RollingWindow | None = None
    """Sinks and window, where they are not in the pool."""


class Measured(NamedTuple):
    """What the last request took."""

    hot_tokens: int
    host_s: float
    cold_tokens: int
    device_s: float


class NearIndex(KeyIndex):
    """Column sums of attention (or sums of raw products) over hot and cold tokens.

    The hot tokens' keys are in the slots, which the pool of the layer holds anyway; so the index
    itself is a row of scores. Sinks and window count in the softmax and are not ranked.

    Source: HillInfer, sections 4.1 (importance) and 4.2 (HIE: broadcast, evaluated on both sides at
    once, score blocks merged as they come).
    """

    observes: ClassVar[bool] = False

    def __init__(self, settings: ScoreSettings) -> None:
        self.settings = settings
        rows, tokens = settings.rows, settings.max_tokens
        self.scores: NDArray[np.float32] = np.empty((rows, tokens), dtype=np.float32)
        """Importance of every token at the last step. [rows, max_tokens]"""
        self.measured: Measured | None = None
        self.leaving: tuple[NDArray[np.int64], NDArray[np.int64]] = (_NONE, _NONE)
        """Rows and tokens that leave the window with this step: hot, in no slot yet, and wanted."""
        self._places: Places | None = None
        self._first_unit = np.zeros(rows, dtype=np.int64)
        self._mapped = 0
        self._closed = 0
        self._promoted: list[NDArray[np.int64]] = []
        self._demoted: list[NDArray[np.int64]] = []
        self._generation = -1

    @staticmethod
    def num_bytes(rows: int, max_tokens: int) -> int:
        """Bytes of one layer's scores, for the ledger."""
        return 4 * rows * max_tokens

    @staticmethod
    def scratch_bytes(rows: int, query_heads: int, places: int, max_tokens: int) -> int:
        """Temporaries of one call: logits and shares of the pool, marks of who was scored."""
        return rows * (4 * (2 * query_heads + 2) * places + 10 * max_tokens)

    def attach(self, places: Places) -> None:
        """Show the index its layer."""
        self._places = places

    @override
    def begin_step(self, query: Tensor, first_unit: NDArray[np.int64], position: int) -> None:
        self._first_unit = first_unit

    # Taking tokens in -------------------------------------------------------------------------

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        """The scorer hears of it with the next request."""
        places = self._shown
        end = first_token + keys.shape[1]
        self._closed = end
        if places.scorer.wants_keys:
            raw = keys.contiguous().view(torch.uint8).flatten(2).cpu().numpy()
            units = places.units()[:, first_token:end]
            places.scorer.put(places.layer, units.reshape(-1), raw.reshape(units.size, -1))

    def forget_from(self, token: int) -> None:
        """The tokens from this one on are gone."""
        self._closed, self._mapped = min(self._closed, token), min(self._mapped, token)
        self._shown.scorer.forget_from(self._shown.layer, token)

    def slots_forgotten(self) -> None:
        """Everything is cold."""
        self._generation = -1
        self._promoted, self._demoted = [], []

    def moved(self, promoted: NDArray[np.int64], demoted: NDArray[np.int64]) -> None:
        """Tokens changed pools; the scorer hears of it with the next request.

        Args:
            promoted, demoted: as row * max_tokens + position. [count]
        """
        self._promoted.append(promoted)
        self._demoted.append(demoted)

    @property
    def _shown(self) -> Places:
        assert self._places is not None, "attach() comes first"
        return self._places

    def _take_moved(self) -> Moved:
        places = self._shown
        places.scorer.ensure_alive()
        # Looked at once: a device that a write finds dead starts again at any moment, and is told
        # everything by the next request.
        generation = places.scorer.generation
        first, units = self._mapped, None
        if self._mapped < self._closed:
            units = places.units()[:, self._mapped : self._closed]
            if units.shape[1] > MOST_NEW or self._generation != generation:
                places.scorer.map(places.layer, first, units)
                units, generation = None, places.scorer.generation
            self._mapped = self._closed
        rows, tokens = self.leaving
        leaving_ids = rows * self.settings.max_tokens + tokens
        # Sinks are in the pool, and padding nowhere: neither is cold.
        first = first if self._generation == generation else 0
        hidden = np.arange(first, max(first, self._mapped)) < self._first_unit[:, None]
        rows, tokens = hidden.nonzero()
        leaving_ids = np.concatenate(
            [leaving_ids, rows * self.settings.max_tokens + first + tokens]
        )
        if self._generation != generation:
            self._generation = generation
            in_rows, slots = (places.table.unit_in != ABSENT).nonzero()
            held = in_rows * self.settings.max_tokens + places.table.unit_in[in_rows, slots]
            moved = Moved(np.concatenate([held, leaving_ids]), _NONE, reset=True)
        else:
            promoted, demoted = [*self._promoted, leaving_ids], self._demoted or [_NONE]
            moved = Moved(
                np.concatenate(promoted), np.concatenate(demoted), first=first, units=units
            )
        self._promoted, self._demoted = [], []
        return moved

    # Ranking ----------------------------------------------------------------------------------

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """Score on both sides; again where a device failed and others have copies.

        Raises:
            ScorerError: a near-storage device died, hung, or did not score every cold token.
        """
        while True:
            try:
                return self._score(query, num_units)
            except ScorerError:
                if not self._shown.scorer.turn():
                    raise
                self.slots_forgotten()

    def _score(self, query: Tensor, num_units: int) -> Tensor:
        places, out = self._shown, self.scores
        moved = self._take_moved()
        at_host = query.float().cpu()
        scoring = places.scorer.begin(places.layer, at_host.numpy(), num_units, moved)
        out[:, :num_units] = np.nan
        begun = time.perf_counter()
        pool, kept, scaling = places.pool, places.kept, self.settings.scaling
        near = at_host if pool.memory.device.type == "cpu" else query
        if pool.shape.is_even:
            logits, log_sums = pool_logits(near, pool.tokens, pool.mask, scaling)
        else:
            logits, log_sums = key_logits(near, pool.keys, pool.mask, scaling)
        if kept is not None:
            seen = key_logits(query, kept.keys.transpose(1, 2), kept.mask, scaling)[1]
            log_sums = torch.logaddexp(log_sums, seen.to(log_sums.device))
        host_s = time.perf_counter() - begun
        normalisers = None
        if self.settings.rule == "attention":
            normalisers = np.logaddexp(log_sums.cpu().numpy(), scoring.log_sums())
        device_s = scoring.merge(normalisers, out[:, :num_units])
        begun = time.perf_counter()
        rows, slots = (places.table.unit_in != ABSENT).nonzero()
        held = places.table.unit_in[rows, slots]
        out[rows, held] = self._hot(logits, normalisers)[rows, slots]
        out[self.leaving] = math.inf
        end = min(num_units, int(self._first_unit.max()))
        hidden = np.arange(end) < self._first_unit[:, None]
        out[:, :end][hidden] = -math.inf
        host_s += time.perf_counter() - begun
        if np.isnan(out[:, :num_units]).any():
            raise ScorerError("a near-storage device left tokens without a score")
        hot = len(rows)
        cold = len(out) * num_units - int(hidden.sum()) - hot
        self.measured = Measured(hot, host_s, cold, device_s)
        return torch.from_numpy(out[:, :num_units])

    def _hot(self, logits: Tensor, normalisers: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Scores of all slots; minus infinity where nothing is visible. [rows, places]"""
        if normalisers is None:
            summed = logit_sums(logits, None).div_(self.settings.scaling)
        else:
            summed = logit_sums(logits, torch.from_numpy(normalisers).to(logits.device))
        found: NDArray[np.float32] = summed.cpu().numpy()
        return found

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        """Everything is mapped anew by the next request."""
        assert isinstance(other, NearIndex)
        self._closed, self._mapped = other._closed, 0
        self.scores[:] = other.scores[rows.cpu().numpy()]
        self.slots_forgotten()


_NONE = np.zeros(0, dtype=np.int64)
