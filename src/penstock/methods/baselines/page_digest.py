"""PageDigestIndex: centre and mean half-extents of each page's keys (ArkVale's cuboid-mean)."""

import torch
from torch import Tensor

from penstock.methods.baselines.page_summary import PageSummaryIndex


class PageDigestIndex(PageSummaryIndex):
    """Scores a page by the largest product of the query with a box around the page's centre.

    Source: ArkVale (Chen et al., NeurIPS 2024), its bounding volume "cuboid-mean": the centre is
    the middle between the smallest and the largest component, and the half-extent is the mean
    distance of the keys' components from it. The most that a box can give is q . centre +
    |q| . half_extent.
    """

    @staticmethod
    def summarise(pages: Tensor) -> tuple[Tensor, Tensor]:
        """See `PageSummaryIndex.summarise`: centre and half-extents."""
        # Halved before they are added: their sum may be more than float16 holds.
        centre = pages.amin(dim=2).mul_(0.5).add_(pages.amax(dim=2), alpha=0.5)
        return centre, (pages - centre.unsqueeze(2)).abs_().mean(dim=2)

    @staticmethod
    def estimate(first: Tensor, second: Tensor, queries: Tensor) -> Tensor:
        """See `PageSummaryIndex.estimate`."""
        return torch.matmul(first, queries) + torch.matmul(second, queries.abs())
