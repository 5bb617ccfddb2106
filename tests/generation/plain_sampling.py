"""vLLM's order of sampling, a number at a time: what tests hold the sampler against."""

import math

import torch

from penstock.generation.sampling import SamplingParams

Words = list[list[int]]


def scores_of(
    raw: list[float], params: SamplingParams, prompt: list[int], output: list[int],
    *, words: Words | None = None, ends: frozenset[int] = frozenset(),
) -> list[float]:  # fmt: skip
    """Logits before temperature, of which the largest is greedy decoding's token.

    Args:
        words: token ids of `bad_words`.
        ends: end-of-sequence and stop tokens.
    """
    scores = list(raw)
    never = -math.inf
    if params.allowed_token_ids is not None:
        scores = [s if t in params.allowed_token_ids else never for t, s in enumerate(scores)]
    for *front, last in words or []:
        if output[len(output) - len(front) :] == front:
            scores[last] = never
    if len(output) < params.min_tokens:
        for end in ends:
            scores[end] = never
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in {*prompt, *output}:
        by = params.repetition_penalty
        scores[token] = scores[token] / by if scores[token] > 0 else scores[token] * by
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return scores


def probabilities_of(scores: list[float], params: SamplingParams) -> list[float]:
    """The distribution that is drawn from."""
    warm = [score / params.temperature for score in scores]
    shares = _softmax(warm)
    least = params.min_p * max(shares)
    warm = [w if p >= least else -math.inf for w, p in zip(warm, shares, strict=True)]
    if params.top_k > 0:
        least = sorted(warm, reverse=True)[min(params.top_k, len(warm)) - 1]
        warm = [w if w >= least else -math.inf for w in warm]
    shares, held, kept = _softmax(warm), 0.0, set[int]()
    for token in sorted(range(len(warm)), key=lambda t: -shares[t]):
        if held < params.top_p:
            kept.add(token)
        held += shares[token]
    return _softmax([w if t in kept else -math.inf for t, w in enumerate(warm)])


def drawn(probabilities: list[float], generator: torch.Generator) -> int:
    """The token of the largest quotient by exponential noise."""
    noise = torch.empty(len(probabilities)).exponential_(generator=generator)
    quotients = [p / q for p, q in zip(probabilities, noise.tolist(), strict=True)]
    return max(range(len(quotients)), key=quotients.__getitem__)


def _softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / sum(weights) for weight in weights]
