"""Rows of `clusters.end_to_end`: methods that decode the same forced tokens, in turn."""

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from penstock.core.errors import ConfigError, PenstockError
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.answers import Question, SharedPrefill
from penstock.generation.prompts import make_batch
from penstock.methods import SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel
from penstock.models.plain_model import share_weights
from research.clusters.read_watch import Reads, ReadWatch

MAIN, CACHE = "main", "cache"
"""Sections: methods beside each other; DynaKV with caches of several sizes."""
DISK = "auto"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row: a method at a length and a selection, on a device."""

    section: str
    device: str
    """The store: "auto" for the real disk, or a simulated device over memory."""
    length: int
    """Tokens of prompt and output together."""
    ratio: float
    """Share of them that a step selects."""
    method: str
    """As `penstock bench accuracy` writes settings; what it selects comes from the ratio."""
    reuse: float = 1.0
    """Tokens in slots, in selections; 0: two pools serve all layers and nothing is reused."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells rows apart."""
        return (*self.group, self.method, self.reuse)

    @property
    def group(self) -> tuple[Any, ...]:
        """Rows that are measured in turn have this in common."""
        return self.section, self.device, self.length, self.ratio

    @property
    def selected(self) -> int:
        """Tokens that a step selects."""
        return max(1, round(self.ratio * self.length))

    @property
    def policy(self) -> SelectionPolicy:
        """The policy, with as many selected tokens as all others."""
        policy: Any = parse_setting(self.method).policy
        if "selected_tokens" not in {field.name for field in dataclasses.fields(policy)}:
            return policy  # type: ignore[no-any-return]
        slots = round(self.reuse * self.selected)
        same: SelectionPolicy = replace(policy, selected_tokens=self.selected, reuse_tokens=slots)
        return same

    @property
    def title(self) -> str:
        """The case in words."""
        return f"{self.device}, {self.length:,} tokens, {self.ratio:.0%}: {self.method}"

    @property
    def row(self) -> dict[str, Any]:
        """What a row of the result begins with."""
        return dataclasses.asdict(self)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a row's case."""
    return Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)}).key


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How many tokens a row decodes."""

    warm: int
    """Steps before the first round; the first of them clusters the prompt."""
    rounds: int
    """Rounds in which all methods take turns; one uncounted step begins each."""
    steps: int
    """Counted steps of a round."""

    @property
    def decoded(self) -> int:
        """Forced tokens, those that are not counted included."""
        return self.warm + self.rounds * (self.steps + 1)


class ForcedText:
    """A text whose last tokens are decoded; the rest is prefilled once, by the plain model."""

    def __init__(self, loaded: LoadedModel, ids: list[int], decoded: int, chunk: int) -> None:
        """Prefill all but the last `decoded` tokens.

        Args:
            chunk: tokens per forward pass.

        Raises:
            PromptError: the text does not fit the model's positions.
        """
        self.prompt_tokens, self.decoded = len(ids) - decoded, decoded
        self.ids = torch.tensor([ids])
        batch = make_batch(loaded, [ids[: self.prompt_tokens]], new_tokens=decoded, pad_token_id=0)
        question = Question(samples=[], batch=batch, new_tokens=decoded, pad_token_id=0)
        self.prefill = SharedPrefill(loaded.model, question, chunk)


class LiveRow:
    """A case with its cache filled, decoding the forced tokens."""

    def __init__(self, case: Case, text: ForcedText, loaded: LoadedModel, pace: Pace) -> None:
        """Fill the cache and decode the warm-up.

        Raises:
            BudgetError: the cache cannot be as small as its method says.
            StorageError: the disk is full or cannot be used.
        """
        self._text, self._at = text, text.prompt_tokens
        self._model: Any = share_weights(loaded.model)  # other rows' hooks stay away
        self.cache = TieredCache(
            self._model, case.policy, memory=parse_setting(case.method).memory, store=case.device,
            max_tokens=int(text.ids.shape[1]),
        )  # fmt: skip
        self._steps_s: list[list[float]] = []
        self._counters: dict[str, float] = {}
        self._reads = Reads()
        self._right = 0
        try:
            start = time.perf_counter()
            text.prefill.put_into(self.cache)
            self._forward(self.cache.get_seq_length(), text.prompt_tokens)
            self._fill_s = time.perf_counter() - start
            self._first_s = self._step()
            for _ in range(pace.warm - 1):
                self._step()
            self._watch = ReadWatch(self.cache)
        except BaseException:
            self.cache.close()
            raise

    def _forward(self, first: int, end: int) -> torch.Tensor:
        positions = torch.arange(first, end)[None]
        with torch.no_grad():
            out = self._model(
                self._text.ids[:, first:end], **cache_argument(self._model, self.cache),
                position_ids=positions, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def _step(self) -> float:
        """Decode the next forced token; returns its seconds."""
        start = time.perf_counter()
        logits = self._forward(self._at, self._at + 1)
        seconds = time.perf_counter() - start
        self._at += 1
        if self._at < self._text.ids.shape[1]:
            self._right += int(logits.argmax()) == int(self._text.ids[0, self._at])
        return seconds

    def run_round(self, steps: int) -> None:
        """Decode one uncounted token, then the counted ones."""
        self._step()
        before = self.cache.stats.decode.as_dict()
        self._watch.take()
        self._steps_s.append([self._step() for _ in range(steps)])
        self._reads += self._watch.take()
        for name, value in self.cache.stats.decode.as_dict().items():
            self._counters[name] = self._counters.get(name, 0.0) + value - before[name]

    def figures(self) -> dict[str, Any]:
        """For JSON; times and bytes are of one step, on average."""
        steps_ms = 1e3 * np.array(self._steps_s).ravel()
        count, seconds = len(steps_ms), float(steps_ms.sum()) / 1e3
        counted, reads, plan = self._counters, self._reads, self.cache.plan
        missed = counted["units_wanted"] - counted["units_hit"]
        useful = missed * plan.unit_bytes
        busy = reads.busy_s or float("inf")
        report, store = self.cache.report(), self.cache.tiers._store
        return {
            "steps": count, "mean_ms": seconds / count * 1e3, "tokens_per_s": count / seconds,
            "median_ms": float(np.median(steps_ms)), "p90_ms": float(np.percentile(steps_ms, 90)),
            "round_ms": [float(np.mean(part)) * 1e3 for part in self._steps_s],
            "reads": reads.reads / count, "read_bytes": reads.read_bytes / count,
            "read_kib": reads.read_bytes / reads.reads / 1024 if reads.reads else None,
            "useful_bytes": useful / count, "read_ms": reads.busy_s / count * 1e3,
            "bandwidth": reads.read_bytes / busy, "effective_bandwidth": useful / busy,
            "stall_ms": counted["stall_s"] / count * 1e3,
            "stall_share": counted["stall_s"] / seconds,
            "select_ms": counted["predict_s"] / count * 1e3,
            "follow_ms": counted.get("follow_s", 0.0) / count * 1e3,
            "adapt_ms": counted.get("adapt_s", 0.0) / count * 1e3,
            "hit_rate": 1 - missed / counted["units_wanted"] if counted["units_wanted"] else None,
            "written_bytes": counted["written_bytes"] / count,
            "ledger_bytes": report.used_bytes, "ledger_items": report.items,
            "full_cache_bytes": report.full_cache_bytes,
            "selected_tokens": plan.selected_units, "slots": plan.num_slots,
            "shared_pools": plan.shared_pools, "fill_s": self._fill_s,
            "first_step_s": self._first_s, "prompt_tokens": self._text.prompt_tokens,
            "right": self._right / (self._text.decoded - 1),
            "is_direct": None if store is None else store.is_direct, "options": self._options(),
        }  # fmt: skip

    def _options(self) -> dict[str, Any]:
        found = vars(self.cache.policy)
        return {k: v for k, v in found.items() if isinstance(v, bool | int | float | str)}

    def close(self) -> None:
        """Give everything back."""
        self.cache.close()


def run_group(
    cases: Sequence[Case], makers: Sequence[Callable[[], LiveRow]], pace: Pace, say: Say,
    done: Callable[[int], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Decode all cases in turn, every second round backwards. One that fails says why in its row.

    Args:
        makers: each fills the cache of its case.
        say: told what is going on.
        done: told of each case that is filled, and again when the group is measured.
    """
    rows = [case.row for case in cases]
    live: list[tuple[LiveRow, dict[str, Any]]] = []
    try:
        for case, make, row in zip(cases, makers, rows, strict=True):
            say(case.title)
            try:
                live.append((make(), row))
            except Exception as error:  # the other rows are worth having
                _note(row, error)
            done(1)
        for number in range(pace.rounds):
            say(f"decoding, round {number + 1} of {pace.rounds}")
            for one, row in live if number % 2 == 0 else live[::-1]:
                if "error" not in row:
                    try:
                        one.run_round(pace.steps)
                    except Exception as error:
                        _note(row, error)
        for one, row in live:
            if "error" not in row:
                row.update(one.figures())
        done(len(cases))
    finally:
        for one, _ in live:
            one.close()
    return rows


def _note(row: dict[str, Any], error: Exception) -> None:
    """Say in a row why it has no figures; what is not our own refusal also with its place."""
    first = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, PenstockError):
        row["error"] = first
        row["refused"] = isinstance(error, ConfigError)  # and would be again
        return
    row["error"] = f"{type(error).__name__}: {first}"
    traceback.print_exception(error, file=sys.stderr)
