"""KVSwap: groups on disk, ranked by low-rank joint-head keys. Source: arXiv 2511.11907."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.errors import ConfigError
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.key_index import KeyIndex
from penstock.engine.layer import Layer
from penstock.engine.layer_builder import LayerBuilder
from penstock.engine.policy import IndexRequest, SelectionPolicy, ceil_div
from penstock.engine.sizing import fewest_coded_slots, largest_plan, make_plan, resident_plan
from penstock.engine.value_sum import ValueSum
from penstock.kernels.key_rotation import BLOCK_TOKENS
from penstock.methods.kvswap.division import column_choices, kept_share, least_columns
from penstock.methods.kvswap.index import CHUNK_TOKENS, HeadReduction, LowRankIndex
from penstock.methods.kvswap.mass import LEAST_UNITS, MassMeter
from penstock.methods.kvswap.mass_layer import Below, MassLayer
from penstock.methods.kvswap.tail_layer import TailLayer

SMALLEST_CHUNK_TOKENS = 1024
"""Tokens scored at a time when memory is tight."""
CHUNK_SHARE = 50
"""Larger chunks may take one part in so many of the budget."""

MOST_KEEP = 1000
"""More, and nothing that is in a slot ever leaves it."""
MOST_BLOCK_TOKENS = 1024
"""Keys whose offsets are further apart are no easier to compress than post-RoPE ones."""
PAPER_SELECTED_TOKENS = 400
"""MG, the number of selected entries (KVSwap section 6 and appendix A.2)."""
LEAST_SELECTED_TOKENS = 64
"""Of a selection in the tightest budget."""
SLOTS_BY_SELECTED = 3
"""Slots are at most so many selections: 0.92 of a selection is in memory then."""
SHARED_TOKENS = 600
"""Most tokens of preload buffers: all of them are read at every step."""
SOME_SHARED_TOKENS = 800
"""The same where some layers have them: others' slots are as large, and hold more."""
SHARED_READS = 32 << 20
"""Most bytes of such reads, of a row's step in all layers, out of host memory (device tier): about
1 ms on an H100. These tokens are worth more than other slots are
(research/notes/2026-11-27-shared-pools.md)."""
WINDOWS = (32, 16)
"""Tokens that a larger window may be cut down to."""
SMALLER_WINDOW = 0.99
"""What each of these steps is held to keep, as measured by the KL of answers
(research/notes/2026-11-29-windows-and-heads.md)."""
REUSE_PAYS = 0.8
"""Layers have slots of their own where these are worth at least so much of what shared ones are:
less, and a larger budget would be the worse one. Shared ones are read anew at every step."""
DEVICE_REUSE_PAYS = 0.9
"""The same on the device tier, which reads from host memory."""
WANTS_REUSE = 0.01
"""The same where `reuse_tokens` is stated."""
SHARED_EVERY = 3
"""Layers of every so many may share a pool: two thirds reuse their slots, of which the same bytes
hold four for three (research/notes/2026-11-26-dividing-a-budget.md)."""
KEPT_TOKENS, KEEPS = 300, 4 / 3
"""`keep` for slots of so many tokens is 1, and grows by this power, so that a step reads what the
paper's does: 0.23 of 400 tokens. A factor f leaves 0.305 / f ** (1 / KEEPS) of the slots to be read
(research/notes/2026-11-26-which-slots-stay.md)."""
LARGEST_KEEP = 16
IN_8_BITS = 0.99
"""What slots in 8 bits are held to keep, by as many as the model has them: these are taken where
they hold as many (research/notes/2026-11-27-slots-in-8-bits.md)."""
_CODED_WIDTHS = 16
"""The compiled attention takes so many numbers of 8 bits at once."""
MORE_BITS = 1.5
"""Columns of 4 bits that find as much as one of 8."""


