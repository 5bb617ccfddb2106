"""BaselinePolicy: what the compared methods share. Source: KVSwap (2511.11907), 4.2 and 4.3."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.errors import ConfigError
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.policy import SelectionPolicy, ceil_div
from penstock.engine.sizing import (
    largest_plan,
    make_plan,
    resident_plan,
    whole_layers_apart,
    with_whole_layers,
)

SELECTED_TOKENS = 400
"""Tokens that a step selects: the same for every method (KVSwap, section 6 and Tab. 1)."""

SELECTED = Choice("selected_tokens", (800, 400, 200), "tokens that a step selects")
"""The choice that every method has."""


class IndexSize(NamedTuple):
    """Fast memory of one layer's index, all rows."""

    index_bytes: int
    scratch_bytes: int
    """Temporaries of one call; the layers share them."""


@dataclass(frozen=True, kw_only=True)
class BaselinePolicy(SelectionPolicy):
    """A retrieval method of another paper, on this engine and under the same budget.

    Under setting A of KVSwap (section 4.3) every method gets the same memory and gives up of its
    own parameters what it must: subclasses list their variants from the best to the smallest in
    `index_sizes`, and the first one that leaves room for a selection is taken. Whatever memory is
    left stays unused, unless `reuse_tokens` asks for more slots.
    """

    group_tokens: int = 1
    """Tokens of a unit."""
    selected_tokens: int | None = None
    """Tokens attended to beside sinks and window; None: 400, or all when memory is not limited."""
    reuse_tokens: int | None = None
    """Tokens that stay in slots from step to step, at least one selection; 0: nothing is reused and
    two buffers serve all layers in turn; None: one selection."""
    window_tokens: int = 64
    """Newest tokens that are always attended to, beyond the unfinished unit."""
    sink_tokens: int = 4
    """First tokens of the sequence that are always attended to."""
    full_layers: int = 0
    """First layers whose whole cache stays in fast memory, where nothing is selected: 2 in Quest
    and in LouisKV's comparison of all methods (its section 5.1)."""

    can_keep_whole: ClassVar[bool] = True
    """False for methods whose layers share what cannot leave one of them out."""
    choices: ClassVar[tuple[Choice, ...]] = (SELECTED,)

    def __post_init__(self) -> None:
        if self.group_tokens < 1:
            raise ConfigError(f"group_tokens={self.group_tokens} must be at least 1")
        if self.selected_tokens is not None and self.selected_tokens < self.group_tokens:
            raise ConfigError(
                f"selected_tokens={self.selected_tokens} is less than one unit of "
                f"{self.group_tokens} tokens"
            )
        if self.window_tokens < 0 or self.sink_tokens < 0:
            raise ConfigError("window_tokens and sink_tokens must not be negative")
        if self.full_layers < 0:
            raise ConfigError(f"full_layers={self.full_layers} must not be negative")
        if self.full_layers and not self.can_keep_whole:
            raise ConfigError(f"full_layers={self.full_layers}: {self.name} keeps no layer whole")

    @property
    @override
    def unit_tokens(self) -> int:
        return self.group_tokens

    @property
    @override
    def whole_layers(self) -> int:
        return self.full_layers

    @property
    @override
    def repeats_another(self) -> bool:
        """Slots that a selection fills are what None is."""
        selected = self.selected_tokens or SELECTED_TOKENS
        return 0 < (self.reuse_tokens or 0) <= selected

    @abstractmethod
    def index_sizes(self, request: SizingRequest) -> "list[tuple[SelectionPolicy, IndexSize]]":
        """This policy with its open choices made, best first, and what each one's index takes."""

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """Smaller selections are tried when the smallest index is too
        large beside a full one."""
        smallest: list[int] = []
        if self.selected_tokens is None and not request.must_tier and not self.drops:
            everything = resident_plan(request)
            if request.limit_bytes is None or everything.total_bytes <= request.limit_bytes:
                return self, everything
            smallest.append(everything.total_bytes)  # of a short text it is less than an index
        rest, whole = whole_layers_apart(request, self.full_layers)
        sizes = self.index_sizes(rest)
        for selected in self._selections(rest):
            for shared in self._sharing:
                for policy, size in sizes:
                    plan = self._build(rest, size, selected, selected, shared=shared)
                    if rest.limit_bytes is None or plan.total_bytes <= rest.limit_bytes:
                        plan = self._grow(rest, size, selected, shared=shared)
                        return policy, with_whole_layers(plan, whole)
                    smallest.append(with_whole_layers(plan, whole).total_bytes)
        request.require(min(smallest), self.name)
        raise AssertionError("require() refuses a budget below the least")

    @property
    def _sharing(self) -> tuple[bool, ...]:
        """Whether two pools serve all layers, in the order in which that is tried."""
        return (False, True) if self.reuse_tokens != 0 else (True,)

    def _selections(self, request: SizingRequest) -> list[int]:
        """Units of a selection, most first."""
        most = ceil_div(request.max_tokens, self.group_tokens)
        if self.selected_tokens is not None:
            return [min(most, self.selected_tokens // self.group_tokens)]
        if request.limit_bytes is None:
            return [most]
        tokens = (SELECTED_TOKENS, 256, 128)
        return [min(most, max(1, count // self.group_tokens)) for count in tokens]

    def _grow(
        self, request: SizingRequest, size: IndexSize, selected: int, *, shared: bool
    ) -> SlotPlan:
        most = selected
        if not shared and self.reuse_tokens is not None:
            most = max(selected, self.reuse_tokens // self.group_tokens)
        return largest_plan(
            request, lambda slots: self._build(request, size, selected, slots, shared=shared),
            selected, min(most, ceil_div(request.max_tokens, self.group_tokens)),
        )  # fmt: skip

    def _build(
        self, request: SizingRequest, size: IndexSize, selected: int, num_slots: int, *,
        shared: bool,
    ) -> SlotPlan:  # fmt: skip
        return make_plan(
            request, group_tokens=self.group_tokens, num_slots=max(num_slots, 2),
            selected_units=selected, sink_slots=ceil_div(self.sink_tokens, self.group_tokens),
            window_slots=ceil_div(self.window_tokens, self.group_tokens) + 1,
            shared_every=int(shared and not request.device_tier),
            compact=False, index_bytes=request.shape.num_layers * size.index_bytes,
            scratch_bytes=size.scratch_bytes + 4 * request.batch * request.max_tokens,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AheadPolicy(BaselinePolicy):
    """A method that can choose one layer ahead, which none of their papers does."""

    predict: bool = False
    """Choose for layer i with the query that layer i-1's input predicts (KVSwap, section 3.3), and
    fetch while layer i-1 computes; the first layer, and those behind one of another kind, choose
    with their own."""
    min_prediction_cosine: float = 0.85
    """Layers whose predicted query was less similar to the true one at calibration (a model's
    adapter says so) choose with their own."""

    @override
    def trusts_prediction(self, cosine: float) -> bool:
        return cosine >= self.min_prediction_cosine

    @property
    @override
    def predicts(self) -> bool:
        return self.predict

    @property
    @override
    def predicts_on_device(self) -> bool:
        return self.predict
