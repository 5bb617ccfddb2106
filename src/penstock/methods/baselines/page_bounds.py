"""PageBoundsIndex: smallest and largest key components of each page (Quest, section 3)."""

import torch
from torch import Tensor

from penstock.methods.baselines.page_summary import PageSummaryIndex


class PageBoundsIndex(PageSummaryIndex):
    """Scores a page by the largest product that any key within its bounds could have.

    Source: Quest (arXiv 2406.10774), section 3.2: sum over components of
    max(q_i * min_i, q_i * max_i), which is relu(q) . max - relu(-q) . min.
    """

    @staticmethod
    def summarise(pages: Tensor) -> tuple[Tensor, Tensor]:
        """See `PageSummaryIndex.summarise`: smallest and largest components."""
        return pages.amin(dim=2), pages.amax(dim=2)

    @staticmethod
    def estimate(first: Tensor, second: Tensor, queries: Tensor) -> Tensor:
        """See `PageSummaryIndex.estimate`."""
        above = torch.matmul(second, queries.clamp_min(0))
        return above + torch.matmul(first, queries.clamp_max(0))
