"""LouisKV: clusters of the prompt and segments of the answer, retrieved at semantic boundaries."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.selection import Selection
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.indexes.base import KeyIndex
from penstock.indexes.semantic_boundaries import SemanticBoundaries
from penstock.indexes.semantic_units import SemanticUnitsIndex, UnitSizes
from penstock.policies.base import IndexRequest, SelectionPolicy, ceil_div
from penstock.policies.baselines.retrieval import BaselinePolicy, IndexSize
from penstock.policies.sizing import resident_plan

CLUSTER_TOKENS = 16
"""Average size of a cluster, and of a page in the ablation (LouisKV, section 5.1 and D.3)."""
BLOCK_TOKENS = (4096, 2048, 1024, 512, 256, 128)
"""Prompt tokens that are clustered together, best first."""
GIVING_WAY = (1, 2, 4, 8)
"""By how much clusters grow beyond `CLUSTER_TOKENS` where the budget wants it."""
UNITS = ("clusters+segments", "pages")
NEARNESS = ("distance", "cosine")


@dataclass(frozen=True, kw_only=True)
class LouisKV(BaselinePolicy):
    """Retrieval at semantic boundaries, of units that follow the meaning, per KV head.

    Source: LouisKV (ICLR submission 2026, "Efficient KV cache retrieval for long input-output
    sequences"). A layer compares each decode step's query with the one before (mean cosine over all
    heads); below tau begins a new segment, and only then units are scored and fetched. The prompt's
    keys are clustered by k-means, the answer is cut into segments at the boundaries; a unit's index
    vector is the mean of its keys. Scores are a softmax over units per query head, averaged over
    the heads that share a KV head; units are taken in order until the budget of tokens is met
    exactly, the last one in part. Sinks S and local window W are always attended to.

    The paper's settings: tau 0.85, S 32, W 512, B 512 for long input and short output
    (Llama-3.1-8B); tau 0.7, W 128, B 1024 with S the prompt for short input and long output, and
    tau 0.7, S 64, W 256, B 1024 for both long (Qwen3-8B), which are the defaults here but for B: it
    is `selected_tokens`, and 400 under a memory limit as for the other methods.

    Differences: KV lies in the store, single tokens of single heads, not in host memory. The prompt
    is clustered in blocks of `block_tokens` and not as a whole, so that memory and work stay
    bounded; sinks and padding take part in k-means, but are not selected. k-means is plain Lloyd,
    ten iterations by distance from keys drawn at random: the paper names none of these. The window
    holds the newest W tokens: they leave it one by one, not a segment at a time, and a segment of
    which a part has left can be selected for that part. What is generated before anything can be
    selected (the sequence is no longer than S + W) is clustered with the prompt. Tokens that leave
    the window are not seen until the next boundary, as in the paper, but where all of the past
    fits the budget: then they join the selection, so that a full budget is full attention. Every
    layer is selected for; the paper keeps its first two whole. Where the pool of units is full,
    neighbouring segments are merged. A selection is never shared between layers, so that the
    smallest memory holds one for each.
    """

    name: ClassVar[str] = "louiskv"
    per_head: ClassVar[bool] = True

    tau: float = 0.7
    """Mean cosine similarity of consecutive queries below which a new segment begins."""
    boundaries: str = "adaptive"
    """"adaptive": by tau; "stride:N": every N steps; "every": by tau for segments, while every
    step retrieves."""
    units: str = "clusters+segments"
    """Or "pages": of `cluster_tokens` consecutive tokens, by their mean keys."""
    cluster_tokens: int | None = None
    """Tokens of a cluster on average; None: 16, or more where the budget is tight."""
    block_tokens: int | None = None
    """Prompt tokens that are clustered together; None: chosen from the budget."""
    nearness: str = "distance"
    """What k-means goes by: "distance" or "cosine"."""
    window_tokens: int = 256
    """The paper's W: newest tokens that are always attended to."""
    sink_tokens: int = 64
    """The paper's S: first tokens of the sequence that are always attended to."""

    def __post_init__(self) -> None:
        BaselinePolicy.__post_init__(self)
        self.stride  # noqa: B018 - reads the option
        if self.group_tokens != 1:
            raise ConfigError("group_tokens must be 1: louiskv's units are made of single tokens")
        if self.reuse_tokens is not None:
            raise ConfigError(
                "louiskv has no reuse_tokens: what was retrieved stays until the next boundary"
            )
        if not -1 <= self.tau <= 1.01:
            raise ConfigError(f"tau={self.tau} is a cosine: give -1 to 1, above 1 for every step")
        for name, value, known in (
            ("units", self.units, UNITS), ("nearness", self.nearness, NEARNESS),
        ):  # fmt: skip
            if value not in known:
                raise ConfigError(f"{name}={value} is none of {', '.join(known)}")
        cluster, block = self.cluster_tokens, self.block_tokens
        if cluster is not None and cluster < 1:
            raise ConfigError(f"cluster_tokens={cluster} must be at least 1")
        if block is not None and block < 2 * (cluster or CLUSTER_TOKENS):
            raise ConfigError(
                f"block_tokens={block} must be at least two clusters of "
                f"{cluster or CLUSTER_TOKENS} tokens"
            )

    @property
    def stride(self) -> int | None:
        """Steps between boundaries, or None where tau decides.

        Raises:
            ConfigError: `boundaries` is nothing known.
        """
        if self.boundaries in ("adaptive", "every"):
            return None
        word, _, steps = self.boundaries.partition(":")
        if word != "stride" or not steps.isdecimal() or int(steps) < 1:
            raise ConfigError(
                f"boundaries={self.boundaries} is none of adaptive, every, stride:N (N steps)"
            )
        return int(steps)

    @property
    def _pages(self) -> bool:
        return self.units == "pages"

    # Memory -----------------------------------------------------------------------------------

    def index_sizes(self, request: SizingRequest) -> list[tuple["SelectionPolicy", IndexSize]]:
        """See `BaselinePolicy.index_sizes`: blocks give way first, then clusters."""
        out = []
        for cluster, block in self._choices(request.max_tokens):
            policy = replace(self, cluster_tokens=cluster, block_tokens=block)
            sizes = policy._unit_sizes(request.max_tokens)
            size = {"batch": request.batch, "max_tokens": request.max_tokens}
            held = SemanticUnitsIndex.num_bytes(
                request.shape, sizes, rows_per_sequence=request.rows_per_sequence, **size
            )
            scratch = SemanticUnitsIndex.scratch_bytes(request.shape, sizes, **size)
            out.append((policy, IndexSize(held, scratch)))
        return out  # type: ignore[return-value]

    def _choices(self, max_tokens: int) -> list[tuple[int, int]]:
        """Tokens of a cluster and of a block, best first."""
        clusters = [self.cluster_tokens] if self.cluster_tokens is not None else [
            CLUSTER_TOKENS * factor for factor in GIVING_WAY
        ]  # fmt: skip
        out = []
        for cluster in clusters:
            least = 2 * cluster
            blocks = list(BLOCK_TOKENS) if self.block_tokens is None else [self.block_tokens]
            if self._pages:
                blocks = [least]
            out += [(cluster, max(least, min(block, max_tokens))) for block in blocks]
        return list(dict.fromkeys(out))

    def _unit_sizes(self, max_tokens: int) -> UnitSizes:
        assert self.cluster_tokens is not None, "plan() makes the choices"
        assert self.block_tokens is not None, "plan() makes the choices"
        spare = 0 if self._pages else max_tokens // (8 * self.cluster_tokens)
        return UnitSizes(
            cluster_tokens=self.cluster_tokens, block_tokens=self.block_tokens,
            spare_units=spare, pages=self._pages, cosine=self.nearness == "cosine",
        )  # fmt: skip

    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """See `SelectionPolicy.plan`; every layer keeps its own selection."""
        if self.selected_tokens is None and not request.must_tier:
            everything = resident_plan(request)
            if request.limit_bytes is None or everything.total_bytes <= request.limit_bytes:
                return self, everything
        smallest: list[int] = []
        sizes = self.index_sizes(request)
        for selected in self._selections(request):
            # The selection that is reused: numbers and whether they count, old and new.
            kept = 18 * request.batch * selected * request.shape.num_layers
            for policy, size in sizes:
                with_kept = IndexSize(size.held_bytes, size.scratch_bytes + kept)
                plan = self._build(request, with_kept, selected, selected, shared=False)
                if request.limit_bytes is None or plan.total_bytes <= request.limit_bytes:
                    return policy, plan
                smallest.append(plan.total_bytes)
        request.require(min(smallest), self.name)
        raise AssertionError("require() refuses a budget below the least")

    # Selection --------------------------------------------------------------------------------

    def make_index(self, request: IndexRequest) -> KeyIndex:
        """See `SelectionPolicy.make_index`."""
        boundaries = SemanticBoundaries(
            request.shape, rows=request.batch, rows_per_sequence=request.rows_per_sequence,
            tau=self.tau, stride=self.stride, device=request.device,
        )  # fmt: skip
        return SemanticUnitsIndex(
            request.shape, self._unit_sizes(request.max_groups), boundaries, batch=request.batch,
            max_tokens=request.max_groups, rows_per_sequence=request.rows_per_sequence,
            scaling=request.scaling, every_step=self.boundaries == "every", device=request.device,
        )  # fmt: skip

    def select(
        self, index: KeyIndex, query: Tensor, first_unit: NDArray[np.int64], end_unit: int,
        wanted: int,
    ) -> Selection:  # fmt: skip
        """See `SelectionPolicy.select`; between boundaries what it was, without scoring."""
        assert isinstance(index, SemanticUnitsIndex), "louiskv ranks whole units"
        ring = max(2, ceil_div(self.window_tokens, self.group_tokens) + 1)
        position = end_unit + ring - 1
        if index.score_is_replaced:
            index.begin_step(query, first_unit, position)
            return super().select(index, query, first_unit, end_unit, wanted)
        return index.retrieve(query, first_unit, end_unit, wanted, position)
