"""Logprob, and how logits become the logarithms of the probabilities of a position's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.generation.token_text import piece_of
from penstock.models.loader import Tokenizer

_LONGEST_CHARACTER = 4
"""Bytes of one in UTF-8, and so the most tokens that it takes."""


@dataclass(slots=True)
class Logprob:
    """One token at one position."""

    logprob: float
    """Natural logarithm of its probability by the model, before penalties and temperature."""
    rank: int | None = None
    """1 for the most probable token of the position."""
    decoded_token: str | None = None
    """Its text; "" for a part of a character, None without a tokenizer."""


LogprobsOnePosition: TypeAlias = dict[int, Logprob]
"""By token id: first the token that was taken, then the most probable ones, best first."""


class TopTokens(NamedTuple):
    """Numbers of one position: the token that was taken, and the most probable ones."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def top_tokens(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TopTokens]:
    """The logarithms of probabilities that positions are asked for.

    Args:
        logits: of the model itself. [positions, vocabulary]
        token_ids: the token that was taken at each.
        counts: most probable tokens wanted of each; -1 is all of them.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    taken = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs >= taken).sum(dim=-1).tolist()
    vocabulary = logprobs.shape[1]
    wanted = [vocabulary if count < 0 else min(count, vocabulary) for count in counts]
    values, ids = logprobs.topk(max(wanted, default=0), dim=-1)
    return [
        TopTokens(token, value, rank, top[:count], tops[:count])
        for token, value, rank, top, tops, count in zip(
            token_ids, taken[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), wanted,
            strict=True,
        )
    ]  # fmt: skip


def position_of(
    tokens: TopTokens, before: Sequence[int], tokenizer: Tokenizer | None
) -> LogprobsOnePosition:
    """Numbers with the texts of their tokens.

    Args:
        before: tokens in front, of which the newest may be the beginning of a character.
    """
    chosen = tokens.token_id, tokens.logprob, tokens.rank
    best = zip(tokens.top_ids, tokens.top_logprobs, range(1, len(tokens.top_ids) + 1), strict=True)
    return {
        token: Logprob(logprob, rank, _decoded(token, before, tokenizer))
        for token, logprob, rank in (chosen, *best)
    }


def _decoded(token: int, before: Sequence[int], tokenizer: Tokenizer | None) -> str | None:
    if tokenizer is None:
        return None
    text = piece_of(tokenizer, [token])
    if not text.endswith("\ufffd"):
        return text
    for count in range(1, min(_LONGEST_CHARACTER, len(before)) + 1):
        context = list(before[-count:])
        whole = piece_of(tokenizer, [*context, token])
        if not whole.endswith("\ufffd"):
            held = piece_of(tokenizer, context).rstrip("\ufffd")
            return whole.removeprefix(held)
    return ""
