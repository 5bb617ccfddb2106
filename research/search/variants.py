"""What `search.speed` compares, what the model of transfers predicts, and a request's sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.beams.beam_schedule import ScheduleSettings
from penstock.search.transfer_estimate import Parents, with_shared_blocks
from penstock.search.transfer_model import TransferRequest, step_by_step, token_by_token

# What `search.speed` compares, and a search with its sizes ----------------------------------------

BASELINE, IN_MEMORY, BEYOND = "layerwise", "resident", "+share"
PAPER = "+prefetch"
"""The paper's whole method; what comes after it goes beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to run a search."""

    strategy: str = "scheduled"
    overlap: bool = False
    balance: bool = False
    prefetch: bool = False
    share: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """What `make_decoder` is called with."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def schedule(self) -> ScheduleSettings:
        """How the engine groups beams for it, as `make_decoder` has it."""
        return ScheduleSettings(
            overlap=self.overlap, balance=self.balance, share=self.share, follow=self.share
        )

    @property
    def in_steps(self) -> bool:
        """Whether the length of a step makes a difference: not where all beams go together."""
        return self.strategy == "scheduled"


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        BASELINE: Variant(strategy="layerwise"),
        "inter-token": Variant(),
        "+inter-beam": Variant(overlap=True),
        PAPER: Variant(overlap=True, balance=True, prefetch=True),
        BEYOND: Variant(overlap=True, balance=True, prefetch=True, share=True),
        IN_MEMORY: Variant(strategy="resident", overlap=True),
    }
)
"""By name, each with what the one before has: the baseline, the paper's method part by part, what
goes beyond it; and everything in fast memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchCase:
    """Sizes of one search.

    Raises:
        ConfigError: a number that no search can have; names the field.
    """

    beams: int
    width: int
    step_tokens: int
    prompt_tokens: int
    new_tokens: int
    block_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < (name != "seed"):
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.beams % self.width:
            raise ConfigError(
                f"beams={self.beams} is not a multiple of width={self.width}: each survivor of a "
                "step goes on as `width` beams"
            )

    @property
    def max_tokens(self) -> int:
        """Of a sequence at the end."""
        return self.prompt_tokens + self.new_tokens

    @property
    def num_steps(self) -> int:
        """The last one may be shorter."""
        return -(-self.new_tokens // self.step_tokens)

    def start_of(self, step: int) -> int:
        """Length of the beams when a step begins."""
        return self.prompt_tokens + step * self.step_tokens

    def tokens_of(self, step: int) -> int:
        """New tokens of a step."""
        return min(self.step_tokens, self.new_tokens - step * self.step_tokens)

    def transfers(self, shape: KVShape, memory_bytes: int) -> TransferRequest:
        """The same for the transfer model.

        Args:
            memory_bytes: fast memory for KV.
        """
        return TransferRequest.of_shape(
            shape, beams=self.beams, width=self.width, step_tokens=self.step_tokens,
            prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens,
            memory_bytes=memory_bytes, block_tokens=self.block_tokens,
        )  # fmt: skip

    def steps_at(self, lengths: list[int], count: int) -> list[list[int]]:
        """The first step and, for each length, `count` steps from the one that begins next to it.

        Raises:
            ConfigError: sizes that cannot be lengthened block by block.
        """
        sizes = (self.prompt_tokens, self.step_tokens)
        if self.new_tokens % self.step_tokens or any(size % self.block_tokens for size in sizes):
            raise ConfigError(
                f"places need whole steps and whole blocks: a prompt of {self.prompt_tokens} and "
                f"steps of {self.step_tokens} tokens must be multiples of {self.block_tokens}, and "
                f"{self.new_tokens} new tokens one of the step; or measure with --whole"
            )
        places, last = [[0]], 0
        for length in sorted(lengths):
            step = round((length - self.prompt_tokens) / self.step_tokens)
            step = min(step, self.num_steps - count)
            if step > last:
                last = step + count - 1
                places.append(list(range(step, step + count)))
        return places


# What the transfer model says that each step of a variant loads -----------------------------------

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """Bytes into fast memory, by step.

    Layer-wise, that is Eq. 1-3 token by token; `block_bytes` is what the same equations give for
    an engine that loads blocks once they are full. Group by group it is convention "start" of
    Eq. 4 and 5, or, where beams share loads, the estimate for the very survivors of the walk.
    """

    case: SearchCase
    groups: Int64Array
    """[steps]"""
    step_bytes: Int64Array | None = None
    """[steps]"""
    token_bytes: Int64Array | None = None
    """[new_tokens]"""
    block_bytes: Int64Array | None = None
    """[new_tokens]"""

    def loaded(self, step: int, tokens: int) -> int:
        """Of the first `tokens` tokens of a step; group by group, of the step."""
        if self.step_bytes is not None:
            return int(self.step_bytes[step])
        return self._sum(self.token_bytes, step, tokens)

    def in_blocks(self, step: int, tokens: int) -> int | None:
        """Layer-wise, of full blocks alone."""
        return None if self.block_bytes is None else self._sum(self.block_bytes, step, tokens)

    def _sum(self, each: Int64Array | None, step: int, tokens: int) -> int:
        assert each is not None
        first = step * self.case.step_tokens
        return int(each[first : first + tokens].sum())

    @property
    def offloads(self) -> NDArray[np.bool_]:
        """Steps in which not everything fits into fast memory. bool [steps]"""
        if self.step_bytes is not None:
            return self.groups > 1
        tokens = self.case.step_tokens
        return np.array([self.loaded(step, tokens) > 0 for step in range(self.case.num_steps)])

    @property
    def total_bytes(self) -> int:
        """Of the whole search."""
        each = self.token_bytes if self.step_bytes is None else self.step_bytes
        assert each is not None
        return int(each.sum())


def predict(
    case: SearchCase, variant: Variant, shape: KVShape, memory_bytes: int, parents: Parents
) -> Prediction:
    """What a variant loads.

    Args:
        memory_bytes: its fast memory for KV.
        parents: of the walk.

    Raises:
        BudgetError: fast memory does not hold one beam.
    """
    request = case.transfers(shape, memory_bytes)
    one = np.ones(case.num_steps, dtype=np.int64)
    if variant.strategy == "resident":
        return Prediction(case=case, groups=one, step_bytes=0 * one)
    if variant.strategy == "layerwise":
        return Prediction(
            case=case, groups=one, token_bytes=token_by_token(request).loaded_bytes,
            block_bytes=_full_blocks(case, shape, memory_bytes),
        )  # fmt: skip
    if not variant.overlap:
        made = step_by_step(request, "start")
    else:
        made = with_shared_blocks(request, parents=parents, settings=variant.schedule)
    return Prediction(case=case, groups=made.groups, step_bytes=made.loaded_bytes)


def _full_blocks(case: SearchCase, shape: KVShape, memory_bytes: int) -> Int64Array:
    """Eq. 1-3 of full blocks: a block is loaded from the token behind its last one on; the block
    that is written in stays, and layers make room when a block is full or a step begins."""
    new = np.arange(case.new_tokens, dtype=np.int64)
    full = (case.prompt_tokens + new) // case.block_tokens
    starts = case.prompt_tokens + new // case.step_tokens * case.step_tokens
    held = np.maximum(full, -(-starts // case.block_tokens))
    piece = case.block_tokens * shape.token_bytes
    slots = memory_bytes // piece
    kept = np.minimum(shape.num_layers, slots // (case.beams * np.maximum(1, held)))
    kept = np.minimum.accumulate(kept)
    return (shape.num_layers - kept) * case.beams * full * piece


# Totals of a request, from the steps that were measured -------------------------------------------

QUANTITIES = (
    "seconds", "stall_s", "expand_s", "loaded_bytes", "prefetched_bytes", "written_bytes",
    "copied_bytes",
)  # fmt: skip
Entry = dict[str, Any]
Float64Array = NDArray[np.float64]


def request_totals(
    case: SearchCase, entries: Sequence[Entry], prediction: Prediction, moved: Sequence[Entry] = ()
) -> dict[str, Any]:
    """Time and bytes of the whole request: summed where every step ran to its end (for bytes: or
    moved its blocks), else interpolated.

    Between the places, a quantity per token (time: and group, of which a plan knows the number)
    goes in straight lines over the length of the beams; beyond the outer ones the line goes on.
    Steps in which all beams fit and steps in which they do not have lines of their own, as far as
    both were measured: there is a jump between them.

    Args:
        moved: all steps, moving their blocks and not computed.

    Returns:
        `QUANTITIES`, tokens per second over all beams, shares, and the prediction.
    """
    is_whole = len(entries) == case.num_steps and all(
        entry["tokens"] == case.tokens_of(entry["step"]) for entry in entries
    )
    has_bytes = is_whole or len(moved) == case.num_steps
    totals: dict[str, Any] = {"is_interpolated": not is_whole, "has_all_bytes": has_bytes}
    for name in QUANTITIES:
        if is_whole:
            totals[name] = sum(entry[name] for entry in entries)
        elif has_bytes and name.endswith("_bytes"):
            totals[name] = sum(entry[name] for entry in moved)
        else:
            totals[name] = _interpolated(case, entries, prediction, name)
    totals["decode_s"] = totals["seconds"]
    totals["seconds"] += totals["expand_s"]
    totals["tokens_per_s"] = case.beams * case.new_tokens / totals["seconds"]
    totals["stall_share"] = totals["stall_s"] / totals["seconds"]
    totals["predicted_loaded_bytes"] = prediction.total_bytes
    return totals


def comparison(entries: Sequence[Entry]) -> dict[str, Any]:
    """Predicted and measured bytes of the measured steps, and what full blocks explain of it."""
    measured = sum(entry["loaded_bytes"] for entry in entries)
    predicted = sum(entry["predicted_bytes"] for entry in entries)
    found: dict[str, Any] = {
        "measured_bytes": measured, "predicted_bytes": predicted,
        "percent": 100 * (measured / predicted - 1) if predicted else None,
    }  # fmt: skip
    if entries and entries[0]["full_block_bytes"] is not None:
        blocks = sum(entry["full_block_bytes"] for entry in entries)
        found["full_block_bytes"] = blocks
        found["percent_of_full_blocks"] = 100 * (measured / blocks - 1) if blocks else None
        off = measured - predicted
        found["explained_by_blocks"] = (blocks - predicted) / off if off else None
    return found


def _interpolated(
    case: SearchCase, entries: Sequence[Entry], prediction: Prediction, name: str
) -> float:
    steps, offloads = range(case.num_steps), prediction.offloads
    places = np.array([case.start_of(k) + (case.tokens_of(k) - 1) / 2 for k in steps])
    tokens = np.array([case.tokens_of(k) for k in steps])
    per_group = name == "seconds"
    rates = np.zeros(case.num_steps)
    for there in (False, True):
        chosen = offloads == there
        some = [entry for entry in entries if offloads[entry["step"]] == there] or list(entries)
        if chosen.any():
            rates[chosen] = _line(some, name, places[chosen], per_group=per_group)
    if per_group:
        rates *= prediction.groups
    return float(np.maximum(rates, 0) @ tokens)


def _line(
    entries: Sequence[Entry], name: str, wanted: Float64Array, *, per_group: bool
) -> Float64Array:
    """Straight lines through the places, each the mean of its steps, going on beyond the outer."""
    found: dict[int, list[tuple[float, float]]] = {}
    for entry in entries:
        middle = entry["length"] + (entry["tokens"] - 1) / 2
        divisor = entry["tokens"] * (len(entry["groups"]) if per_group else 1)
        found.setdefault(entry["place"], []).append((middle, entry[name] / divisor))
    x, y = np.array(sorted(tuple(np.mean(some, axis=0)) for some in found.values())).T
    if len(x) == 1:
        return np.full(len(wanted), y[0])
    right = np.clip(np.searchsorted(x, wanted), 1, len(x) - 1)
    slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
    return np.asarray(y[right - 1] + slope * (wanted - x[right - 1]), dtype=np.float64)
