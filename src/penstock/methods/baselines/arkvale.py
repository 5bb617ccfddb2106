"""ArkVale: pages ranked by a bounding volume of their keys. Source: ArkVale (NeurIPS 2024)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.engine.scored_policy import ScoredPolicy


@dataclass(frozen=True, kw_only=True)
class ArkVale(ScoredPolicy):
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

    @override
    def summary_bytes(self, shape: KVShape) -> int:
        """Two vectors of a key's size."""
        return 2 * shape.joint_dim * shape.dtype.itemsize

    @override
    def summarise(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The middle between the smallest and the largest component, and the mean distance of the
        keys' components from it. Both [rows, kv_heads, pages, head_dim]"""
        # Halved before they are added: their sum may be more than float16 holds.
        centre = keys.amin(dim=3).mul_(0.5).add_(keys.amax(dim=3), alpha=0.5)
        return centre, (keys - centre.unsqueeze(3)).abs_().mean(dim=3)

    @override
    def score(self, summary: tuple[Tensor, ...], query: Tensor) -> Tensor:
        """The largest product of the query with a box: q . centre + |q| . half-extent."""
        centre, extent = summary
        return centre @ query + extent @ query.abs()
