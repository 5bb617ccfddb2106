"""Sets of critical tokens and groups, and how much of one step's set the step before had."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def top_set(worth: Tensor, visible: Tensor, count: int) -> Tensor:
    """The `count` visible units of the most worth, fewer where there are no more.

    Args:
        worth: not negative. [batch, heads, units]
        visible: False for units that cannot be chosen. bool [batch, units]

    Returns:
        bool [batch, heads, units]
    """
    masked = worth.masked_fill(~visible[:, None], -1.0)
    best = masked.topk(min(count, worth.shape[-1]), dim=-1)
    chosen = torch.zeros(worth.shape, dtype=torch.bool, device=worth.device)
    return chosen.scatter_(-1, best.indices, best.values >= 0)


def group_worth(shares: Tensor, visible: Tensor, group_tokens: int) -> tuple[Tensor, Tensor]:
    """What KVSwap ranks groups by: a token's probability added over heads, the most of a group.

    Source: KVSwap, section 3.3, "Scoring and selection". Groups begin at the first place of the
    cache, as they do in our engine; a group that is not full yet cannot be chosen (it is in the
    rolling buffer, section 3.4.1).

    Differences: the paper adds "the scores across all heads" and does not say whether before or
    behind the softmax; here behind it, as in our KVSwap (docs/methods/kvswap.md). Keys are exact
    and the query is the true one: what full attention wants, not what a predictor finds.

    Args:
        shares: [batch, heads, tokens]
        visible: False at padding. bool [batch, tokens]

    Returns:
        The mean over heads, [batch, 1, full groups], and which groups have a visible token, bool
        [batch, full groups].
    """
    batch, _, tokens = shares.shape
    groups = tokens // group_tokens
    together = shares.mean(dim=1)[:, : groups * group_tokens]
    best = together.reshape(batch, groups, group_tokens).amax(dim=-1)
    some = visible[:, : groups * group_tokens].reshape(batch, groups, group_tokens).any(dim=-1)
    return best.unsqueeze(1), some


def overlap(before: Tensor, now: Tensor) -> Tensor:
    """The share of this step's set that was in the set of the step before.

    Source: KVSwap, section 3.4.2 and figure 8 ("the fraction of important groups at step j that
    also appeared at step j-1").

    Args:
        before: bool [batch, heads, units], as many as there were.
        now: bool [batch, heads, units]

    Returns:
        0 to 1; NaN where the set is empty. float64 [batch, heads]
    """
    both, _ = _meet(before, now)
    return both / now.sum(dim=-1).double()


def jaccard(before: Tensor, now: Tensor) -> Tensor:
    """What both sets have, over what either has.

    Source: LouisKV, section 3.2, observation 1, and figure 3 ("the Jaccard similarity between the
    critical KV index sets of adjacent decoding tokens").

    Args:
        before: as in `overlap`.
        now: as in `overlap`.

    Returns:
        0 to 1; NaN where both are empty. float64 [batch, heads]
    """
    both, either = _meet(before, now)
    return both / either


def _meet(before: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes of the intersection and of the union, float64 [batch, heads] each."""
    same = pad(before, (0, now.shape[-1] - before.shape[-1]))
    return (same & now).sum(dim=-1).double(), (same | now).sum(dim=-1).double()


def concentration(counts: Tensor, part: float = 0.8) -> float:
    """The smallest share of the units that makes up `part` of all occurrences.

    Source: KVSwap, section 3.4.2 and figure 8 ("Fewer than 22% of groups account for 80% of
    occurrences").

    Args:
        counts: how often each unit was chosen, not negative; some unit was. [units]

    Returns:
        Above 0, at most 1.
    """
    held = counts.double().sort(descending=True).values.cumsum(dim=0)
    needed = int((held < part * held[-1] - 1e-9).sum()) + 1
    return needed / len(counts)


def stable_part(counts: Tensor, chances: Tensor, often: float = 0.9) -> float:
    """The share of all occurrences that falls on units chosen almost whenever they could be.

    Source: HillInfer, section 4.2 and figure 8 ("A distinct subset of historical tokens
    consistently maintains high importance across almost all decoding steps").

    Differences: the paper shows counts and names no share; "almost all" is `often` here.

    Args:
        counts: how often each unit was chosen. [units]
        chances: at how many steps it could be. [units]

    Returns:
        0 to 1; NaN where nothing was chosen.
    """
    steady = (counts >= often * chances) & (counts > 0)
    return float(counts[steady].sum().double() / counts.sum().double())
