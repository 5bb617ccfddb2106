"""SelectionPolicy: frozen hyperparameters, and the parts that a method is made of."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.choices import Choice
from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.adapter import LayerAdapter
from penstock.engine.device_tier.device_index import DeviceIndex
from penstock.engine.device_tier.scored_units import ScoredUnits
from penstock.engine.key_index import KeyIndex
from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.replacement import ReplacementPolicy
from penstock.kernels import top_units as kernels
from penstock.kernels.key_rotation import KeyRotation
from penstock.storage.store import KVStore, Sealing

if TYPE_CHECKING:
    from penstock.engine.layer import Layer
    from penstock.engine.layer_builder import LayerBuilder

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From positions, int64 [tokens], to cos and sin as Llama has them: float32, both halves of
head_dim alike. [tokens, head_dim]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexRequest:
    """What a policy is given to make one layer's index."""

    shape: KVShape
    batch: int
    max_units: int
    group_tokens: int
    scaling: float
    adapter: LayerAdapter | None
    device: torch.device
    score_tokens: int
    """Tokens that the index scores at a time, which bounds its scratch memory."""
    selected_units: int
    """Units of a selection."""
    rows_per_sequence: int = 1
    """KV heads of a sequence, when each is a row of its own (`SelectionPolicy.per_head`)."""
    rotary: Rotary | None = None
    """The model's rotary embedding, when it is known."""
    rotation: KeyRotation | None = None
    """How it turns this layer's keys, where that was found to be so."""
    shared: NDArray[np.float32] | None = None
    """Memory for the layer's vectors that other layers use too, where the policy's `make_layers`
    gives some. [batch, vectors, head_dim]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRequest:
    """What a policy is given to open a cache's store."""

    location: str
    """A directory, "auto", "memory" or a simulated device, as `KVStore.create` takes it."""
    sealed: Sealing
    shape: KVShape
    """Of a row."""
    unit_bytes: int
    batch: int
    """Sequences that the cache is planned for."""
    max_tokens: int
    scaling: float
    """Factor on the products of queries and keys."""
    sector_bytes: int | None = None
    """See `KVStore.create`."""

    def create(self, files_per_layer: int = 1) -> KVStore:
        """The store of most policies: a file of units for each layer.

        Args:
            files_per_layer: of more than one, file i of layer l is region i * layers + l.

        Raises:
            ConfigError: the location makes no sense.
            StorageError: it cannot be used.
        """
        return KVStore.create(
            self.location, num_layers=files_per_layer * self.shape.num_layers,
            unit_bytes=self.unit_bytes, sealed=self.sealed, sector_bytes=self.sector_bytes,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SelectionPolicy(ABC):
    """Chooses which units a layer attends to. Holds hyperparameters only, never run state."""

    name: ClassVar[str]
    """The name on the command line and in results."""
    drops: ClassVar[bool] = False
    """True for methods that forget what they do not select."""
    per_head: ClassVar[bool] = False
    """True for methods whose units belong to one KV head: every KV head of a sequence is then a
    row of its own, in requests, indexes and selections."""
    retrieves: ClassVar[bool] = True
    """False for methods that attend to everything."""
    stays_resident: ClassVar[bool] = False
    """True for methods that keep the whole cache in fast memory."""
    uses_adapter: ClassVar[bool] = False
    """True for methods that want a low-rank adapter."""
    device_tier: ClassVar[bool] = False
    """True for methods that the device tier runs (`store="host"`)."""
    shares_units: ClassVar[bool] = True
    """False for methods whose units lie where other caches cannot read them (near storage)."""
    index_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that the bytes of an index depend on; `plan` makes the choices that are open. A stored
    index is read under the same ones."""
    free_fields: ClassVar[tuple[str, ...]] = ("selected_tokens", "reuse_tokens")
    """Fields that no token held depends on: another batch may choose them again."""
    counters: ClassVar[tuple[str, ...]] = ()
    """Names of what its layers count beside what the engine does, see `PhaseStats.counters`."""
    choices: ClassVar[tuple[Choice, ...]] = ()
    """Fields whose values a search may choose among (`methods/search_space.py`)."""

    @abstractmethod
    def plan(self, request: SizingRequest) -> "tuple[SelectionPolicy, SlotPlan]":
        """Divide a memory budget; returns this policy with every open choice made.

        Raises:
            BudgetError: the budget is too small; names the smallest that would do.
        """

    @property
    def repeats_another(self) -> bool:
        """Whether another combination of `choices` means the same, so that a search can leave this
        one out."""
        return False

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit."""
        return 1

    @property
    def wanted_rank(self) -> int | None:
        """Components a token that an adapter must have; None where that is open."""
        return None

    @property
    def index_block(self) -> int:
        """Tokens of the blocks to whose starts the index turns keys back, for which it wants the
        layers' rotations; 0: it takes keys as the model has them."""
        return 0

    @property
    def whole_layers(self) -> int:
        """First layers whose whole cache stays in fast memory; nothing is selected for there."""
        return 0

    def open_store(self, request: StoreRequest) -> KVStore:
        """Open the store of a cache.

        Raises:
            ConfigError: the location makes no sense.
            StorageError: it cannot be used.
        """
        return request.create()

    def make_layers(self, builder: "LayerBuilder") -> "Sequence[Layer]":
        """Make the layers that retrieve, one for each of `builder.numbers`."""
        return [builder.retrieval_layer(i, self) for i in builder.numbers]

    def make_index(self, request: IndexRequest) -> KeyIndex:
        """Make one layer's index. Methods that retrieve override this."""
        raise AssertionError(f"{self.name} does not retrieve")

    def make_device_index(self, request: IndexRequest) -> DeviceIndex:
        """Make one layer's index for the device tier: the same one, every unit scored each step."""
        return ScoredUnits(
            self.make_index(request), rows=request.batch, max_units=request.max_units,
            wanted=request.selected_units, device=request.device,
            resident_factor=self.resident_factor(request.selected_units),
        )  # fmt: skip

    def make_replacement(self, batch: int, num_slots: int) -> ReplacementPolicy:
        """Make one layer's replacement policy; FIFO unless a method says otherwise."""
        return FIFO(batch, num_slots)

    @property
    def selects_best(self) -> bool:
        """Whether `select` is this class's own."""
        return type(self).select is SelectionPolicy.select and "select" not in vars(self)

    def first_in_first_out(self) -> "SelectionPolicy":
        """The same policy without a say of scores in what leaves the slots."""
        return self

    def resident_factor(self, selected_units: int) -> float:
        """Factor on the scores of units that are in slots when the next ones are selected, so that
        what comes in is worth its bytes; of methods whose `select` is this one.

        Args:
            selected_units: of a selection.
        """
        return 1.0

    @property
    def predicts(self) -> bool:
        """Whether layer i's query is predicted from layer i-1's input, to prefetch."""
        return False

    @property
    def predicts_on_device(self) -> bool:
        """Whether it does so on the device tier too."""
        return False

    def trusts_prediction(self, cosine: float) -> bool:
        """Whether a layer whose predicted query was this similar to the true one is predicted."""
        return True

    def select(
        self,
        index: KeyIndex,
        query: Tensor,
        first_unit: NDArray[np.int64],
        end_unit: int,
        wanted: int,
    ) -> Selection:
        """Pick units for one step: the highest-scoring ones.

        Args:
            index: the layer's index.
            query: true or predicted. [batch, num_heads, head_dim]
            first_unit: first unit that may be chosen, per row. [batch]
            end_unit: units from here on are in the window.
            wanted: units to select per row, at most.
        """
        if len(first_unit) == 1 or (first_unit == first_unit[0]).all():
            chosen = index.best_units(query, int(first_unit[0]), end_unit, wanted)
            if chosen is not None:
                return Selection(chosen)
        scores = index.score(query, end_unit)
        return top_units(scores, first_unit, wanted)

    def select_keeping(
        self, index: KeyIndex, query: Tensor, first_unit: NDArray[np.int64], end_unit: int,
        wanted: int, slot_of: NDArray[np.int32], factor: float,
    ) -> Selection:  # fmt: skip
        """As `select`, by scores of which those of what slots hold count `factor` times.

        Args:
            slot_of: slot of each unit, -1 where it is absent. [batch, at least end_unit]
        """
        scores, resident = index.score(query, end_unit), slot_of[:, :end_unit] >= 0
        scores = kernels.favour_resident(scores, resident, factor)
        return top_units(scores, first_unit, wanted)


def top_units(scores: Tensor, first_unit: NDArray[np.int64], wanted: int) -> Selection:
    """The `wanted` highest-scoring units of each row, in ascending order of unit.

    Args:
        scores: [batch, units]
        first_unit: units before it may not be chosen. [batch]
    """
    units = scores.shape[1]
    lowest = highest = int(first_unit[0])
    if len(first_unit) > 1:
        lowest, highest = int(first_unit.min()), int(first_unit.max())
    if highest > lowest:
        columns = torch.arange(units, device=scores.device)
        hidden = columns < torch.from_numpy(first_unit).to(scores.device)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    unit_ids = kernels.top_units(scores, lowest, wanted)
    valid = None
    if highest > lowest and unit_ids.shape[1] > units - highest:
        valid = unit_ids >= first_unit[:, None]
    return Selection(unit_ids, valid)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