@dataclass(frozen=True, kw_only=True)
class KVSwap(SelectionPolicy):
    """Disk-aware offloading with a low-rank key index, grouped prediction and a reuse buffer.

    Source: KVSwap (arXiv 2511.11907), sections 3.1 to 3.4.

    Differences, measured in docs/methods/kvswap.md: the newest tokens stay resident by a window of
    `window_tokens` beside the paper's unfinished group; `sink_tokens` are resident; everything that
    the reuse buffer holds is attended to, and all of it is selected anew at each step, where the
    paper selects less and lets the oldest go (`keep`); index components are stored in 8 or 4 bits
    where memory is short, and divided among the layers by what each needs (`layer_ranks`); a group
    has the norm of its heads' shares (`head_reduction`).
    """

    name: ClassVar[str] = "kvswap"
    uses_adapter: ClassVar[bool] = True
    device_tier: ClassVar[bool] = True

    group_tokens: int = 4
    """Tokens per group, the paper's G: 4 for NVMe, 8 for eMMC."""
    selected_tokens: int | None = None
    """Tokens selected per step, the paper's MG; None: as many as the slots hold, of which those
    that are there count more (`keep`); with `keep` 1 a third of them, at least 400 or all."""
    reuse_tokens: int | None = None
    """Tokens that the reuse buffer holds per layer, the paper's C in tokens; 0 for no reuse; None:
    one selection where its size is given, which is what the next step's overlap can hit, else as
    many as the budget has room for."""
    shared_every: int | None = None
    """Layers of every so many share slots, and keep nothing from step to step: 0: none, 1: all (the
    paper's, without reuse), 3: the third, the sixth, and so on, in 8 bits and on a CPU. None: what
    keeps more. Not of the paper."""
    rank: int | None = None
    """Components of the index per token and layer; None: chosen from the budget. The paper's sigma
    is kv_heads * head_dim / rank."""
    index_bits: Literal[16, 8, 4] | None = None
    """Bits per component; None: chosen from the budget."""
    window_tokens: int = 64
    """Newest tokens that are always attended to, beyond the unfinished group."""
    sink_tokens: int = 4
    """First tokens of the sequence that are always attended to."""
    index_block_tokens: int = BLOCK_TOKENS
    """The index has keys turned back to their offset in a block of so many tokens, where the
    model's rotary embedding is known; 0: keys as the model has them, as in the paper."""
    layer_ranks: Literal["measured", "equal"] = "measured"
    """Whether layers have components by what calibration found that each needs, `rank` on average,
    or all the same, as in the paper."""
    head_reduction: HeadReduction = "norm"
    """How scores of the heads become one: the root of the sum of the squares of their shares in a
    softmax ("norm"), the sum of the shares ("softmax"), or the "sum" of raw logits."""
    keep: float | None = None
    """Factor on the scores of the groups in the slots when a step selects, so that what comes in is
    worth its bytes; 1: as the paper, where slots are first in, first out. None: by the number of
    slots, so that a step reads what the paper's does, where `selected_tokens` is None, too, and all
    that the slots hold is selected; else 1."""
    attend: Literal["resident", "selected"] = "resident"
    """Attend to all that the slots hold, or to this step's selection alone."""
    mass: float | None = None
    """Read groups until a step has this share of the attention by the index (the mean over heads),
    at most as many as there are slots; None: `selected_tokens`. Not of the paper."""
    floor: float | None = None
    """With `mass`: a step of a layer that turns out to have less is made better, as `below` says;
    None: it stays as it is."""
    below: Below = "again"
    """Below the floor: "again": all slots are filled, by the true query; "tail": the mean of what
    is not read is added, by its estimated mass; "exact": the step attends to the whole past."""
    tail: Literal["mean", "none"] = "none"
    """What a step did not read: "mean" adds it as one value a KV head, the mean of the values of
    all tokens that are not attended to, with the weight that the index says; "none" leaves it out,
    as the paper does."""
    slot_bits: Literal[16, 8] | None = None
    """8: slots hold keys and values in 8 bits, a scale for each head of a token, and so about twice
    as many groups in the same bytes; sinks and window are as the model has them, and so are slots
    where they can hold the whole past. 16: all are. None: 8 where that keeps more, on a CPU and on
    the device tier. Not of the paper."""
    predict: bool = True
    """Predict layer i's query from layer i-1's input and prefetch (section 3.3)."""
    min_prediction_cosine: float = 0.85
    """Layers whose predicted query was less similar to the true one at calibration wait for the
    true one."""

    index_fields: ClassVar[tuple[str, ...]] = (
        "group_tokens", "rank", "index_bits", "index_block_tokens", "layer_ranks",
    )  # fmt: skip
    free_fields: ClassVar[tuple[str, ...]] = (
        *SelectionPolicy.free_fields, "slot_bits", "shared_every",
    )  # fmt: skip
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("group_tokens", (1, 2, 4, 8, 16), "tokens read as one, the paper's G"),
        Choice("selected_tokens", (800, 400, 200), "tokens that a step selects, the paper's MG"),
        Choice("reuse_tokens", (1600, 800, None, 0), "tokens kept from step to step, as C"),
        Choice("rank", (None, 64, 48, 32), "components of the index per token"),
        Choice("index_bits", (None, 8, 4), "bits of a component"),
    )
    """Rank and bits are chosen together, or both left to the plan."""

    def __post_init__(self) -> None:
        if self.group_tokens < 1:
            raise ConfigError(f"group_tokens={self.group_tokens} must be at least 1")
        if self.selected_tokens is not None and self.selected_tokens < self.group_tokens:
            raise ConfigError(
                f"selected_tokens={self.selected_tokens} is less than one group of "
                f"{self.group_tokens} tokens"
            )
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"rank={self.rank} must be at least 1")
        if self.index_bits not in (None, 16, 8, 4):
            raise ConfigError(f"index_bits={self.index_bits} must be 16, 8 or 4")
        if not 0 <= self.index_block_tokens <= MOST_BLOCK_TOKENS:
            raise ConfigError(
                f"index_block_tokens={self.index_block_tokens} must be between 0 and "
                f"{MOST_BLOCK_TOKENS}"
            )
        if self.slot_bits not in (None, 16, 8):
            raise ConfigError(f"slot_bits={self.slot_bits} must be 16 or 8")
        if self.slot_bits == 8 and not self._may_code:
            raise ConfigError("slot_bits=8 does not go with mass=, tail=mean or attend='selected'")
        self._check_sharing()
        for name, share in (("mass", self.mass), ("floor", self.floor)):
            if share is not None and not 0 < share < 1:
                raise ConfigError(f"{name}={share} must lie between 0 and 1")
        if self.floor is not None and self.mass is None:
            raise ConfigError(f"floor={self.floor} is for mass=; give both")
        by_shares = self.head_reduction != "sum" and self.attend == "resident"
        if self.mass is not None and not by_shares:
            raise ConfigError("mass= does not go with head_reduction='sum' or attend='selected'")
        if self.tail == "mean":
            if not by_shares:
                raise ConfigError(
                    "tail=mean does not go with head_reduction='sum' or attend='selected'"
                )
            if self.mass is not None:
                raise ConfigError("tail=mean and mass= do not go together; give one")
        elif self.tail != "none":
            raise ConfigError(f"tail={self.tail} must be mean or none")
        if self.keep is not None and not 1 <= self.keep <= MOST_KEEP:
            raise ConfigError(f"keep={self.keep} must be between 1 and {MOST_KEEP:,}")
        if self.window_tokens < 0 or self.sink_tokens < 0:
            raise ConfigError("window_tokens and sink_tokens must not be negative")

    def _check_sharing(self) -> None:
        every = self.shared_every
        if every is None:
            return
        if every < 0:
            raise ConfigError(f"shared_every={every} must not be negative")
        if self.reuse_tokens is not None and (self.reuse_tokens == 0) != (every == 1):
            raise ConfigError(
                f"reuse_tokens={self.reuse_tokens} and shared_every={every} contradict each other"
            )
        if every > 1 and (self.slot_bits == 16 or not self._may_code):
            raise ConfigError(
                f"shared_every={every} is for slots in 8 bits, which do not go with slot_bits=16, "
                "mass=, tail=mean or attend='selected'"
            )

    @property
    @override
    def repeats_another(self) -> bool:
        """Slots that a selection fills are what None is."""
        selected = self.selected_tokens or PAPER_SELECTED_TOKENS
        one_selection = 0 < (self.reuse_tokens or 0) <= selected
        return one_selection or (self.rank is None) != (self.index_bits is None)

    @property
    @override
    def unit_tokens(self) -> int:
        return self.group_tokens

    @property
    @override
    def wanted_rank(self) -> int | None:
        return self.rank

    @property
    @override
    def index_block(self) -> int:
        return self.index_block_tokens

    @property
    @override
    def predicts(self) -> bool:
        return self.predict

    @override
    def trusts_prediction(self, cosine: float) -> bool:
        return cosine >= self.min_prediction_cosine

    @property
    def _selects_all(self) -> bool:
        """Whether a step selects as many groups as there are slots."""
        return self.selected_tokens is None and self._may_keep and self.keep != 1

    @property
    def _may_keep(self) -> bool:
        """Raw sums of logits have no factor that means more; `mass` has rules of its own."""
        return self.head_reduction != "sum" and self.mass is None

    @override
    def first_in_first_out(self) -> "KVSwap":
        return replace(self, keep=1)

    @override
    def resident_factor(self, selected_units: int) -> float:
        if self.keep is not None and self._may_keep:
            return self.keep
        if not self._selects_all:
            return 1.0
        slots = selected_units * self.group_tokens / KEPT_TOKENS
        return float(min(LARGEST_KEEP, max(1.0, slots**KEEPS)))

    # Sizing -----------------------------------------------------------------------------------

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """Divide the budget: window and sinks first, then index and slots.

        A budget that holds the full cache needs no retrieval: unless the tokens to select or to
        reuse are given, everything stays in memory, as under `Full`. Below that, index and slots
        are divided so that the most of the attention is kept (`division.py`). Each layer has its
        own slots, for reuse, unless two preload buffers that serve all layers in turn (appendix
        A.2; `reuse_tokens` 0) hold so much more that reuse does not pay, or one that serves every
        third layer. The window shrinks where that makes much more room.
        """
        smallest: list[int] = []
        if self.selected_tokens is None and self.reuse_tokens is None and not request.must_tier:
            everything = resident_plan(request)
            if request.limit_bytes is None or everything.total_bytes <= request.limit_bytes:
                return self, everything
            smallest.append(everything.total_bytes)  # of a short text it is less than an index
        plans = []
        for candidate in self._candidates(request):
            for every in candidate._sharing(request):
                least = candidate._build(request, every=every)
                if request.limit_bytes is not None and least.total_bytes > request.limit_bytes:
                    smallest.append(least.total_bytes)
                    continue
                plan = candidate._grow(request, every=every)
                if plan.is_coded or not self._wants_codes or plan.num_slots >= plan.max_units:
                    plans.append((candidate, plan))
                else:
                    smallest.append(least.total_bytes)
        if plans:
            # The fewest columns are held to find nothing: then the largest selection is best.
            made, plan = max(plans, key=lambda at: (self.worth(request, *at), at[1].selected_units))
            return made, made._with_chunks(request, plan)
        request.require(min(smallest), self.name)
        raise AssertionError("require() refuses a budget below the least")

    def worth(self, request: SizingRequest, made: "KVSwap", plan: SlotPlan) -> float:
        """What a plan of this policy keeps of the attention, see `division.kept_share`; less where
        slots are not reused, or the window is smaller than it was to be.

        Args:
            made: this policy with its open choices made.
        """
        assert made.rank is not None
        columns = made.rank * (1 if made.index_bits == 4 else MORE_BITS)
        kept = kept_share(columns, made._least_columns(request), plan.num_slots, plan.max_units)
        halvings = [made.window_tokens <= each < self.window_tokens for each in WINDOWS]
        if plan.is_coded:
            kept *= IN_8_BITS
        shared = DEVICE_REUSE_PAYS if request.device_tier else REUSE_PAYS
        if self.reuse_tokens:
            shared = WANTS_REUSE
        factor: float = shared ** plan.sharing(request.shape.num_layers)
        return kept * SMALLER_WINDOW ** sum(halvings) * factor

    @property
    def _may_code(self) -> bool:
        """Whether attention is the kind that reads slots in 8 bits."""
        return self.mass is None and self.tail == "none" and self.attend == "resident"

    @property
    def _some_share(self) -> bool:
        """Whether it is stated that some layers share a pool, and others do not."""
        return self.shared_every is not None and self.shared_every > 1

    @property
    def _wants_codes(self) -> bool:
        """Whether slots in 8 bits are stated."""
        return self.slot_bits == 8 or self._some_share

    def _slot_bits(self, request: SizingRequest) -> Sequence[Literal[16, 8]]:
        """What slots may be in, of this model and on this device.

        Raises:
            ConfigError: not in the bits that are stated.
        """
        shape = request.shape
        if self.slot_bits == 16 or not self._may_code:
            return (16,)
        may = request.device_is_cpu or request.device_tier
        if self._some_share and (request.device_tier or not request.device_is_cpu):
            raise ConfigError(f"shared_every={self.shared_every} is for a CPU; leave it out")
        if self._wants_codes and not (may and shape.is_even):
            why = "keys and values of two widths" if may else "a GPU over a store on disk"
            what = "slot_bits=8" if self.slot_bits == 8 else f"shared_every={self.shared_every}"
            raise ConfigError(f"{what} does not do for {why}; leave it out")
        fast = self._wants_codes or shape.head_dim % _CODED_WIDTHS == 0
        return (16, 8) if may and shape.is_even and fast else (16,)

    def _sharing(self, request: SizingRequest) -> tuple[int, ...]:
        """Which layers may share a pool, as `SlotPlan.shared_every`."""
        if self.shared_every is not None:
            return (self.shared_every,)
        if self.reuse_tokens is not None:
            return (0, 1) if self.reuse_tokens else (1,)
        may = self.slot_bits == 8 and self._selects_all and not request.device_tier
        return (0, SHARED_EVERY, 1) if may and request.device_is_cpu else (0, 1)

    def _turns(self, request: SizingRequest) -> bool:
        """Whether the index has keys turned back to their offset in a block."""
        return self.index_block_tokens > 0 and request.turns_keys

    def _least_columns(self, request: SizingRequest) -> int:
        return least_columns(
            request.shape.joint_dim, turned=self._turns(request),
            has_adapter=request.has_adapter,
        )  # fmt: skip

    def _candidates(self, request: SizingRequest) -> "list[KVSwap]":
        """This policy with its open choices made.

        Twice the columns in 4 bits find more than half as many in 8 (the note that `division.py`
        names), so that 8 bits are for stated ranks, and for the largest where there is room.
        """
        joint, most = request.shape.joint_dim, request.most_rank
        ranks = column_choices(
            joint, self._least_columns(request), joint if most is None else min(joint, most)
        )
        if self.rank is not None:
            ranks = [min(joint, self.rank)]
        bits: Sequence[Literal[16, 8, 4]] = (8, 4)
        if self.index_bits is not None:
            bits = (self.index_bits,)
        return [
            replace(
                self,
                rank=rank,
                index_bits=each,
                window_tokens=window,
                slot_bits=slot_bits,
                shared_every=0 if self._some_share and slot_bits == 16 else self.shared_every,
            )
            for slot_bits in self._slot_bits(request)
            for window in sorted({min(each, self.window_tokens) for each in (1 << 30, *WINDOWS)})
            for each in bits
            for rank in (ranks if each == bits[-1] else ranks[:1])
        ]

    def _selected_units(
        self, request: SizingRequest, slots: int | None, *, shared: bool = False
    ) -> int:
        """Units of a selection where a pool has so many slots; the fewest if None.

        What shared pools hold is of this step alone.
        """
        max_units = ceil_div(request.max_tokens, self.group_tokens)
        if self.selected_tokens is not None:
            return min(max_units, self.selected_tokens // self.group_tokens)
        if request.limit_bytes is None:
            return max_units
        paper = min(max_units, max(1, PAPER_SELECTED_TOKENS // self.group_tokens))
        if slots is None:
            return min(paper, max(1, LEAST_SELECTED_TOKENS // self.group_tokens))
        return slots if shared else min(slots, max(paper, slots // SLOTS_BY_SELECTED))

    def _grow(self, request: SizingRequest, *, every: int) -> SlotPlan:
        """The plan with as many slots as the budget allows."""
        shared = every == 1
        least = self._selected_units(request, None)
        max_units = ceil_div(request.max_tokens, self.group_tokens)
        most = least
        if (shared or (every and self.reuse_tokens is None)) and self.selected_tokens is None:
            most = max(least, self._most_shared_tokens(request, every) // self.group_tokens)
        elif not shared and self.reuse_tokens is not None:
            most = max(least, self.reuse_tokens // self.group_tokens)
        elif not shared and (
            self.selected_tokens is None or request.limit_bytes is None or self.mass is not None
        ):
            most = max_units
        most = min(max_units, most)
        return largest_plan(
            request, lambda slots: self._build(request, slots, every=every), least, most
        )

    def _most_shared_tokens(self, request: SizingRequest, every: int) -> int:
        """Tokens of a preload buffer, where `selected_tokens` is not stated."""
        if self.reuse_tokens is not None:
            return PAPER_SELECTED_TOKENS
        if not request.device_tier:
            return SHARED_TOKENS if every == 1 else SOME_SHARED_TOKENS
        return max(SHARED_TOKENS, SHARED_READS // request.shape.full_cache_bytes(1, 1))

    def _with_chunks(self, request: SizingRequest, plan: SlotPlan) -> SlotPlan:
        """The same slots with as large score chunks as the budget allows."""
        chunk = CHUNK_TOKENS
        while chunk > SMALLEST_CHUNK_TOKENS:
            larger = self._build(
                request, plan.num_slots, every=plan.shared_every, score_tokens=chunk
            )
            if request.limit_bytes is None:
                return larger
            scratch_bytes = larger.total_bytes - plan.total_bytes
            if (
                larger.total_bytes <= request.limit_bytes
                and scratch_bytes <= request.limit_bytes // CHUNK_SHARE
            ):
                return larger
            chunk //= 2
        return plan

    def _build(
        self,
        request: SizingRequest,
        num_slots: int | None = None,
        *,
        every: int,
        score_tokens: int = SMALLEST_CHUNK_TOKENS,
    ) -> SlotPlan:
        """Price a plan with `num_slots` slots a pool; the least selection if None."""
        assert self.rank is not None
        assert self.index_bits is not None
        shape, batch = request.shape, request.batch
        max_units = ceil_div(request.max_tokens, self.group_tokens)
        selected = self._selected_units(request, num_slots, shared=every == 1)
        num_slots = selected if num_slots is None else num_slots
        num_slots = max(num_slots, 2 if self.mass is None else LEAST_UNITS)
        coded = self.slot_bits == 8
        if coded and not request.device_tier:  # which has blocks of its own to stream through
            num_slots = max(num_slots, fewest_coded_slots(request, self.group_tokens))
        read_units = None
        if self._selects_all:
            selected = num_slots
            read_units = num_slots if every else num_slots // 2
        sizes = {
            "batch": batch, "max_units": max_units, "group_tokens": self.group_tokens,
            "rank": self.rank, "bits": self.index_bits,
        }  # fmt: skip
        turned, table = self._turns(request), 0
        per_layer = LowRankIndex.num_bytes(shape, **sizes, turned=turned)
        sizes["rank"], blocks = self._widest(request), {}
        if turned:
            blocks = {"block_tokens": self.index_block_tokens}
            table = LowRankIndex.table_bytes(
                shape, max_units=max_units, group_tokens=self.group_tokens, **blocks
            )
        scratch = LowRankIndex.scratch_bytes(
            shape,
            **sizes,
            chunk_tokens=score_tokens,
            turned=turned,
            **blocks,
            on_gpu=request.device_tier and not request.device_is_cpu,
        )
        if not request.has_adapter:  # a basis is made before anything is scored
            scratch = max(scratch, 16 * shape.joint_dim**2)
        if self.mass is not None:
            scratch += MassMeter.scratch_bytes(batch, max_units, shape.num_query_heads)
        if self.tail == "mean":
            per_layer += ValueSum.num_bytes(batch, shape)
            scratch += TailLayer.scratch_bytes(batch, max_units, shape)
        return make_plan(
            request, group_tokens=self.group_tokens, num_slots=num_slots,
            selected_units=selected,
            sink_slots=ceil_div(self.sink_tokens, self.group_tokens),
            window_slots=ceil_div(self.window_tokens, self.group_tokens) + 1,
            shared_every=every,
            compact=self.attend == "selected" and num_slots > selected,
            index_bytes=shape.num_layers * per_layer + table, scratch_bytes=scratch,
            score_tokens=score_tokens, read_units=read_units, coded=coded,
        )  # fmt: skip

    def _widest(self, request: SizingRequest) -> int:
        """The most components that a layer has."""
        assert self.rank is not None
        shared = self.layer_ranks == "measured" and self.rank <= len(request.widest_ranks)
        return request.widest_ranks[self.rank - 1] if shared else self.rank

    # Parts ------------------------------------------------------------------------------------

    @override
    def make_layers(self, builder: LayerBuilder) -> Sequence[Layer]:
        if self.mass is not None:
            return [self._mass_layer(i, builder) for i in builder.numbers]
        if self.tail == "mean":
            return [
                TailLayer(
                    i, builder.setup, builder.pool(i), self,
                    self.make_index(builder.index_request(i)), builder.compact,
                )
                for i in builder.numbers
            ]  # fmt: skip
        return super().make_layers(builder)

    def _mass_layer(self, i: int, builder: LayerBuilder) -> MassLayer:
        assert self.mass is not None
        request = builder.index_request(i)
        return MassLayer(
            i, builder.setup, builder.pool(i), self, self.make_index(request), builder.compact,
            mass=self.mass, floor=self.floor, below=self.below, scaling=request.scaling,
        )  # fmt: skip

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        assert self.rank is not None, "plan() makes the choices"
        assert self.index_bits is not None, "plan() makes the choices"
        rank, adapter = self.rank, request.adapter
        rotation = request.rotation if self.index_block_tokens else None
        if adapter is not None and adapter.block_tokens and rotation is None:
            adapter = None  # of other keys than this layer's index would have
        if self.layer_ranks == "measured" and adapter is not None:
            rank = adapter.rank_at(rank)
        return LowRankIndex(
            request.shape, batch=request.batch, max_units=request.max_units,
            group_tokens=request.group_tokens, rank=rank, bits=self.index_bits,
            head_reduction=self.head_reduction, scaling=request.scaling, adapter=adapter,
            device=request.device, rotation=rotation, block_tokens=self.index_block_tokens,
            chunk_tokens=request.score_tokens,
        )  # fmt: skip
