"""Full: the whole cache stays in fast memory. Source: the plain transformer (no paper)."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.policy import SelectionPolicy
from penstock.engine.sizing import resident_plan


@dataclass(frozen=True, kw_only=True)
class Full(SelectionPolicy):
    """Full attention over a preallocated cache in memory: the oracle, and the most memory.

    Source: none; the reference that every method approximates.
    """

    name: ClassVar[str] = "full"
    retrieves: ClassVar[bool] = False
    stays_resident: ClassVar[bool] = True

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """The whole cache in memory, no disk."""
        plan = resident_plan(request)
        request.require(plan.total_bytes, "the full cache")
        return self, plan
