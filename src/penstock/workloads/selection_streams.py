"""streamed(): any retrieval method with its winning units replaced, for measurements of speed.

Source: KVSwap (arXiv 2511.11907), section 3.4.3, for the overlap between steps that a stream keeps.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cache, cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.core.selection import Selection
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy

PAPER_OVERLAP = 0.77
"""Share of the selected groups that the step before had selected too (KVSwap section 3.4.3)."""
NOTHING = -1
"""Fills rows of units that are shorter than others; stands before every unit."""

Taken = NDArray[np.int64] | NDArray[np.bool_] | None
"""Units that shall not win: their numbers, [rows, any], or True at them, [rows, end_unit]."""
OwnChoice = Callable[[int, Taken], Selection]
"""The method's own selection: of so many units (at least one) beside those that are taken."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One layer's choice in one decode step; arguments as in `SelectionPolicy.select`."""

    first_unit: NDArray[np.int64]
    """[rows]"""
    end_unit: int
    wanted: int
    own: OwnChoice
    """To be called once: it scores."""

    @cached_property
    def highest_first(self) -> int:
        """The largest of `first_unit`."""
        return int(self.first_unit.max())

    @property
    def wanted_of_row(self) -> NDArray[np.int64]:
        """Units that each row can and wants to have. [rows]"""
        return np.clip(self.end_unit - self.first_unit, 0, self.wanted)

    def within(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """`units` with `NOTHING` in place of those that may not be chosen. [rows, any]"""
        allowed = (units >= self.first_unit[:, None]) & (units < self.end_unit)
        return np.where(allowed, units, NOTHING)

    def may_choose(self, units: NDArray[np.int64]) -> bool:
        """Whether all of these units may be chosen. [rows, any]"""
        if not units.size:
            return True
        return bool(units.min() >= self.highest_first and units.max() < self.end_unit)


class LayerStream(ABC):
    """What one layer of one cache selects, step after step. Holds the state of a stream."""

    @abstractmethod
    def choose(self, step: Step) -> Selection:
        """The units of the next step."""

    @abstractmethod
    def note_closed(self, first_token: int, end_token: int) -> None:
        """Learn that units with these tokens can be chosen from now on; a first token of 0 begins
        a new sequence."""

    @abstractmethod
    def take_rows_from(self, other: "LayerStream", rows: NDArray[np.int64]) -> None:
        """Take row i from row `rows[i]` of the same layer's stream (perhaps itself)."""


class SelectionStream(ABC):
    """Where selections come from in place of the method's own scores. Frozen settings."""

    replaces: ClassVar[bool] = True
    """False for streams that leave the selections as they are."""

    @abstractmethod
    def layer_stream(self, layer: int, request: IndexRequest) -> LayerStream:
        """Begin the stream of one layer."""

    @abstractmethod
    def describe(self) -> str:
        """For tables and result files."""


def streamed(policy: SelectionPolicy, stream: SelectionStream) -> SelectionPolicy:
    """The same method, but which of its units win is the stream's to say.

    The method scores, fits, looks and plans as ever, once a step, so that all its costs stay; it
    reads, keeps and attends to the stream's units. The policy that comes back is of a subclass of
    the method's own class, with its name and its fields beside `stream`.

    Methods that attend to everything (full, flexgen) come back as they are. So do those that forget
    (`drops`), unless the stream replaces nothing: what they select is what they kept of the step
    before, whatever the scores, so that there is nothing to imitate.
    """
    if not policy.retrieves or (policy.drops and stream.replaces):
        return policy
    policy = policy.first_in_first_out()  # scores do not say who wins
    chosen = {f.name: getattr(policy, f.name) for f in fields(policy) if f.init}
    if isinstance(policy, StreamedPolicy):
        return replace(policy, stream=stream)
    return _streamed_class(type(policy))(**chosen, stream=stream)


@cache
def _streamed_class(method: type[SelectionPolicy]) -> type["StreamedPolicy"]:
    made: type[StreamedPolicy] = make_dataclass(
        f"Streamed{method.__name__}", [], bases=(StreamedPolicy, method), frozen=True, kw_only=True
    )
    return made


