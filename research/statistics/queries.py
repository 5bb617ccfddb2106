"""How a layer's query moves from step to step, and where LouisKV would retrieve anew."""

from collections.abc import Sequence

import torch
from torch import Tensor

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Of the cosine of consecutive queries; LouisKV takes 0.7 for long answers and 0.85 for long
prompts (section 5.2)."""


def mean_cosine(before: Tensor, now: Tensor) -> Tensor:
    """The cosine of two queries, the mean over heads.

    Source: LouisKV, section 4.1, r_t: adjacent steps are compared, not a step with the first of its
    segment. The paper does not say whether its queries are post-RoPE; both are measured.

    Args:
        before: [batch, heads, dim]
        now: [batch, heads, dim]

    Returns:
        -1 to 1. float64 [batch]
    """
    return torch.cosine_similarity(before.double(), now.double(), dim=-1).mean(dim=1)


def segment_lengths(cosines: Sequence[float], threshold: float) -> list[int]:
    """Steps of each segment: a new one begins where the cosine drops below the threshold.

    Source: LouisKV, section 4.1; its figures for comparison are in appendix D.5.

    Args:
        cosines: of each step but the first with the step before.

    Returns:
        Lengths in order; they add up to len(cosines) + 1.
    """
    lengths = [1]
    for cosine in cosines:
        if cosine < threshold:
            lengths.append(1)
        else:
            lengths[-1] += 1
    return lengths


def inside_and_between(
    likeness: Sequence[float], cosines: Sequence[float], threshold: float
) -> tuple[list[float], list[float]]:
    """Likeness of adjacent critical sets within segments, and across their boundaries.

    Source: LouisKV, section 3.2 and figure 3 ("remains consistently above 0.8 within Current
    Segment"): a cosine is of use as a trigger if sets change at boundaries and not within.

    Args:
        likeness: of each step but the first with the step before, see `jaccard`.
        cosines: of the same steps.
    """
    pairs = list(zip(likeness, cosines, strict=True))
    inside = [like for like, cosine in pairs if cosine >= threshold]
    between = [like for like, cosine in pairs if cosine < threshold]
    return inside, between
