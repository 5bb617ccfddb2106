"""FlexGen: everything on disk, everything read again at each step. Source: FlexGen (ICML 2023)."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.policy import SelectionPolicy
from penstock.engine.sizing import streaming_plan


@dataclass(frozen=True, kw_only=True)
class FlexGen(SelectionPolicy):
    """Offload the entire cache and restore it layer by layer for full attention.

    Source: FlexGen (Sheng et al., ICML 2023), as KVSwap section 4.2 uses it.
    Differences: a layer is restored block by block and merged by log-sum-exp, so that memory is
    bounded; the original holds one whole layer. This is also what exact mode does.
    """

    name: ClassVar[str] = "flexgen"
    retrieves: ClassVar[bool] = False
    device_tier: ClassVar[bool] = True

    group_tokens: int = 64
    """Tokens per unit on disk; reads of consecutive units are merged anyway."""

    @property
    @override
    def unit_tokens(self) -> int:
        return self.group_tokens

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """Two stream buffers, as large as the budget allows up to two full blocks."""
        return self, streaming_plan(request, self.group_tokens, "streaming the cache")