@dataclass(frozen=True, kw_only=True)
class StreamedPolicy(SelectionPolicy):
    """Laid over a method's class by `streamed`."""

    stream: SelectionStream

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """The policy of each cache counts its own layers."""
        policy, plan = super().plan(request)  # type: ignore[safe-super]
        return replace(policy), plan

    @cached_property
    def _layer_numbers(self) -> Iterator[int]:
        """A cache asks for the indexes of its layers in order."""
        return itertools.count()

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        layer = next(self._layer_numbers) % request.shape.num_layers
        inner = super().make_index(request)
        return StreamedIndex(inner, self.stream.layer_stream(layer, request))

    @override
    def select(
        self, index: KeyIndex, query: Tensor, first_unit: NDArray[np.int64], end_unit: int,
        wanted: int,
    ) -> Selection:  # fmt: skip
        assert isinstance(index, StreamedIndex)
        method_select = super().select

        def own(count: int, taken: Taken) -> Selection:
            with index.without(taken) as inner:
                return method_select(inner, query, first_unit, end_unit, count)

        step = Step(first_unit=first_unit, end_unit=end_unit, wanted=wanted, own=own)
        return index.stream.choose(step)


class StreamedIndex(KeyIndex):
    """A method's index, which does all the work, and the stream of its layer."""

    def __init__(self, inner: KeyIndex, stream: LayerStream) -> None:
        self.inner = inner
        self.stream = stream
        for name in ("observes", "num_prompt_queries", "looks_first", "lse"):
            vars(self)[name] = getattr(inner, name)

    @contextmanager
    def without(self, taken: Taken) -> Iterator[KeyIndex]:
        """The method's own index, which for now scores some units with minus infinity."""
        if taken is None:
            yield self.inner
            return
        score = self.inner.score

        def masked(query: Tensor, num_units: int) -> Tensor:
            scores = score(query, num_units)
            hidden = torch.from_numpy(taken).to(scores.device)
            if hidden.dtype == torch.bool:
                return scores.masked_fill(hidden[:, :num_units], float("-inf"))
            return scores.scatter(1, hidden, float("-inf"))

        replaced = {"score": masked, "best_units": lambda *_: None, "selection": lambda: None}
        vars(self.inner).update(replaced)
        try:
            yield self.inner
        finally:
            for name in replaced:
                del vars(self.inner)[name]

    @property
    @override
    def ready(self) -> bool:
        return self.inner.ready

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        self.stream.note_closed(first_token, first_token + keys.shape[1])
        self.inner.append(keys, first_token)

    @override
    def begin_step(self, query: Tensor, first_unit: NDArray[np.int64], position: int) -> None:
        self.inner.begin_step(query, first_unit, position)

    @override
    def close(self) -> None:
        self.inner.close()

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        return self.inner.score(query, num_units)

    @override
    def observe(self, selection: Selection, weights: Tensor) -> None:
        self.inner.observe(selection, weights)

    @override
    def rebuild_keys(self, rows: NDArray[np.int64], units: NDArray[np.int64]) -> Tensor | None:
        return self.inner.rebuild_keys(rows, units)

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, StreamedIndex)
        self.inner.take_rows_from(other.inner, rows)
        self.stream.take_rows_from(other.stream, rows.cpu().numpy())

    @override
    def see_queries(self, queries: Tensor) -> None:
        self.inner.see_queries(queries)

    @override
    def see_start(self, first_unit: NDArray[np.int64]) -> None:
        self.inner.see_start(first_unit)

    @override
    def fit(self, sample: Tensor, positions: Tensor) -> None:
        self.inner.fit(sample, positions)

    @override
    def look(self, keys: Tensor, first_token: int) -> None:
        self.inner.look(keys, first_token)

    @property
    @override
    def unwrapped(self) -> KeyIndex:
        return self.inner.unwrapped

    @override
    def fitted(self, end_token: int) -> None:
        self.stream.note_closed(0, end_token)
        self.inner.fitted(end_token)


