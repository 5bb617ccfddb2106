"""ShadowKV: landmarks choose chunks, keys are rebuilt from low rank. Source: arXiv 2410.21465."""

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy, ceil_div
from penstock.engine.retrieval_policy import SELECTED, BaselinePolicy, IndexSize
from penstock.methods.baselines.shadow_keys import ShadowKeyIndex

ORIGINAL_OUTLIERS, ORIGINAL_SELECTED = 48, 256
"""Chunks of 8 tokens per KV head: resident ones, and those that a step selects beside them."""
RANK = 160
"""Components of the original, for keys of 8 heads of 128."""
SHARES = (
    (1, 1.0), (2, 1.0), (2, 0.6), (4, 0.6), (4, 0.4), (8, 0.4), (8, 0.2), (16, 0.2), (16, 0.1),
    (16, 0.05), (32, 0.05), (32, 0.025),
)  # fmt: skip
"""Units of a landmark, and the rank as a share of the largest; best first. The first is the
original's; the order of the others is ours: landmarks and components shrink in turn."""


def variants(joint: int) -> list[tuple[int, int]]:
    """Units of a landmark and rank for keys of so many components, all heads together.

    Under a budget, narrow keys have at most a quarter of their components: at equal bytes, finer
    landmarks are worth more (research/notes/2026-11-26-louiskv-trigger.md).
    """
    most = max(1, min(RANK, joint // 4))
    found = [(1, min(RANK, joint))]
    found += [(units, max(1, round(share * most))) for units, share in SHARES]
    return list(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class ShadowKV(BaselinePolicy):
    """Chunks chosen by landmarks per KV head, with keys rebuilt from a low-rank pre-RoPE cache.

    Source: ShadowKV (arXiv 2410.21465), sections 3 and 4: joint-head pre-RoPE keys have low rank
    and stay in fast memory in factored form; values are offloaded; a landmark is the mean of a
    chunk's post-RoPE keys; a few outlier chunks are resident. Knobs of setting A as in KVSwap,
    section 4.3: chunk size, outliers, rank.

    Differences:
        - K lies beside V in the store and is read with it, then overwritten by the rebuilt keys:
          twice the bytes of the original, which reads V alone, for the same selection.
        - Outliers are part of the selection instead of beside it, so that every method attends to
          as many tokens; there are at most as many in proportion as in the original, 48 of
          48 + 256. Their true keys are in fast memory; their values are read once and stay in
          slots, or are read each step where layers share the slots (no reuse).
        - Decoded tokens close into chunks like all others, with low-rank keys (the original keeps
          them whole); the newest are in the window.
        - Larger chunks mean landmarks that several units of `group_tokens` share: units are what
          the store holds. Units of one chunk have one score.
        - The basis is made at the first decode step, from a prompt sampled where it is long, once:
          see `ShadowKeyIndex`. A model without a rotary embedding that is known has its post-RoPE
          keys factored, which takes more rank.
    """

    name: ClassVar[str] = "shadowkv"
    per_head: ClassVar[bool] = True

    group_tokens: int = 8
    """Tokens of a unit, the original's chunk."""
    rank: int | None = None
    """Components per token, all KV heads of a sequence together; None: 160, or less under a tight
    budget: then at most a quarter of what keys have."""
    landmark_units: int | None = None
    """Units that share a landmark; None: 1, or more under a tight budget."""
    outlier_chunks: int = ORIGINAL_OUTLIERS
    """Most outlier units per KV head; fewer in proportion to a small selection, and under the
    tightest budgets."""

    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("rank", (None, 160, 96, 64, 32), "components of the keys in memory, per token"),
        Choice("group_tokens", (8, 16), "tokens of a chunk"),
        SELECTED,
    )

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in (("rank", 1), ("landmark_units", 1), ("outlier_chunks", 0)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ConfigError(f"{field}={value} must be at least {least}")

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """Unless `reuse_tokens` is given, layers share their slots
        (no reuse) where slots of their own would halve the rank."""
        policy, plan = super().plan(request)
        if plan.is_resident or plan.shared_pools or self.reuse_tokens is not None:
            return policy, plan
        try:
            sharing, shared = super(ShadowKV, replace(self, reuse_tokens=0)).plan(request)
        except BudgetError:
            return policy, plan
        assert isinstance(policy, ShadowKV)
        assert isinstance(sharing, ShadowKV)
        if 2 * (policy.rank or 0) > (sharing.rank or 0):
            return policy, plan
        return sharing, shared

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple["SelectionPolicy", IndexSize]]:
        """Larger chunks and lower ranks, then fewer outliers."""
        selected = self._selections(request)[0]
        in_proportion = selected * ORIGINAL_OUTLIERS // (ORIGINAL_OUTLIERS + ORIGINAL_SELECTED)
        most = min(self.outlier_chunks, in_proportion)
        found = [
            replace(
                self, rank=self.rank or rank, landmark_units=self.landmark_units or units,
                outlier_chunks=most,
            )
            for units, rank in variants(request.rows_per_sequence * request.shape.head_dim)
        ]  # fmt: skip
        found += [replace(found[-1], outlier_chunks=fewer) for fewer in (most // 2, 0)]
        return [(variant, variant._size(request, selected)) for variant in found]

    def _size(self, request: SizingRequest, selected: int) -> IndexSize:
        assert self.rank is not None
        assert self.landmark_units is not None
        sizes = {
            "batch": request.batch, "max_units": ceil_div(request.max_tokens, self.group_tokens),
            "group_tokens": self.group_tokens, "rows_per_sequence": request.rows_per_sequence,
            "rank": self.rank,
        }  # fmt: skip
        held = ShadowKeyIndex.num_bytes(
            request.shape, landmark_units=self.landmark_units, num_outliers=self.outlier_chunks,
            **sizes,
        )  # fmt: skip
        scratch = ShadowKeyIndex.scratch_bytes(request.shape, selected_units=selected, **sizes)
        return IndexSize(held, scratch)

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        assert self.rank is not None, "plan() makes the choices"
        assert self.landmark_units is not None, "plan() makes the choices"
        return ShadowKeyIndex(
            request.shape, batch=request.batch, max_units=request.max_units,
            group_tokens=request.group_tokens, rows_per_sequence=request.rows_per_sequence,
            rank=self.rank, landmark_units=self.landmark_units, num_outliers=self.outlier_chunks,
            scaling=request.scaling, rotary=request.rotary, device=request.device,
        )  # fmt: skip
