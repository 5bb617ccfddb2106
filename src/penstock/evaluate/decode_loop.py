"""LiveRow: one row of the throughput table with its cache filled, decoding token by token."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.core.stats import PhaseStats
from penstock.engine.adapter import LowRankAdapter
from penstock.evaluate.process_memory import anonymous_bytes, cached_file_bytes, settle
from penstock.evaluate.throughput_rows import FLOOR_TOKENS, Row
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.plain_model import plain_cache, share_weights, vocabulary_size
from penstock.workloads.synthetic_kv import SyntheticKV

WARM_STEPS = 3
FLOOR_ROOM = 64
"""A floor's cache has room for so many tokens more than it begins with, or for its round."""
WARM_S = 5.0
"""Warm-up ends after this long; rows that take seconds a step have nothing to warm."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all rows of one run and batch share."""

    model: CausalLM
    adapter: LowRankAdapter
    document: SyntheticKV
    context: int
    batch: int
    memory: str
    new_tokens: int
    """Most tokens that a row will decode, warm-up counted."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        found: torch.device = self.model.get_input_embeddings().weight.device
        return found

    @property
    def max_tokens(self) -> int:
        """Tokens that a full-context cache must hold."""
        return self.context + self.new_tokens


@dataclass(kw_only=True)
class Measured:
    """Step times of one row and what its cache counted over exactly these steps."""

    rounds_s: list[list[float]] = field(default_factory=list)
    """Seconds of every step, round by round."""
    counters: dict[str, float] = field(default_factory=dict)
    """Sums of `PhaseStats` over the measured steps."""

    @property
    def steps_s(self) -> list[float]:
        """Seconds of every step."""
        return [seconds for steps in self.rounds_s for seconds in steps]


class LiveRow:
    """Builds a row's cache, fills it with the document, and decodes from it."""

    def __init__(
        self, row: Row, bench: Bench, store: str,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:  # fmt: skip
        """Build, fill and warm up.

        Args:
            store: of the cache, see `KVStore.create`.

        Raises:
            BudgetError: the budget is too small for this row.
            StorageError: the disk is full or cannot be used.
        """
        self.row = row
        self.bench = bench
        self.measured = Measured()
        self.last_s = 0.0  # of the newest step
        context = FLOOR_TOKENS if row.is_floor else bench.context
        # A copy of its own, so that hooks and attention of other rows stay away.
        self._model = share_weights(bench.model)
        settle()
        before = anonymous_bytes()
        self._store, self._context, self._floor_room = store, context, FLOOR_ROOM
        self.cache: Any = self._make_cache()
        try:
            self._fill(progress)
            began = time.perf_counter()
            for _ in range(WARM_STEPS):
                self._step()
                if time.perf_counter() - began > WARM_S and not row.is_resident:
                    break
        except BaseException:
            self.close()
            raise
        settle()
        self.growth_bytes = anonymous_bytes() - before
        self.file_cache_bytes = cached_file_bytes(self.cache) if self.is_tiered else 0

    @property
    def is_tiered(self) -> bool:
        """Whether the cache is ours."""
        return self.row.policy is not None

    def _fill(self, progress: Callable[[float], None] = lambda share: None) -> None:
        bench = self.bench
        self._position = self._context
        self._token = torch.ones((bench.batch, 1), dtype=torch.int64, device=bench.device)
        bench.document.fill(self.cache, self._context, progress, self._model)

    def _make_cache(self) -> Any:
        row, bench = self.row, self.bench
        max_tokens = self._context + (self._floor_room if row.is_floor else bench.new_tokens)
        if row.plain is not None:
            return plain_cache(self._model, row.plain, max_tokens)
        assert row.policy is not None
        return TieredCache(
            self._model, row.policy, memory=bench.memory if row.budget == "given" else None,
            store=self._store, max_tokens=max_tokens, batch_size=bench.batch,
            adapter=bench.adapter if row.policy.uses_adapter else None,
        )  # fmt: skip

    def _step(self) -> None:
        start = time.perf_counter()
        model: Any = self._model
        batch, device = self._token.shape[0], self._token.device
        position = torch.full((batch, 1), self._position, device=device)
        with torch.no_grad():
            out = model(
                self._token,
                **cache_argument(model, self.cache),
                position_ids=position,
                use_cache=True,
            )
        chosen: Tensor = out.logits[:, -1:].argmax(-1)
        self._token = chosen % vocabulary_size(self._model)
        self._position += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        self.last_s = time.perf_counter() - start

    def run_round(self, steps: int, most_s: float) -> None:
        """Decode one uncounted token, then `steps` counted ones, or fewer when `most_s` is up.

        A floor begins at its own length again, however many rounds it has.
        """
        began = time.perf_counter()
        if self.row.is_floor:
            self._floor_room = max(FLOOR_ROOM, steps + 2)
            self.cache = self._make_cache()
            self._fill()
        if self.last_s < 1.0:
            self._step()
        slow = False
        before = self._counters()
        times: list[float] = []
        while len(times) < (1 if slow else steps):
            self._step()
            times.append(self.last_s)
            slow = time.perf_counter() - began > most_s
        self.measured.rounds_s.append(times)
        for name, value in self._counters().items():
            total = self.measured.counters.get(name, 0.0)
            self.measured.counters[name] = total + value - before[name]

    def _counters(self) -> dict[str, float]:
        if not isinstance(self.cache, TieredCache):
            return {}
        phase: PhaseStats = self.cache.stats.decode
        return phase.as_dict()

    def close(self) -> None:
        """Give everything back."""
        if isinstance(self.cache, TieredCache):
            self.cache.close()
        self.cache = None
        settle()
