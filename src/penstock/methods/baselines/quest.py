"""Quest: pages ranked by an upper bound of their keys' products. Source: arXiv 2406.10774."""

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.choices import Choice
from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy, ceil_div
from penstock.engine.retrieval_policy import SELECTED, AheadPolicy, IndexSize
from penstock.methods.baselines.page_bounds import PageBoundsIndex


@dataclass(frozen=True, kw_only=True)
class Quest(AheadPolicy):
    """Query-aware page selection, per KV head.

    Source: Quest (arXiv 2406.10774), section 3: the element-wise minimum and maximum of a page's
    keys bound the product with any query; the pages with the highest bounds are attended to.

    Differences: the original keeps all of KV in device memory and saves only its reading; here
    pages lie in the store and missing ones are fetched, with FIFO reuse of slots. Query heads that
    share a KV head add their bounds (the original is for MHA). Its first two layers are exempt with
    `full_layers=2` only.
    """

    name: ClassVar[str] = "quest"
    per_head: ClassVar[bool] = True
    device_tier: ClassVar[bool] = True

    group_tokens: int = 16
    """Tokens of a page."""

    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("group_tokens", (8, 16, 32, 64), "tokens of a page"),
        SELECTED,
    )

    def index_sizes(self, request: SizingRequest) -> list[tuple["SelectionPolicy", IndexSize]]:
        """See `BaselinePolicy.index_sizes`: the bounds have one size."""
        sizes = {
            "batch": request.batch,
            "max_groups": ceil_div(request.max_tokens, self.group_tokens),
        }
        held = PageBoundsIndex.num_bytes(request.shape, **sizes)
        return [(self, IndexSize(held, PageBoundsIndex.scratch_bytes(request.shape, **sizes)))]

    def make_index(self, request: IndexRequest) -> KeyIndex:
        """See `SelectionPolicy.make_index`."""
        return PageBoundsIndex(
            request.shape, batch=request.batch, max_groups=request.max_groups,
            group_tokens=request.group_tokens, device=request.device,
        )  # fmt: skip