# Overlap ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OverlapStream(SelectionStream):
    """Selections that overlap from step to step as those of a trained model do.

    Source: KVSwap (arXiv 2511.11907), section 3.4.3, for the share.

    Queries of a model with random weights point anywhere, so its selections hardly overlap and
    slots that are reused look useless. Here a share of each row's units is drawn from those of the
    step before, and the rest are the method's best of all others by its real scores. Where there
    are too few others, more come from the step before.
    """

    overlap: float = PAPER_OVERLAP
    """Share of each selection that repeats the one before, in [0, 1]."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.overlap <= 1.0:
            raise ConfigError(f"overlap={self.overlap} is a share; it must be between 0 and 1")

    @override
    def layer_stream(self, layer: int, request: IndexRequest) -> LayerStream:
        return _OverlappingLayer(self)

    @override
    def describe(self) -> str:
        return f"synthetic, {100 * self.overlap:.0f} % overlap"


class _OverlappingLayer(LayerStream):
    """Remembers the last selection of every row."""

    def __init__(self, settings: OverlapStream) -> None:
        self._overlap = settings.overlap
        self._draw = np.random.default_rng(settings.seed)
        self._last: NDArray[np.int64] | None = None
        """Units of the step before. [rows, wanted]"""

    @override
    def choose(self, step: Step) -> Selection:
        if self._last is None:
            selection = step.own(step.wanted, None)
            self._last = units_of(selection)
            return selection
        drawn = self._draw.permuted(self._last, axis=1)
        count = round(self._overlap * step.wanted)
        others = step.end_unit - step.highest_first - step.wanted
        if (
            drawn.shape[1] == step.wanted
            and others >= step.wanted - count
            and step.may_choose(drawn)
        ):
            new = step.own(max(1, step.wanted - count), drawn)
            fresh = units_of(new)[:, : step.wanted - count]
            self._last, selection = as_selection(np.concatenate([drawn[:, :count], fresh], axis=1))
            return selection
        return self._choose_by_row(step, step.within(drawn))

    def _choose_by_row(self, step: Step, order: NDArray[np.int64]) -> Selection:
        """Where rows differ in how many units they had, have or can have."""
        wanted, there = step.wanted_of_row, (order != NOTHING).sum(axis=1)
        repeated = np.minimum(np.rint(self._overlap * wanted).astype(np.int64), there)
        fresh = own_others(step, order, int((wanted - repeated).max()))
        kept = first_of_row(order, wanted - (fresh != NOTHING).sum(axis=1))
        self._last, selection = as_selection(np.concatenate([kept, fresh], axis=1))
        return selection

    @override
    def note_closed(self, first_token: int, end_token: int) -> None:
        if first_token == 0:
            self._last = None

    @override
    def take_rows_from(self, other: LayerStream, rows: NDArray[np.int64]) -> None:
        assert isinstance(other, _OverlappingLayer)
        self._last = None if other._last is None else other._last[rows]


# Units of rows ----------------------------------------------------------------------------------


def units_of(selection: Selection) -> NDArray[np.int64]:
    """Selected units, `NOTHING` where they are not valid. [rows, wanted]"""
    if selection.valid is None:
        return selection.unit_ids
    return np.where(selection.valid, selection.unit_ids, NOTHING)


def marked(units: NDArray[np.int64], end_unit: int) -> NDArray[np.bool_]:
    """True at the units of each row; `NOTHING` is left out. [rows, end_unit]"""
    mask = np.zeros((len(units), end_unit), dtype=np.bool_)
    rows, columns = (units != NOTHING).nonzero()
    mask[rows, units[rows, columns]] = True
    return mask


def own_others(step: Step, taken: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The method's own best units beside those that are taken; it scores once, whatever `count`.

    Args:
        taken: units, or `NOTHING`. [rows, any]
        count: at most so many of each row.

    Returns:
        [rows, at most count], `NOTHING` where a row has fewer others.
    """
    marks = marked(taken, step.end_unit)
    found = step.within(units_of(step.own(max(1, count), marks)))[:, :count]
    again = np.take_along_axis(marks, np.maximum(found, 0), axis=1)
    return np.where(again, NOTHING, found)


def first_of_row(units: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first `counts[row]` units of each row, `NOTHING` for the others. [rows, any]"""
    there = units != NOTHING
    return np.where(there & (there.cumsum(axis=1) <= counts[:, None]), units, NOTHING)


def as_selection(units: NDArray[np.int64]) -> tuple[NDArray[np.int64], Selection]:
    """Units in any order, `NOTHING` and repeats among them, as a selection.

    Returns:
        The units as they are remembered, [rows, wanted], `NOTHING` in front; and the selection.
    """
    units = np.sort(units, axis=1)
    rises = units[:, 1:] > units[:, :-1]
    if rises.all() and (units.size == 0 or units[:, 0].min() >= 0):
        return units, Selection(units, None)
    units[:, 1:][~rises] = NOTHING
    units.sort(axis=1)
    width = int((units != NOTHING).sum(axis=1).max())
    units = np.ascontiguousarray(units[:, units.shape[1] - width :])
    valid = units != NOTHING
    if valid.all():
        return units, Selection(units, None)
    return units, Selection(np.maximum(units, 0), valid)
