"""Draws: tokens by inverse CDF from one uniform number each, the same in any batch or grouping."""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.engine.beams.decoding import Choose
from penstock.generation.sampling import check_temperature

_ONE = float(1 << 40)
"""Weight of the most probable token. Weights are whole numbers, whose sums are exact in any order;
2**22 tokens of this weight still fit int64."""


def make_choose(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Choose:
    """The `choose` of a `StepRequest`: samples a token for each row from its own uniform number.

    Logits are divided by the temperature, then filtered by `top_k`, then by `top_p`, as
    transformers do it; equal logits at a filter's border all stay. A row's token is a function of
    its logits and its uniform number alone: weights are rounded to whole numbers, so that the
    order in which a device adds them changes nothing. A token of weight zero is never drawn,
    whatever the uniform; weights below 2**-41 of the largest count as zero.

    The log-probability of the token drawn is that of the model's own distribution: temperature 1,
    nothing filtered.

    Args:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: sample among this many most probable tokens; 0 is all of them.
        top_p: sample among the most probable tokens that hold this share of the mass, in (0, 1].

    Returns:
        A function of (logits [rows, vocabulary], uniforms float64 [rows] in [0, 1)) that gives
        (token ids int64 [rows], log-probabilities float32 [rows]); torch operations only, without
        asking the device anything.

    Raises:
        ConfigError: a setting is out of its range.
    """
    check_draws(temperature, top_k, top_p)

    def choose(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.to(torch.float32)
        if temperature == 0:
            tokens = wide.argmax(dim=-1)
        else:
            tokens = _draw(_weights(wide, temperature, top_k, top_p), uniforms)
        log_probabilities = torch.log_softmax(wide, dim=-1).gather(-1, tokens[:, None])[:, 0]
        return tokens, log_probabilities

    return choose


def check_draws(temperature: float, top_k: int, top_p: float) -> None:
    """Refuse settings that nothing can be sampled with.

    Raises:
        ConfigError: names the setting and its range.
    """
    check_temperature(temperature)
    if top_k < 0:
        raise ConfigError(f"top_k={top_k} must be 0 (all tokens) or more")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p} must lie in (0, 1]")


def candidate_uniforms(seed: int, step: int, num_candidates: int, num_tokens: int) -> Tensor:
    """The randomness of one step, float64 in [0, 1) [candidates, tokens].

    Counter-based (Philox): the number of a token depends on the seed, the step, the candidate and
    the token's place in the step, and on nothing else.

    Args:
        seed: 0 to 2**64 - 1.
        step: counts from 0.
    """
    assert 0 <= seed < 1 << 64, seed
    rows = np.empty((num_candidates, num_tokens))
    for candidate in range(num_candidates):
        # The lowest of the four words counts the numbers drawn.
        counter = np.array([0, 0, candidate, step], dtype=np.uint64)
        key = np.array([seed, 0], dtype=np.uint64)
        # numpy's annotations leave out that both may be arrays of words.
        bits = np.random.Philox(counter=cast(int, counter), key=cast(int, key))
        rows[candidate] = np.random.Generator(bits).random(num_tokens)
    return torch.from_numpy(rows)


def _weights(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """What each token weighs in the draw. int64 [rows, vocabulary]"""
    below = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    # A row of NaNs weighs nothing at all; its log-probability tells.
    weights = torch.nan_to_num(torch.exp(below) * _ONE, nan=0.0).round().to(torch.int64)
    if 0 < top_k < weights.shape[-1]:
        least = weights.topk(top_k, dim=-1).values[:, -1:]
        weights = weights.masked_fill(weights < least, 0)
    if top_p < 1:
        ordered = weights.sort(dim=-1, descending=True).values
        sums = ordered.cumsum(dim=-1)
        kept = (sums - ordered).double() < top_p * sums[:, -1:].double()
        least = ordered.masked_fill(~kept, torch.iinfo(torch.int64).max).amin(dim=-1, keepdim=True)
        weights = weights.masked_fill(weights < least, 0)
    return weights


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose sum of weights passes the uniform's share of all. int64 [rows]"""
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1]
    # The product may round up to the total itself, which no token's sum passes.
    place = torch.minimum((uniforms * total.double()).to(torch.int64), total - 1)
    return (sums <= place[:, None]).sum(dim=-1)
