"""EngineRun: one setting's decode steps on this machine, counted by the engine itself.

Source: KVSwap (arXiv 2511.11907), appendix A.3, which times the core functions with NVTX; here the
engine's own counters say the same. The paper's boards were idle; here every round is timed beside
`Pace`, and what is compared is told at one pace.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from penstock.core.ledger import MemoryReport
from penstock.core.slot_plan import SlotPlan
from penstock.core.stats import PhaseStats
from penstock.engine.adapter import LowRankAdapter
from penstock.engine.policy import SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.plain_model import share_weights, vocabulary_size
from penstock.models.weight_access import model_device
from penstock.tuner.pace import Pace
from penstock.workloads.selection_streams import SelectionStream, streamed

WARM_STEPS = 4
STEPS = 6
"""Of a round."""
ROUNDS = 4
ANSWER_TOKENS = 48
"""Room for decoded tokens, where a run does not need more."""
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
    new_tokens: int = ANSWER_TOKENS
    """Room for decoded tokens: a run ends there, whatever it is told (`room_for`)."""
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
    pace_s: float = 0.0
    """`Pace` at which these are the times; 0: not measured."""
    clock_step_s: float = 0.0
    """`step_s` as the clock had it, whatever the pace was; 0: not measured."""

    def at(self, pace_s: float) -> "StepFigures":
        """The same at another pace: all but the wait for reads goes by it.

        What is waited for is left as it is: a device does not slow down with the cores. Nothing
        changes where either pace is unknown.
        """
        if not pace_s or not self.pace_s:
            return self
        share = pace_s / self.pace_s
        return replace(
            self, step_s=_at(self.step_s, self.stall_s, share), select_s=share * self.select_s,
            pace_s=pace_s,
        )  # fmt: skip

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
        self._pace = Pace(work.model)
        self._paces: list[float] = []
        """Beside each round, in seconds."""
        try:
            start = time.perf_counter()
            work.document.fill(self._cache, work.context)
            self._fill_s = time.perf_counter() - start
            self._device = model_device(self._model)
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
        before = self._pace()
        for _ in range(min(steps, room)):
            self._rounds[-1].append(self._step())
            if sum(row["step_s"] for row in self._rounds[-1]) > SLOW_ROUND_S:
                break
        self._paces.append((before + self._pace()) / 2)

    def figures(self) -> StepFigures:
        """Medians over all steps, each told at the middle one of the rounds' paces."""
        pace_s = float(np.median(self._paces))
        steps = [
            _step_at(row, pace_s / pace)
            for rows, pace in zip(self._rounds, self._paces, strict=True) for row in rows
        ]  # fmt: skip
        clock = [row["step_s"] for rows in self._rounds for row in rows]
        middle = {name: float(np.median([step[name] for step in steps])) for name in steps[0]}
        return StepFigures(
            step_s=middle["step_s"], select_s=middle["predict_s"], stall_s=middle["stall_s"],
            reads=middle["reads"], read_bytes=middle["read_bytes"],
            units_wanted=middle["units_wanted"], units_hit=middle["units_hit"],
            resident_bytes=self.plan.total_bytes, fill_s=self._fill_s, steps=len(steps),
            pace_s=pace_s, clock_step_s=float(np.median(clock)),
        )  # fmt: skip

    def _step(self) -> dict[str, float]:
        """Decode a token of every sequence; what that took."""
        before, start = _counted(self._cache), time.perf_counter()
        position = torch.full((self._work.batch, 1), self._position, device=self._device)
        with torch.no_grad():
            out = self._model(
                self._token,
                **cache_argument(self._model, self._cache),
                position_ids=position,
                use_cache=True,
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
    """Decode in turn, every second round backwards; the figures of each run, all at one pace.

    Args:
        steps: of a round; None: `STEPS`.
    """
    steps = STEPS if steps is None else steps
    for number in range(rounds):
        for run in runs if number % 2 == 0 else runs[::-1]:
            run.decode(steps)
    return at_one_pace([run.figures() for run in runs])


def room_for(rounds: int, steps: int | None = None) -> int:
    """Tokens that a workpiece must have room for, so that all rounds are run."""
    steps = STEPS if steps is None else steps
    return max(ANSWER_TOKENS, WARM_STEPS + steps * rounds)


def at_one_pace(figures: Sequence[StepFigures]) -> list[StepFigures]:
    """All of them at the middle one of their paces."""
    known = [each.pace_s for each in figures if each.pace_s]
    return [each.at(float(np.median(known))) for each in figures] if known else list(figures)


def _counted(cache: TieredCache) -> dict[str, float]:
    phase: PhaseStats = cache.stats.decode
    return phase.as_dict()


def as_dict(figures: StepFigures) -> dict[str, Any]:
    """For JSON."""
    return {field.name: getattr(figures, field.name) for field in fields(figures)}


def _at(step_s: float, stall_s: float, share: float) -> float:
    """Seconds of a step where all but its wait takes `share` times as long."""
    return stall_s + share * max(0.0, step_s - stall_s)


def _step_at(row: dict[str, float], share: float) -> dict[str, float]:
    step_s = _at(row["step_s"], row["stall_s"], share)
    return row | {"step_s": step_s, "predict_s": share * row["predict_s"]}
