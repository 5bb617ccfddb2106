"""SlotPlan and SizingRequest: one memory budget divided among index, slots, window and staging."""

from dataclasses import dataclass, replace

from penstock.core.byte_size import format_bytes
from penstock.core.errors import BudgetError
from penstock.core.shape import KVShape

_CLASH_BYTES = 128 << 10
"""Rows in host memory that begin a multiple of this apart are written slowly, see `host_units`."""


def host_units(max_units: int, unit_bytes: int) -> int:
    """Units of a row of the device tier's host memory: one more where rows would clash.

    Every step writes a token to every row, by the GPU and at the same place of each. Rows that
    begin a multiple of 2 MiB apart cost a step of 16,384 rows 82 to 98 ms instead of 14; 512 bytes
    more a row were enough (one H100, research/notes/2026-11-25-addresses.md). The host's caches
    probably put what lies so far apart into the same few lines.

    Args:
        max_units: units that a sequence fills.
        unit_bytes: bytes of one; if they are such a multiple themselves, nothing is added.
    """
    clash = max_units * unit_bytes % _CLASH_BYTES == 0 and unit_bytes % _CLASH_BYTES > 0
    return max_units + clash


def shares_pool(layer_idx: int, shared_every: int) -> bool:
    """Whether a layer has another's pool, see `SlotPlan.shared_every`."""
    return shared_every > 0 and (layer_idx + 1) % shared_every == 0


def sharing_layers(num_layers: int, shared_every: int) -> int:
    """How many of the layers have another's pool."""
    return num_layers // shared_every if shared_every else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """Sizes of every fixed allocation of a cache, per layer and batch row unless said otherwise."""

    batch: int
    max_units: int
    """Units that a sequence of `max_tokens` tokens fills."""
    group_tokens: int
    num_slots: int
    """Slots of a pool (reuse capacity, or the preload buffer of layers that share)."""
    selected_units: int
    """Units that one step selects (the paper's M)."""
    sink_slots: int
    window_slots: int
    shared_every: int
    """Which layers have no pool of their own, and reuse nothing between steps. 0: none; 1: all, and
    two pools serve them in turn; n: every nth, and one serves them."""
    compact: bool
    """Selected slots are gathered before attention instead of attending to the whole pool."""
    index_bytes: int
    """Index of all layers and rows, in bytes."""
    fixed_bytes: int
    """Tables, staging and scratch of all layers and rows, in bytes."""
    unit_bytes: int
    """Bytes of one unit of one layer, in the store."""
    coded_bytes: int | None = None
    """Bytes of one in a slot in 8 bits; None: slots have units as the store has them."""
    staging_slots: int
    """Slots of one staging section; 0 when reads land in the slots."""
    stream_units: int = 0
    """Units of a block that streams from host memory through the device tier's."""
    score_tokens: int = 0
    """Tokens that the index scores at a time, which bounds its scratch memory."""
    host_bytes: int = 0
    """Pinned host memory that reads pass through on their way to a GPU, or (device tier) where all
    of KV is; beside the budget, which is for the memory of the cache's device."""
    host_slots: int = 0
    """Slots of a row in the host's memory, whose tokens the host scores for a GPU (HillInfer); the
    GPU's `num_slots` then hold one selection. 0: there are none."""
    pool_bytes: int
    """Slots, sinks and windows of all layers and rows, in bytes."""
    predictor_bytes: int = 0
    """Copies of the weights that predict queries; 0: the model's own are read instead."""
    state_bytes: int = 0
    """States of recurrent layers, of all sequences, in bytes."""

    @property
    def total_bytes(self) -> int:
        """Everything, in bytes."""
        return sum(size for _, size in self.items)

    @property
    def items(self) -> tuple[tuple[str, int], ...]:
        """The parts of `total_bytes`, as reports name them."""
        return (
            ("index", self.index_bytes), ("slots and window", self.pool_bytes),
            ("tables and scratch", self.fixed_bytes),
            ("predicting weights", self.predictor_bytes), ("recurrent states", self.state_bytes),
        )  # fmt: skip

    def with_predictor(self, size_bytes: int, limit_bytes: int | None) -> "SlotPlan":
        """This plan with copies of the predicting weights, if the budget has room left for them."""
        if self.is_resident or not self.selected_units:
            return self
        if limit_bytes is not None and self.total_bytes + size_bytes > limit_bytes:
            return self
        return replace(self, predictor_bytes=size_bytes)

    @property
    def is_resident(self) -> bool:
        """Whether the whole cache stays in memory, without slots and without a store."""
        return self.num_slots == 0

    @property
    def is_coded(self) -> bool:
        """Whether slots hold units in 8 bits; sinks and window are as the model has them."""
        return self.coded_bytes is not None

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one layer."""
        return self.unit_bytes if self.coded_bytes is None else self.coded_bytes

    @property
    def shared_pools(self) -> bool:
        """Whether all layers share pools."""
        return self.shared_every == 1

    def shares(self, layer_idx: int) -> bool:
        """Whether a layer has another's pool."""
        return shares_pool(layer_idx, self.shared_every)

    def sharing(self, num_layers: int) -> float:
        """The share of so many layers that have another's pool, 0 to 1."""
        return sharing_layers(num_layers, self.shared_every) / num_layers

    @property
    def keeps_apart(self) -> bool:
        """Whether a layer's sinks and window have memory of their own, beside its slots'."""
        return self.shared_pools or self.is_coded

    @property
    def host_units(self) -> int:
        """Units of a row in host memory (device tier); see the function."""
        return host_units(self.max_units, self.unit_bytes)

    @property
    def kept_slots(self) -> int:
        """Slots of sinks and rolling window."""
        return self.sink_slots + self.window_slots


