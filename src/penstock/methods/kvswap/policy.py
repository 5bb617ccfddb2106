"""KVSwap: groups on disk, ranked by low-rank joint-head keys. Source: arXiv 2511.11907."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.errors import ConfigError
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy, ceil_div
from penstock.engine.sizing import largest_plan, make_plan, resident_plan
from penstock.kernels.key_rotation import BLOCK_TOKENS
from penstock.methods.kvswap.index import CHUNK_TOKENS, HeadReduction, LowRankIndex

SMALLEST_CHUNK_TOKENS = 1024
"""Tokens scored at a time when memory is tight."""
CHUNK_SHARE = 50
"""Larger chunks may take one part in so many of the budget."""

MOST_BLOCK_TOKENS = 1024
"""Keys whose offsets are further apart are no easier to compress than post-RoPE ones."""
PAPER_SELECTED_TOKENS = 400
"""MG, the number of selected entries (KVSwap section 6 and appendix A.2)."""


@dataclass(frozen=True, kw_only=True)
class KVSwap(SelectionPolicy):
    """Disk-aware offloading with a low-rank key index, grouped prediction and a reuse buffer.

    Source: KVSwap (arXiv 2511.11907), sections 3.1 to 3.4.

    Differences, measured in docs/methods/kvswap.md: the newest tokens stay resident by a window of
    `window_tokens` beside the paper's unfinished group; `sink_tokens` are resident; everything that
    the reuse buffer holds is attended to, not only what was selected; index components are stored
    in 8 or 4 bits where memory is short, and divided among the layers by what each needs
    (`layer_ranks`).
    """

    name: ClassVar[str] = "kvswap"
    uses_adapter: ClassVar[bool] = True
    device_tier: ClassVar[bool] = True

    group_tokens: int = 4
    """Tokens per group, the paper's G: 4 for NVMe, 8 for eMMC."""
    selected_tokens: int | None = None
    """Tokens selected per step, the paper's MG; None: 400, or all when memory is not limited."""
    reuse_tokens: int | None = None
    """Tokens that the reuse buffer holds per layer, the paper's C in tokens; 0 for no reuse; None:
    one selection, which is what the next step's overlap can hit."""
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
    head_reduction: HeadReduction = "softmax"
    """How scores of the heads become one: "softmax" per head before the sum, or the raw "sum"."""
    attend: Literal["resident", "selected"] = "resident"
    """Attend to all that the slots hold, or to this step's selection alone."""
    predict: bool = True
    """Predict layer i's query from layer i-1's input and prefetch (section 3.3)."""
    min_prediction_cosine: float = 0.85
    """Layers whose predicted query was less similar to the true one at calibration wait for the
    true one."""

    index_fields: ClassVar[tuple[str, ...]] = (
        "group_tokens", "rank", "index_bits", "index_block_tokens", "layer_ranks",
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
        if self.window_tokens < 0 or self.sink_tokens < 0:
            raise ConfigError("window_tokens and sink_tokens must not be negative")

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

    # Sizing -----------------------------------------------------------------------------------

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """Divide the budget: window and sinks first, then the index, then the slots.

        A budget that holds the full cache needs no retrieval: unless the tokens to select or to
        reuse are given, everything stays in memory, as under `Full`. Below that, each layer has its
        own slots, for reuse, where the budget holds one selection per layer beside any index that
        will do. Otherwise (or with `reuse_tokens` 0) two preload buffers serve all layers in turn
        (appendix A.2), and what that frees goes to the index.
        """
        smallest: list[int] = []
        if self.selected_tokens is None and self.reuse_tokens is None and not request.must_tier:
            everything = resident_plan(request)
            if request.limit_bytes is None or everything.total_bytes <= request.limit_bytes:
                return self, everything
            smallest.append(everything.total_bytes)  # of a short text it is less than an index
        candidates, lesser = self._candidates(request)
        for group in (candidates, *([candidate] for candidate in lesser)):
            for shared in (False, True) if self.reuse_tokens != 0 else (True,):
                for candidate in group:
                    least = candidate._build(request, shared=shared)
                    if request.limit_bytes is None or least.total_bytes <= request.limit_bytes:
                        return candidate, candidate._grow(request, shared=shared)
                    smallest.append(least.total_bytes)
        request.require(min(smallest), self.name)
        raise AssertionError("require() refuses a budget below the least")

    def _candidates(self, request: SizingRequest) -> "tuple[list[KVSwap], list[KVSwap]]":
        """This policy with its open choices made, best first; and lesser ones for tight budgets.

        Rank goes before bits: on the bundled model 4 bits cost little, a rank below 32 costs much,
        and a basis made from the prompt's own keys needs half as much again
        (docs/methods/kvswap.md). Before the rank falls below what works, the window shrinks and
        fewer tokens are selected.
        """
        joint = request.shape.joint_dim
        wide, narrow = max(48, joint // 384 * 16), max(32, joint // 32)
        if not request.has_adapter:
            wide, narrow = wide * 3 // 2, narrow * 3 // 2
        choices: list[tuple[int, Literal[16, 8, 4]]] = [
            (wide, 8), (narrow, 8), (wide, 4), ((wide + narrow) // 2, 4), (narrow, 4),
        ]  # fmt: skip
        out = [
            replace(self, rank=min(joint, self.rank or rank), index_bits=self.index_bits or bits)
            for rank, bits in choices
        ]
        small = replace(out[-1], window_tokens=min(32, self.window_tokens))
        lesser = [small]
        if self.selected_tokens is None and request.limit_bytes is not None:
            lesser.extend(
                replace(small, selected_tokens=max(self.group_tokens, tokens))
                for tokens in (256, 128)
            )
        if self.rank is None:
            lesser.append(replace(lesser[-1], rank=min(joint, narrow * 3 // 4)))
        return out, lesser

    def _selected_units(self, request: SizingRequest) -> int:
        max_units = ceil_div(request.max_tokens, self.group_tokens)
        if self.selected_tokens is None:
            if request.limit_bytes is None:
                return max_units
            return min(max_units, max(1, PAPER_SELECTED_TOKENS // self.group_tokens))
        return min(max_units, self.selected_tokens // self.group_tokens)

    def _grow(self, request: SizingRequest, *, shared: bool) -> SlotPlan:
        """The plan with as many slots, then as large score chunks, as the budget allows."""
        selected = self._selected_units(request)
        max_units = ceil_div(request.max_tokens, self.group_tokens)
        most = selected
        if not shared and self.reuse_tokens is not None:
            most = max(selected, self.reuse_tokens // self.group_tokens)
        elif not shared and request.limit_bytes is None:
            most = max_units
        most = min(max_units, most)
        plan = largest_plan(
            request, lambda slots: self._build(request, slots, shared=shared), selected, most
        )
        chunk = CHUNK_TOKENS
        while chunk > SMALLEST_CHUNK_TOKENS:
            larger = self._build(request, plan.num_slots, shared=shared, score_tokens=chunk)
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
        shared: bool,
        score_tokens: int = SMALLEST_CHUNK_TOKENS,
    ) -> SlotPlan:
        """Price a plan with `num_slots` slots a pool; one selection if None."""
        assert self.rank is not None
        assert self.index_bits is not None
        shape, batch = request.shape, request.batch
        max_units = ceil_div(request.max_tokens, self.group_tokens)
        selected = self._selected_units(request)
        num_slots = selected if num_slots is None else num_slots
        sizes = {
            "batch": batch, "max_units": max_units, "group_tokens": self.group_tokens,
            "rank": self.rank, "bits": self.index_bits,
        }  # fmt: skip
        turned, table = self.index_block_tokens > 0, 0
        per_layer = LowRankIndex.num_bytes(shape, **sizes, turned=turned)
        sizes["rank"], blocks = self._widest(request), {}
        if turned:
            blocks = {"block_tokens": self.index_block_tokens}
            table = LowRankIndex.table_bytes(
                shape, max_units=max_units, group_tokens=self.group_tokens, **blocks
            )
        scratch = LowRankIndex.scratch_bytes(
            shape, **sizes, chunk_tokens=score_tokens, turned=turned, **blocks
        )
        if not request.has_adapter:
            scratch += 16 * shape.joint_dim**2
        return make_plan(
            request, group_tokens=self.group_tokens, num_slots=max(num_slots, 2),
            selected_units=selected,
            sink_slots=ceil_div(self.sink_tokens, self.group_tokens),
            window_slots=ceil_div(self.window_tokens, self.group_tokens) + 1,
            shared_pools=shared,
            compact=self.attend == "selected" and num_slots > selected,
            index_bytes=shape.num_layers * per_layer + table, scratch_bytes=scratch,
            score_tokens=score_tokens,
        )  # fmt: skip

    def _widest(self, request: SizingRequest) -> int:
        """The most components that a layer has."""
        assert self.rank is not None
        shared = self.layer_ranks == "measured" and self.rank <= len(request.widest_ranks)
        return request.widest_ranks[self.rank - 1] if shared else self.rank

    # Parts ------------------------------------------------------------------------------------

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
