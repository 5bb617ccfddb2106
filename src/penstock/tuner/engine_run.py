"""EngineRun: one setting's decode steps on this machine, counted by the engine itself.

Source: KVSwap (arXiv 2511.11907), appendix A.3, which times the core functions with NVTX; here the
engine's own counters say the same.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch

from penstock.core.ledger import MemoryReport
from penstock.core.slot_plan import SlotPlan
from penstock.core.stats import PhaseStats
from penstock.indexes.adapter import LowRankAdapter
from penstock.models.cache_adapter import TieredCache
from penstock.models.loader import CausalLM
from penstock.models.plain_model import share_weights, vocabulary_size
from penstock.policies.base import SelectionPolicy
from penstock.workloads.selection_streams import SelectionStream, streamed

WARM_STEPS = 4
STEPS = 6
"""Of a round."""
ROUNDS = 4
SLOW_STEP_S, SLOW_ROUND_S = 1.0, 5.0
"""A step that takes longer ends the warm-up; a round ends after so long."""


class Document(Protocol):
    """A past to decode behind."""

    def fill(
        self, cache: Any, tokens: int, progress: Callable[[float], None] = lambda share: None
    ) -> None:
        """Put `tokens` tokens into every layer of an empty cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workpiece:
    """What is decoded: a model, a past, and how many sequences of which length."""

    model: CausalLM
    adapter: LowRankAdapter | None
    document: Document
    batch: int
    context: int
    """Tokens of a sequence."""
    first_token: int = 1
    """Fed in the first step; the model's own choices follow."""
    new_tokens: int = 48
    """Room for decoded tokens."""
    stream: SelectionStream | None = None
    """Where selections come from; None: from the policy's own scores."""

    @property
    def max_tokens(self) -> int:
        """What a cache is planned for, per sequence."""
        return self.context + self.new_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """A decode step of all sequences and layers: medians over steps; seconds, bytes, counts."""

    step_s: float
    select_s: float
    """In prediction, ranking, the fetch plan and the submission of reads."""
    stall_s: float
    """Attention waiting for reads."""
    reads: float
    read_bytes: float
    units_wanted: float
    units_hit: float
    resident_bytes: int
    """As planned, and never passed."""
    fill_s: float
    """Putting the past in, once."""
    steps: int

    @property
    def block_s(self) -> float:
        """The model's own work and attention: neither ranking nor waiting."""
        return max(0.0, self.step_s - self.select_s - self.stall_s)

    @property
    def hit_rate(self) -> float:
        """Share of wanted units that were resident; 1 when none was wanted."""
        return self.units_hit / self.units_wanted if self.units_wanted else 1.0


class EngineRun:
    """A setting's cache, filled, decoding when it is told to; use it as a context manager.

    Settings that are compared are kept open together and take turns (`run_together`), so that a
    slow moment of the machine falls on all of them.
    """

    def __init__(
        self, work: Workpiece, policy: SelectionPolicy, *, store: str, limit_bytes: int | None
    ) -> None:
        """Make the cache and put the document in.

        Args:
            store: see `KVStore.create`; a simulated device takes the document without delay.
            limit_bytes: the KV budget of all sequences.

        Raises:
            BudgetError: the budget is too small for this setting.
            StorageError: the disk is full or cannot be used.
        """
        self._work = work
        self._model: Any = share_weights(work.model)  # hooks and attention of its own
        chosen = policy if work.stream is None else streamed(policy, work.stream)
        self._cache = TieredCache(
            self._model, chosen, memory=limit_bytes, store=store, max_tokens=work.max_tokens,
            batch_size=work.batch, adapter=work.adapter if policy.uses_adapter else None,
        )  # fmt: skip
        self._rounds: list[list[dict[str, float]]] = []
        try:
            start = time.perf_counter()
            work.document.fill(self._cache, work.context)
            self._fill_s = time.perf_counter() - start
            self._device = self._model.get_input_embeddings().weight.device
            self._position = work.context
            self._token = torch.full(
                (work.batch, 1), work.first_token, dtype=torch.int64, device=self._device
            )
            for _ in range(WARM_STEPS):
                if self._step()["step_s"] > SLOW_STEP_S:
                    break
        except BaseException:
            self.close()
            raise

    @property
    def policy(self) -> SelectionPolicy:
        """The policy with every open choice made."""
        return self._cache.policy

    @property
    def plan(self) -> SlotPlan:
        """How the memory is divided."""
        return self._cache.plan

    @property
    def memory(self) -> MemoryReport:
        """What the cache holds in fast memory."""
        return self._cache.report()

    def decode(self, steps: int) -> None:
        """One round: counted steps, fewer where a step takes seconds or the room ends."""
        room = self._work.max_tokens - self._position
        self._rounds.append([])
        for _ in range(min(steps, room)):
            self._rounds[-1].append(self._step())
            if sum(row["step_s"] for row in self._rounds[-1]) > SLOW_ROUND_S:
                break

    def figures(self) -> StepFigures:
        """Medians of the round whose median step is shortest."""
        rounds = [rows for rows in self._rounds if rows]
        medians = [
            {name: float(np.median([row[name] for row in rows])) for name in rows[0]}
            for rows in rounds
        ]
        best = min(medians, key=lambda middle: middle["step_s"])
        return StepFigures(
            step_s=best["step_s"], select_s=best["predict_s"], stall_s=best["stall_s"],
            reads=best["reads"], read_bytes=best["read_bytes"],
            units_wanted=best["units_wanted"], units_hit=best["units_hit"],
            resident_bytes=self.plan.total_bytes, fill_s=self._fill_s,
            steps=sum(len(rows) for rows in rounds),
        )  # fmt: skip

    def _step(self) -> dict[str, float]:
        """Decode a token of every sequence; what that took."""
        before, start = _counted(self._cache), time.perf_counter()
        position = torch.full((self._work.batch, 1), self._position, device=self._device)
        with torch.no_grad():
            out = self._model(
                self._token, past_key_values=self._cache, position_ids=position, use_cache=True
            )
        self._token = out.logits[:, -1:].argmax(-1) % vocabulary_size(self._model)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        self._position += 1
        after = _counted(self._cache)
        return {name: after[name] - before[name] for name in after} | {"step_s": took}

    def close(self) -> None:
        """Give everything back."""
        self._cache.close()

    def __enter__(self) -> "EngineRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_together(
    runs: Sequence[EngineRun], *, steps: int | None = None, rounds: int = ROUNDS
) -> list[StepFigures]:
    """Decode in turn, every second round backwards; the figures of each run.

    Args:
        steps: of a round; None: `STEPS`.
    """
    steps = STEPS if steps is None else steps
    for number in range(rounds):
        for run in runs if number % 2 == 0 else runs[::-1]:
            run.decode(steps)
    return [run.figures() for run in runs]


def _counted(cache: TieredCache) -> dict[str, float]:
    phase: PhaseStats = cache.stats.decode
    return asdict(phase)


def as_dict(figures: StepFigures) -> dict[str, Any]:
    """For JSON."""
    return {field.name: getattr(figures, field.name) for field in fields(figures)}
