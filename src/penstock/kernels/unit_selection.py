"""Rank units of any size, take tokens to an exact budget, and say what a new selection gains."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from penstock.kernels.plain_attention import NEGATIVE_INFINITY

CHUNK_UNITS = 512
"""Index vectors made float32 at a time."""


def query_similarity(previous: Tensor, query: Tensor, rows_per_sequence: int) -> Tensor:
    """How alike two queries are: the cosine per query head, its mean over all heads of a sequence.

    Source: LouisKV, section 4.1 (r_t).

    Args:
        previous, query: any float dtype. [rows, heads of a row, head_dim]
        rows_per_sequence: rows (KV heads) of a sequence, which lie side by side.

    Returns:
        float32 [rows // rows_per_sequence]
    """
    cosines = cosine_similarity(previous.float(), query.float(), dim=-1)
    return cosines.reshape(-1, rows_per_sequence * cosines.shape[1]).mean(dim=1)


def unit_scores(
    query: Tensor, means: Tensor, sizes: Tensor, scaling: float, rows: Tensor | None = None, *,
    squares: Tensor | None = None, weights: Tensor | None = None, sums: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Group-consistent scores: softmax over units per query head, mean over the row's heads.

    Source: LouisKV, appendix B (A_t). Plain torch; a fast kernel is its twin.

    With `squares` a unit is weighed by what its tokens are expected to be attended to on average,
    were its keys normally distributed with the same variance in every component: the logarithm of
    that mean exceeds the logit of the mean key by half the query's square times that variance. The
    paper has nothing of the kind.

    With `weights` a score is the attention that a token of the unit is estimated to have: units
    count in the softmax by their tokens, and heads by the share of their attention that is on units
    at all. Scores times tokens are then shares of the row's attention. The paper has nothing of the
    kind either.

    Args:
        query: post-RoPE. [rows, heads of a row, head_dim]
        means: one index vector per unit. [all rows, at least `units`, head_dim]
        sizes: tokens of each unit that may be taken; empty units stay out of the softmax.
            int [rows, units]
        scaling: factor on the logits (one over the root of head_dim).
        rows: which rows of `means` the others belong to; None: all. int64 [rows]
        squares: mean squared length of each unit's keys. float32 [all rows, at least `units`]
        weights: share of each head's attention that is on units. float32 [rows, heads of a row]
        sums: receives, with `weights`, the log-sum-exp of all units' tokens, alike.

    Returns:
        float32 [rows, units], minus one where a unit is empty.
    """
    empty, scaled = sizes <= 0, query.float() * scaling
    logits = scaled.new_empty(*scaled.shape[:2], sizes.shape[1])
    units = sizes.shape[1]
    for start in range(0, units, CHUNK_UNITS):
        part = means[:, start : min(units, start + CHUNK_UNITS)]
        part = (part if rows is None else part[rows]).float()
        found = scaled @ part.transpose(1, 2)
        if squares is not None:
            square = squares[:, start : start + part.shape[1]]
            square = square if rows is None else square[rows]
            spread = (square - part.square().sum(dim=2)).clamp_min_(0.0) / (2 * part.shape[2])
            found += scaled.square().sum(dim=2, keepdim=True) * spread.unsqueeze(1)
        logits[:, :, start : start + CHUNK_UNITS] = found
    # A row without any unit gives not-a-number here, and minus one below.
    logits.masked_fill_(empty.unsqueeze(1), NEGATIVE_INFINITY)
    if weights is None:
        return torch.softmax(logits, dim=-1).mean(dim=1).masked_fill_(empty, -1.0)
    found = torch.logsumexp(logits + sizes.clamp_min(1).log().unsqueeze(1), dim=-1)
    if sums is not None:
        sums.copy_(found)
    shares = (logits - found.unsqueeze(-1)).exp_().mul_(weights.unsqueeze(-1))
    return shares.mean(dim=1).masked_fill_(empty, -1.0)


def unit_weights(units: Tensor, everything: Tensor) -> Tensor:
    """The share of each head's attention that units have, by sums of exponentials.

    Args:
        units: log-sum-exp of all units' tokens, as `unit_scores` estimates it. float32 [any]
        everything: log-sum-exp of what the head attended to at the same step; minus infinity where
            that is not known, which makes it 1. Alike.
    """
    return (units - everything).clamp_max(0.0).exp()


class Renewal(NamedTuple):
    """What a new selection would be."""

    taken: Tensor
    """Tokens that it has of each unit. int64 [rows, units]"""
    gain: Tensor
    """Its scores, times tokens, less those of the current one. float32 [rows]"""


def renew_units(
    scores: Tensor, sizes: Tensor, current: Tensor, budget: int, keep: float
) -> Renewal:
    """Select anew, but let go of what is selected only for what is clearly better.

    Source: ours. Attention to a unit goes up and down from step to step; to exchange two units that
    take turns in being the better one costs reads and gains little.

    Args:
        scores: from `unit_scores`; equal ones are taken in order of unit. float32 [rows, units]
        sizes: tokens of each unit that may be taken. int [rows, units]
        current: tokens of each unit that are selected. int [rows, units]
        budget: tokens to select, at least 1.
        keep: factor on the scores of units of which some tokens are current, at least 1.
    """
    biased = torch.where(current > 0, scores * keep, scores)
    order = torch.argsort(biased, dim=1, descending=True, stable=True)
    ranked = sizes.gather(1, order).long().clamp_min_(0)
    before = ranked.cumsum(dim=1) - ranked
    part = torch.minimum((budget - before).clamp_min_(0), ranked)
    taken = torch.zeros_like(ranked).scatter_(1, order, part)
    fresh = taken - torch.minimum(current, sizes)
    return Renewal(taken, (scores * fresh).sum(dim=1))


def taken_tokens(
    taken: Tensor, first: Tensor, members: Tensor, budget: int
) -> tuple[Tensor, Tensor]:
    """The tokens of a selection, by the number of their unit, then as in `members`.

    Args:
        taken: tokens that each unit gives: its first ones. int64 [rows, units]
        first: where each unit's tokens begin in `members`. int [rows, units]
        members: positions of tokens, those of a unit side by side. int [rows, tokens]
        budget: places of the result.

    Returns:
        Positions, and which of them are real, the others being 0. int64 and bool [rows, budget]
    """
    ends = taken.cumsum(dim=1)
    places = torch.arange(budget, device=taken.device).expand(len(taken), -1).contiguous()
    # The unit in which the j-th token lies is the first one that ends behind j.
    unit = torch.searchsorted(ends, places, right=True)
    real = unit < taken.shape[1]
    unit = unit.clamp_max(taken.shape[1] - 1)
    where = first.gather(1, unit).long() + places - (ends - taken).gather(1, unit)
    where = where.clamp(0, members.shape[1] - 1)
    return members.gather(1, where).long().masked_fill(~real, 0), real


def take_units(
    scores: Tensor, first: Tensor, sizes: Tensor, members: Tensor, budget: int
) -> tuple[Tensor, Tensor]:
    """Take units by falling score until exactly `budget` tokens are taken, the last one in part.

    One sort of the units and one search per token taken; nothing of the size of the past, and
    nothing that waits for the device. Plain torch; a fast kernel is its twin.

    Source: LouisKV, section 4.3 (selection under a budget) and algorithm 1, line 23.

    Args:
        scores: equal ones are taken in order of unit. float32 [rows, units]
        first: where each unit's tokens begin in `members`. int [rows, units]
        sizes: tokens of each unit that may be taken. int [rows, units]
        members: positions of tokens, those of a unit side by side. int [rows, tokens]
        budget: tokens to take, at least 1.

    Returns:
        Positions taken, unit after unit, and which of them are real: where a row has fewer tokens
        than `budget`, the rest is false (and zero). int64 and bool [rows, budget]
    """
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    ranked = sizes.gather(1, order).long().clamp_min(0)
    ends = ranked.cumsum(dim=1)
    places = torch.arange(budget, device=scores.device).expand(scores.shape[0], -1).contiguous()
    # The unit in which the j-th token lies is the first one that ends behind j.
    rank = torch.searchsorted(ends, places, right=True)
    taken = rank < scores.shape[1]
    rank = rank.clamp_max(scores.shape[1] - 1)
    within = places - (ends - ranked).gather(1, rank)
    where = first.gather(1, order.gather(1, rank)).long() + within
    where = where.clamp(0, members.shape[1] - 1)
    return members.gather(1, where).long().masked_fill(~taken, 0), taken
