"""Quest: pages ranked by an upper bound of their keys' products. Source: arXiv 2406.10774."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.engine.scored_policy import ScoredPolicy


@dataclass(frozen=True, kw_only=True)
class Quest(ScoredPolicy):
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

    @override
    def summary_bytes(self, shape: KVShape) -> int:
        """Two vectors of a key's size."""
        return 2 * shape.joint_dim * shape.dtype.itemsize

    @override
    def summarise(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest of each component. Both [rows, kv_heads, pages, head_dim]"""
        return keys.amin(dim=3), keys.amax(dim=3)

    @override
    def score(self, summary: tuple[Tensor, ...], query: Tensor) -> Tensor:
        """The largest product that any key within the bounds could have (section 3.2).

        Sum over components of max(q * low, q * high), which is relu(q) . high - relu(-q) . low.
        """
        low, high = summary
        return high @ query.clamp_min(0) + low @ query.clamp_max(0)
