"""LouisKV: prompt clusters and answer segments, retrieved when they are due. Source: ICLR 2026."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.errors import ConfigError
from penstock.core.selection import Selection
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.device_tier.device_index import DeviceIndex
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy
from penstock.engine.retrieval_policy import SELECTED, AheadPolicy, IndexSize
from penstock.engine.sizing import resident_plan, whole_layers_apart, with_whole_layers
from penstock.methods.louiskv.device_index import DeviceSemanticUnits, DeviceUnitSizes
from penstock.methods.louiskv.index import SemanticUnitsIndex, UnitSizes
from penstock.methods.louiskv.semantic_boundaries import SemanticBoundaries

CLUSTER_TOKENS = 16
"""Average size of a cluster, and of a page in the ablation (LouisKV, section 5.1 and D.3)."""
FINE_TOKENS = 4
"""The same where `lost_mass` decides: single facts of pretrained models are lost in units of 16."""
BLOCK_CLUSTERS = 256
"""Of a block at most: each key is compared with all of them, ten times."""
BLOCK_TOKENS = (4096, 2048, 1024, 512, 256, 128)
"""Prompt tokens that are clustered together, best first."""
MOST_CLUSTER_TOKENS = 128
"""To which clusters grow, twofold each, where the budget wants it."""
FEW_UNITS = 4
"""Units of average size that a selection should hold."""
UNITS = ("clusters+segments", "pages")
NEARNESS = ("distance", "cosine")
SUMMARIES = ("mean", "mean+spread")
LOST_MASS = 0.02
"""Of the attention of a KV head; see `LouisKV.lost_mass`."""


@dataclass(frozen=True, kw_only=True)
class LouisKV(AheadPolicy):
    """Retrieval when what is held loses attention, of units that follow the meaning, per KV head.

    Source: LouisKV (ICLR submission 2026, "Efficient KV cache retrieval for long input-output
    sequences"). A layer compares each decode step's query with the one before (mean cosine over all
    heads); below tau begins a new segment, and only then units are scored and fetched. The prompt's
    keys are clustered by k-means, the answer is cut into segments at the boundaries; a unit's index
    vector is the mean of its keys. Scores are a softmax over units per query head, averaged over
    the heads that share a KV head; units are taken in order until the budget of tokens is met
    exactly, the last one in part. Sinks S and local window W are always attended to.

    Where `tau` is not given, something else decides, which is ours. Queries of pretrained models
    hardly turn, while what they attend to changes all the time: tau 0.7 gives Qwen2.5-Coder-0.5B
    segments of 225 steps. So units are scored at every step, as shares of all attention: a softmax
    in which they count by their tokens, heads weighed by the share of their attention that was on
    units in the step before. What a new selection would gain is added up from step to step; above
    `lost_mass` the KV head retrieves. A held unit gives way to one of twice its score. The first
    step retrieves. Segments have `cluster_tokens` tokens. Units are smaller than the paper's then,
    and ranked by their keys' spread too: single facts were lost in mean keys of 16 tokens.

    The paper's settings: tau 0.85, S 32, W 512, B 512 for long input and short output
    (Llama-3.1-8B); tau 0.7, W 128, B 1024 with S the prompt for short input and long output, and
    tau 0.7, S 64, W 256, B 1024 for both long (Qwen3-8B). S and W of the last are the defaults
    here; B is `selected_tokens`, and 400 under a memory limit as for the other methods.

    Differences: KV lies in the store, single tokens of single heads, not in host memory. The prompt
    is clustered in blocks of `block_tokens` and not as a whole, so that memory and work stay
    bounded; beside the prefill only where the budget holds the keys of two blocks in every layer,
    when the first step wants it otherwise (`beside`), and then a later prompt is clustered together
    with all that came before it. Sinks and padding take part in k-means, but are not selected.
    k-means is plain Lloyd, ten iterations by distance from keys drawn at random: the paper names
    none of these. Queries are compared after the rotary embedding. The window holds the newest W
    tokens: they leave it one by one, not a segment at a time, and a segment of which a part has
    left can be selected for that part. Tokens that leave the window are not seen until the next
    boundary, as in the paper, but where all of the past fits the budget: then they join the
    selection, so that a full budget is full attention. The paper keeps its first two layers whole:
    here that is `full_layers=2`, none unless asked for. Where the pool of units is full,
    neighbouring segments are merged. With `predict`, boundaries are looked for with predicted
    queries. A selection is never shared between layers, so that the smallest memory holds one for
    each.
    """

    name: ClassVar[str] = "louiskv"
    per_head: ClassVar[bool] = True
    device_tier: ClassVar[bool] = True

    tau: float | None = None
    """Mean cosine similarity of consecutive queries below which a new segment begins and all heads
    retrieve, as in the paper; None: `lost_mass` decides."""
    lost_mass: float = LOST_MASS
    """What a KV head may lose by keeping its selection, as the index estimates it, before it
    retrieves: shares of a step's attention, added up over steps; not used with `tau`."""
    boundaries: str = "adaptive"
    """"adaptive": by tau or lost_mass; "stride:N": every N steps; "every": every step retrieves,
    and tau only cuts segments."""
    units: str = "clusters+segments"
    """Or "pages": of `cluster_tokens` consecutive tokens, by their mean keys."""
    cluster_tokens: int | None = None
    """Tokens of a cluster on average; None: the paper's 16 with its own triggers, 4 where
    `lost_mass` decides; more where the budget is tight."""
    block_tokens: int | None = None
    """Prompt tokens that are clustered together; None: chosen from the budget."""
    beside: bool | None = None
    """Whether the prompt is clustered on a thread beside the prefill, which holds two blocks of
    keys in every layer, or when the first step wants it, which holds one in all; None: chosen from
    the budget, beside first."""
    nearness: str = "distance"
    """What k-means goes by: "distance" or "cosine"."""
    summary: str | None = None
    """What stands for a unit in the ranking: "mean" is the paper's mean key; "mean+spread" has the
    keys' spread beside it, one number more, and ranks units by what their tokens are expected to
    be attended to (`kernels.unit_selection.unit_scores`). None: the spread where `lost_mass`
    decides, else the mean."""
    window_tokens: int = 256
    """The paper's W: newest tokens that are always attended to."""
    sink_tokens: int = 64
    """The paper's S: first tokens of the sequence that are always attended to."""

    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("lost_mass", (0.005, LOST_MASS, 0.08), "attention that may be lost before a read"),
        SELECTED,
    )

    @override
    def __post_init__(self) -> None:
        AheadPolicy.__post_init__(self)
        self.stride  # noqa: B018 - reads the option
        if self.group_tokens != 1:
            raise ConfigError("group_tokens must be 1: louiskv's units are made of single tokens")
        if self.reuse_tokens is not None:
            raise ConfigError(
                "louiskv has no reuse_tokens: what was retrieved stays until the next boundary"
            )
        if not 0 <= self.lost_mass < 1:
            raise ConfigError(f"lost_mass={self.lost_mass} is a share: give 0 or more, below 1")
        if self.tau is not None and self.lost_mass != LOST_MASS:
            raise ConfigError("tau and lost_mass both say when to retrieve; give one of them")
        if self.tau is not None and not -1 <= self.tau <= 1.01:
            raise ConfigError(f"tau={self.tau} is a cosine: give -1 to 1, above 1 for every step")
        for name, value, known in (
            ("units", self.units, UNITS), ("nearness", self.nearness, NEARNESS),
            ("summary", self.summary or SUMMARIES[0], SUMMARIES),
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
    def _by_mass(self) -> bool:
        """Whether `lost_mass` decides."""
        return self.tau is None and self.boundaries == "adaptive"

    @property
    def _fine(self) -> bool:
        """Whether units are small and have their spread, unless it is said."""
        return self._by_mass and not self._pages

    @property
    def _has_spread(self) -> bool:
        return self.summary == "mean+spread" or (self.summary is None and self._fine)

    @property
    def _segment_steps(self) -> int:
        """Steps after which a segment ends; 0: where `tau` says."""
        if self.stride is None and self.tau is None:
            return self.cluster_tokens or CLUSTER_TOKENS
        return self.stride or 0

    @property
    def _pages(self) -> bool:
        return self.units == "pages"

    # Memory -----------------------------------------------------------------------------------

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple["SelectionPolicy", IndexSize]]:
        """Blocks give way first, then clusters."""
        out = []
        for cluster, block, beside in self._choices(request.max_tokens):
            policy = replace(self, cluster_tokens=cluster, block_tokens=block, beside=beside)
            if request.device_tier:
                out.append((policy, policy._device_size(request)))
                continue
            sizes = policy._unit_sizes(request.max_tokens)
            size = {"batch": request.batch, "max_tokens": request.max_tokens}
            held = SemanticUnitsIndex.num_bytes(
                request.shape, sizes, rows_per_sequence=request.rows_per_sequence, **size
            )
            scratch = SemanticUnitsIndex.scratch_bytes(request.shape, sizes, **size)
            out.append((policy, IndexSize(held, scratch)))
        return out  # type: ignore[return-value]

    def _device_size(self, request: SizingRequest) -> IndexSize:
        if self._pages:
            raise ConfigError(
                "louiskv's units=pages is for stores on disk; the device tier has arkvale"
            )
        sizes = self._device_sizes(request.max_tokens)
        size = {"rows": request.batch, "max_tokens": request.max_tokens}
        held = DeviceSemanticUnits.num_bytes(
            request.shape, sizes, rows_per_sequence=request.rows_per_sequence, **size
        )
        return IndexSize(held, DeviceSemanticUnits.scratch_bytes(request.shape, sizes, **size))

    def _device_sizes(self, max_tokens: int) -> DeviceUnitSizes:
        assert self.cluster_tokens is not None, "plan() makes the choices"
        assert self.block_tokens is not None, "plan() makes the choices"
        return DeviceUnitSizes(
            cluster_tokens=self.cluster_tokens, block_tokens=self.block_tokens,
            spare_units=max_tokens // (8 * self.cluster_tokens), cosine=self.nearness == "cosine",
            spread=self._has_spread, upkeep=self._by_mass,
        )  # fmt: skip

    def _choices(self, max_tokens: int) -> list[tuple[int, int, bool]]:
        """Tokens of a cluster and of a block, and where it is clustered; best first."""
        ways = (True, False) if self.beside is None else (self.beside,)
        out = []
        for cluster in self._cluster_choices:
            least = 2 * cluster
            blocks = [each for each in BLOCK_TOKENS if each <= cluster * BLOCK_CLUSTERS]
            if self.block_tokens is not None:
                blocks = [self.block_tokens]
            if self._pages:
                blocks = [least]
            sizes = [max(least, min(block, max_tokens)) for block in blocks]
            out += [(cluster, size, way) for size in sizes for way in ways]
        return list(dict.fromkeys(out))

    @property
    def _cluster_choices(self) -> list[int]:
        """Tokens of a cluster, best first."""
        if self.cluster_tokens is not None:
            return [self.cluster_tokens]
        sizes = [FINE_TOKENS if self._fine else CLUSTER_TOKENS]
        while sizes[-1] < MOST_CLUSTER_TOKENS:
            sizes.append(2 * sizes[-1])
        return sizes

    def _unit_sizes(self, max_tokens: int) -> UnitSizes:
        assert self.cluster_tokens is not None, "plan() makes the choices"
        assert self.block_tokens is not None, "plan() makes the choices"
        spare = 0 if self._pages else max_tokens // (8 * self.cluster_tokens)
        return UnitSizes(
            cluster_tokens=self.cluster_tokens, block_tokens=self.block_tokens,
            spare_units=spare, pages=self._pages, cosine=self.nearness == "cosine",
            squares=self._has_spread, upkeep=self._by_mass, beside=bool(self.beside),
        )  # fmt: skip

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """Every layer keeps its own selection."""
        if self.selected_tokens is None and not request.must_tier:
            everything = resident_plan(request)
            if request.limit_bytes is None or everything.total_bytes <= request.limit_bytes:
                return self, everything
        rest, whole = whole_layers_apart(request, self.full_layers)
        limit, choices = request.limit_bytes, self._ranked_choices(rest)
        if limit is None:
            # As many clusters as ever, but no more memory than all of the cache would take.
            limit, finest = resident_plan(request).total_bytes, _cluster_tokens(choices[0][1])
            choices = [choice for choice in choices if _cluster_tokens(choice[1]) == finest]
        found: list[tuple[SelectionPolicy, SlotPlan]] = []
        for selected, policy, size in choices:
            # The selection that is reused: numbers and whether they count, old and new.
            kept = (
                0 if request.device_tier else 18 * request.batch * selected * rest.shape.num_layers
            )
            with_kept = IndexSize(size.index_bytes, size.scratch_bytes + kept)
            plan = self._build(rest, with_kept, selected, selected, shared=False)
            plan = with_whole_layers(plan, whole)
            if plan.total_bytes <= limit:
                return policy, plan
            found.append((policy, plan))
        if self.selected_tokens is None and not request.must_tier:
            found.append((self, resident_plan(request)))  # less than an index, of a short text
        smallest = min(found, key=lambda pair: pair[1].total_bytes)
        request.require(smallest[1].total_bytes, self.name)
        return smallest

    def _ranked_choices(
        self, request: SizingRequest
    ) -> list[tuple[int, SelectionPolicy, IndexSize]]:
        """Units of a selection, and the index to make them of; best first."""
        sizes = self.index_sizes(request)
        choices = [(n, *pair) for n in self._selections(request) for pair in sizes]
        # A selection of less than a few whole units comes last.
        choices.sort(key=lambda choice: choice[0] < FEW_UNITS * _cluster_tokens(choice[1]))
        return choices

    # Selection --------------------------------------------------------------------------------

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        boundaries = SemanticBoundaries(
            request.shape, rows=request.batch, rows_per_sequence=request.rows_per_sequence,
            tau=self.tau or 0.0, stride=self._segment_steps, device=request.device,
        )  # fmt: skip
        return SemanticUnitsIndex(
            request.shape, self._unit_sizes(request.max_units), boundaries, batch=request.batch,
            max_tokens=request.max_units, rows_per_sequence=request.rows_per_sequence,
            scaling=request.scaling, every_step=self.boundaries == "every",
            lost_mass=self.lost_mass if self._by_mass else None, device=request.device,
        )  # fmt: skip

    @override
    def make_device_index(self, request: IndexRequest) -> DeviceIndex:
        """Units and boundaries live on the device."""
        return DeviceSemanticUnits(
            request.shape, self._device_sizes(request.max_units), rows=request.batch,
            rows_per_sequence=request.rows_per_sequence, max_tokens=request.max_units,
            wanted=request.selected_units, every_step=self.boundaries == "every",
            lost_mass=self.lost_mass if self._by_mass else None, scaling=request.scaling,
            device=request.device, tau=self.tau or 0.0, stride=self._segment_steps,
        )  # fmt: skip

    @override
    def select(
        self, index: KeyIndex, query: Tensor, first_unit: NDArray[np.int64], end_unit: int,
        wanted: int,
    ) -> Selection:  # fmt: skip
        """Between retrievals what it was."""
        assert isinstance(index, SemanticUnitsIndex), "louiskv ranks whole units"
        if index.score_is_replaced:
            return super().select(index, query, first_unit, end_unit, wanted)
        return index.retrieve(query, first_unit, end_unit, wanted)


def _cluster_tokens(policy: SelectionPolicy) -> int:
    assert isinstance(policy, LouisKV)
    assert policy.cluster_tokens is not None
    return policy.cluster_tokens
