"""ArkVale: pages ranked by a bounding volume of their keys. Source: ArkVale (NeurIPS 2024)."""

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.choices import Choice
from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy, ceil_div
from penstock.engine.retrieval_policy import SELECTED, AheadPolicy, IndexSize
from penstock.methods.baselines.page_digest import PageDigestIndex


@dataclass(frozen=True, kw_only=True)
class ArkVale(AheadPolicy):
    """Page eviction that can be undone, per KV head.

    Source: ArkVale (Chen et al., NeurIPS 2024): a full page is backed up and summarised by a
    digest, a bounding volume of its keys; the pages whose volumes promise the largest products
    with the query are recalled and attended to. Of its volumes the one that did best, the
    "cuboid-mean". The page of 16 tokens is that of LouisKV's comparison (section 5.1, "Baselines",
    of that paper); the original's is 32.

    Differences: pages are backed up in the store, not in host memory; the page that leaves a slot
    is the oldest (FIFO) among those not selected, not the one with the lowest importance; only a
    step's selection is recalled, so memory for pages beyond it (`reuse_tokens`) holds what earlier
    steps recalled; every KV head has its own pages, and query heads that share one add their
    estimates; its first layers are exempt with `full_layers` only.
    """

    name: ClassVar[str] = "arkvale"
    per_head: ClassVar[bool] = True
    device_tier: ClassVar[bool] = True

    group_tokens: int = 16
    """Tokens of a page."""

    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("group_tokens", (8, 16, 32, 64), "tokens of a page"),
        SELECTED,
    )

    def index_sizes(self, request: SizingRequest) -> list[tuple["SelectionPolicy", IndexSize]]:
        """See `BaselinePolicy.index_sizes`: the digests have one size."""
        sizes = {
            "batch": request.batch,
            "max_groups": ceil_div(request.max_tokens, self.group_tokens),
        }
        held = PageDigestIndex.num_bytes(request.shape, **sizes)
        return [(self, IndexSize(held, PageDigestIndex.scratch_bytes(request.shape, **sizes)))]

    def make_index(self, request: IndexRequest) -> KeyIndex:
        """See `SelectionPolicy.make_index`."""
        return PageDigestIndex(
            request.shape, batch=request.batch, max_groups=request.max_groups,
            group_tokens=request.group_tokens, device=request.device,
        )  # fmt: skip