@dataclass(frozen=True, kw_only=True, slots=True)
class SizingRequest:
    """What a policy is given to divide: the model's shape, the work, and the memory."""

    shape: KVShape
    batch: int
    max_tokens: int
    """Most tokens per sequence, prompt and answer."""
    limit_bytes: int | None
    """Budget for all fast memory; None for no limit."""
    sector_bytes: int
    device_is_cpu: bool
    has_adapter: bool
    """A fitted low-rank basis is at hand."""
    widest_ranks: tuple[int, ...] = ()
    """Most components that a layer has when the layers have 1, 2, ... on average; empty: all have
    the same."""
    most_rank: int | None = None
    """Components that the fitted basis has; None: as many as the keys are wide."""
    turns_keys: bool = True
    """Whether it is known how the model's rotary embedding turns keys."""
    rows_per_sequence: int = 1
    """KV heads of a sequence, when each is a row of its own; `batch` then counts rows."""
    device_tier: bool = False
    """All of KV is in host memory that the device reads itself, and no step waits for the host."""
    must_tier: bool = False
    """Tokens are on disk already: the plan may not keep everything in memory."""
    state_bytes: int = 0
    """What recurrent layers take of the memory; `limit_bytes` is less that already."""

    def padded_bytes(self, group_tokens: int) -> int:
        """A unit's place on disk: its bytes, padded to whole sectors."""
        unit = group_tokens * self.shape.token_bytes
        return -(-unit // self.sector_bytes) * self.sector_bytes

    def is_direct(self, group_tokens: int) -> bool:
        """Whether disk reads land in the slots themselves."""
        unit = group_tokens * self.shape.token_bytes
        return self.device_is_cpu and unit == self.padded_bytes(group_tokens)

    def require(self, needed_bytes: int, what: str) -> None:
        """Refuse a budget below `needed_bytes`.

        Raises:
            BudgetError: with the smallest budget that would do.
        """
        if self.limit_bytes is not None and needed_bytes > self.limit_bytes:
            full = self.shape.full_cache_bytes(self.batch, self.max_tokens)
            count = self.batch // self.rows_per_sequence
            sequences = "1 sequence" if count == 1 else f"{count:,} sequences"
            needed_bytes, given = needed_bytes + self.state_bytes, self.limit_bytes
            raise BudgetError(
                f"memory={format_bytes(given + self.state_bytes)} is too little for {what} with "
                f"{sequences} of {self.max_tokens:,} tokens, prompt and answer (full cache "
                f"{format_bytes(full)}{self._states}); the smallest budget that would do is "
                f"{format_bytes(needed_bytes)} ({needed_bytes} bytes)",
                needed_bytes=needed_bytes,
            )

    @property
    def _states(self) -> str:
        if not self.state_bytes:
            return ""
        return f", recurrent states {format_bytes(self.state_bytes)}"
