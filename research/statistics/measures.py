"""Measures of attention: overlap of sets, mass of the best tokens, reuse, likeness of queries."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.slot_table import ABSENT, SlotTable

# Figures of every step, layer and sequence, and their means over what counts ----------------------


class Series:
    """Collects named figures step by step; all that is kept of a step but for a few queries."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        self._live: list[Tensor] = []

    def add(self, live: Tensor, layers: Sequence[Mapping[str, Tensor]]) -> None:
        """Take one step.

        Args:
            live: rows that count. bool [batch]
            layers: each layer's figures by name, the same names at every step; NaN where there is
                nothing to say. Each [batch, figures]
        """
        self._live.append(live.cpu())
        for name in layers[0]:
            stacked = torch.stack([layer[name].cpu().double() for layer in layers])
            self._parts.setdefault(name, []).append(stacked)

    @property
    def live(self) -> Tensor:
        """bool [steps, batch]"""
        return torch.stack(self._live)

    def __getitem__(self, name: str) -> Tensor:
        """float64 [steps, layers, batch, figures]"""
        return torch.stack(self._parts[name])

    def means(self, name: str) -> list[list[float | None]]:
        """By layer and figure, over the steps and rows that count; None where nothing is said."""
        values = self[name]
        counted = self.live[:, None, :, None] & ~values.isnan()
        sums = torch.where(counted, values, 0.0).sum(dim=(0, 2))
        return plain(sums / counted.sum(dim=(0, 2)))

    def of_row(self, name: str, layer: int, row: int) -> list[float]:
        """The first figure of one layer and row at each step that counts, the first step left out:
        what compares a step with the step before."""
        values: list[float] = self[name][:, layer, row, 0][self.live[:, row]][1:].tolist()
        return values


def plain(values: Tensor) -> list[list[float | None]]:
    """A matrix for JSON: NaN becomes None, and six digits do."""
    return [[None if x != x else float(f"{x:.6g}") for x in row] for row in values.tolist()]


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of what there is."""
    there = [value for value in values if value is not None and value == value]
    return sum(there) / len(there) if there else None


def column(rows: Sequence[Sequence[float | None]], place: int) -> list[float | None]:
    """One figure of every layer."""
    return [row[place] for row in rows]


# Sets of critical tokens and groups, and how much of one step's set the step before had -----------


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


# The share of tokens that holds a share of the probability ----------------------------------------

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Shares of the probability for which tokens are counted."""
PARTS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of the tokens whose probability is added up."""

_SLACK = 1e-6
"""Of rounding: what lacks so little to a level has reached it."""


def tokens_that_hold(shares: Tensor, visible: Tensor, levels: tuple[float, ...]) -> Tensor:
    """The fewest tokens that hold a share of the probability, as a share of all visible tokens.

    Source: the sparsity that KVSwap (appendix A.2: "critical KV entries are sparse, typically
    comprising less than 5% of the long context") and HillInfer (section 3.1: "typically less than
    20% of historical tokens significantly influencing the final output") build upon.

    Differences: neither paper says when a token counts as critical; here it is by probability.

    Args:
        shares: of each distribution; every one sums to 1. [batch, heads, tokens]
        visible: False at padding. bool [batch, tokens]
        levels: shares of the probability, 0 to 1.

    Returns:
        Above 0, at most 1. float64 [batch, heads, levels]
    """
    held = shares.double().sort(dim=-1, descending=True).values.cumsum(dim=-1)
    wanted = torch.tensor(levels, dtype=torch.float64, device=shares.device) - _SLACK
    wanted = wanted.expand(*held.shape[:-1], len(levels)).contiguous()
    counts = torch.searchsorted(held, wanted) + 1
    counts = counts.clamp_max(shares.shape[-1])
    return counts.double() / visible.sum(dim=-1)[:, None, None]


def mass_of_best(shares: Tensor, visible: Tensor, parts: tuple[float, ...]) -> Tensor:
    """The probability that the best tokens hold, for shares of all visible tokens.

    A share that is no whole number of tokens lies on the line between its neighbours.

    Args:
        shares: as in `tokens_that_hold`.
        visible: as in `tokens_that_hold`.
        parts: shares of the tokens, 0 to 1.

    Returns:
        0 to 1. float64 [batch, heads, parts]
    """
    held = shares.double().sort(dim=-1, descending=True).values.cumsum(dim=-1)
    held = torch.nn.functional.pad(held, (1, 0))
    wanted = torch.tensor(parts, dtype=torch.float64, device=shares.device)
    places = visible.sum(dim=-1, keepdim=True).double() * wanted
    places = places.clamp_max(shares.shape[-1]).unsqueeze(1).expand(*held.shape[:-1], len(parts))
    below = places.floor().long()
    above = (below + 1).clamp_max(shares.shape[-1])
    low, high = held.gather(-1, below), held.gather(-1, above)
    return low + (places - below) * (high - low)


# The hit rate of KVSwap's reuse buffer for a stream of selections, without a disk -----------------


class ReuseBuffer:
    """Slots for units, first in, first out; what a step needs is not evicted by it.

    Source: KVSwap, section 3.4.3; its reuse ratio (section 6, table 5) is the hit rate. The slots
    and their replacement are those of our engine. A buffer of exactly one selection has the overlap
    of adjacent steps (figure 8) as its hit rate.
    """

    def __init__(self, batch: int, num_slots: int, max_units: int) -> None:
        """An empty buffer.

        Args:
            num_slots: units that fit; at least the largest selection.
            max_units: units that there can be.
        """
        self._table = SlotTable(batch, num_slots, max_units)
        self._replacement = FIFO(batch, num_slots)

    def take(self, selected: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Look up one step's selection and bring in what is missing.

        Args:
            selected: [batch, units]

        Returns:
            Share of the selection that was there, 0 to 1; NaN where nothing was selected. [batch]
        """
        units = selected.shape[1]
        held = self._table.slot_of[:, :units] != ABSENT
        missing = selected & ~held
        inside = self._table.unit_in
        # Units beyond those of this step cannot be held: there are never fewer than before.
        pinned = np.take_along_axis(selected, np.maximum(inside, 0).astype(np.int64), axis=1)
        pinned &= inside != ABSENT
        victims = self._replacement.victims(pinned, missing.sum(axis=1))
        rows, wanted = missing.nonzero()
        self._table.admit(rows, wanted, victims)
        sizes = selected.sum(axis=1)
        hits = (selected & held).sum(axis=1)
        rates: NDArray[np.float64] = np.full(len(sizes), np.nan)
        np.divide(hits, sizes, out=rates, where=sizes > 0)
        return rates


# How a layer's query moves from step to step, and where LouisKV would retrieve anew ---------------

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
