"""Full: the whole cache stays in fast memory. Source: the plain transformer (no paper)."""

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.policies.base import SelectionPolicy


@dataclass(frozen=True, kw_only=True)
class Full(SelectionPolicy):
    """Full attention over a preallocated cache in memory: the oracle, and the most memory.

    Source: none; the reference that every method approximates.
    """

    name: ClassVar[str] = "full"
    retrieves: ClassVar[bool] = False
    stays_resident: ClassVar[bool] = True

    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """One slot per token, no disk."""
        size = request.shape.full_cache_bytes(request.batch, request.max_tokens)
        # One additive mask per row serves all layers.
        mask = request.batch * request.max_tokens * request.shape.dtype.itemsize
        request.require(size + mask, "the full cache")
        plan = SlotPlan(
            batch=request.batch, max_groups=request.max_tokens, group_tokens=1, num_slots=0,
            selected_groups=0, sink_slots=0, ring_slots=0, shared_pools=False, compact=False,
            index_bytes=0, fixed_bytes=mask, unit_bytes=request.shape.token_bytes, staging_rows=0,
            pool_bytes=size,
        )  # fmt: skip
        return self, plan
