"""Sampler: chooses the next token of each row by that row's own settings, in vLLM's order."""

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.generation.logprobs import TopTokens, top_tokens
from penstock.generation.sampling import SamplingParams
from penstock.models.loader import CausalLM
from penstock.models.weight_access import model_device

_NONE = float("-inf")


@dataclass(kw_only=True, slots=True)
class SamplingRow:
    """What choosing the next token of one answer depends on."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    end_token_ids: frozenset[int] = frozenset()
    """Not chosen before `min_tokens`."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Tokens of each; their last is not chosen behind the others."""
    generator: torch.Generator | None = None
    """The row's own, for a seed; on the device of the logits."""
    output_token_ids: list[int] = field(default_factory=list)
    """The answer so far; its owner appends what was chosen."""
    noise: dict[int, Tensor] | None = None
    """Where a token is chosen twice: the noise of each place in the answer, so that both draws are
    by the same. float32 [vocabulary] by number of token; None: every draw has its own."""
    _prompt: tuple[frozenset[int], Tensor] | None = None

    def ahead(self) -> "SamplingRow":
        """The same row for tokens that may be taken back: it draws by the same noise."""
        if self.noise is not None:
            taken = len(self.output_token_ids)
            for place in [each for each in self.noise if each < taken]:
                del self.noise[place]
        return replace(self, output_token_ids=[*self.output_token_ids])

    def draw_noise(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Exponential noise for the next token. float32 [vocabulary]

        Args:
            generator: where it comes from, without a generator of the row's own.
        """
        place = len(self.output_token_ids)
        if self.noise is not None and place in self.noise:
            return self.noise[place]
        noise = torch.empty_like(like).exponential_(generator=self.generator or generator)
        if self.noise is not None:
            self.noise[place] = noise
        return noise

    def seed(self, seed: int, device: torch.device) -> None:
        """Draw from a generator of its own."""
        self.generator = torch.Generator(device).manual_seed(seed)

    def seen(self, device: torch.device) -> Tensor:
        """Tokens of prompt and answer, each once. int64 [tokens]"""
        if self._prompt is None:  # a long one takes longer than a step
            kinds = frozenset(self.prompt_token_ids)
            self._prompt = kinds, torch.tensor(sorted(kinds), dtype=torch.int64, device=device)
        kinds, tokens = self._prompt
        new = sorted(set(self.output_token_ids) - kinds)
        return torch.cat([tokens, torch.tensor(new, dtype=torch.int64, device=device)])


class Choice(NamedTuple):
    """The next token of a row."""

    token_id: int
    tokens: TopTokens | None
    """Numbers for `logprobs`, or for `best_of`."""


class Sampler:
    """Chooses tokens; rows may be others at every call.

    The order is vLLM's: logprobs of the model's own logits; then functions of the caller, allowed
    tokens, bad words, `min_tokens`, bias, penalties of repetition, frequency and presence; then
    temperature, `min_p`, `top_k`, `top_p`, and the draw.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        """Remember where rows without a seed draw from.

        Args:
            generator: theirs, on the device of the logits; None: torch's global one.
        """
        self._generator = generator

    @classmethod
    def seeded(cls, seed: int | None, model: CausalLM) -> "Sampler":
        """One whose rows without a seed draw from a generator of a seed; None: the global one."""
        if seed is None:
            return cls()
        return cls(torch.Generator(model_device(model)).manual_seed(seed))

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Choice]:
        """Choose a token for each row. Changes nothing but generators.

        Args:
            logits: of the model itself. [rows, vocabulary]

        Raises:
            ConfigError: the settings of a row leave no token to choose.
        """
        token_ids = self.tokens(logits, rows)
        asked = [row for row, each in enumerate(rows) if _num_logprobs(each.params) is not None]
        tokens: dict[int, TopTokens] = {}
        if asked:
            counts = [_num_logprobs(rows[row].params) or 0 for row in asked]
            numbers = top_tokens(logits[asked], [token_ids[row] for row in asked], counts)
            tokens = dict(zip(asked, numbers, strict=True))
        return [Choice(token, tokens.get(row)) for row, token in enumerate(token_ids)]

    def tokens(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """As a call, but for the numbers beside each token."""
        scores = logits.to(torch.float32, copy=True)
        for row, each in enumerate(rows):
            _shape(scores[row], each)
        chosen = scores.argmax(dim=-1)
        drawn = [row for row, each in enumerate(rows) if not each.params.is_greedy]
        if drawn:
            chosen[drawn] = self._draw(scores[drawn], [rows[row] for row in drawn])
        found: list[int] = chosen.tolist()
        return found

    def _draw(self, scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Tokens by chance. int64 [rows]"""
        params = [row.params for row in rows]
        scores = scores / scores.new_tensor([each.temperature for each in params])[:, None]
        _keep_min_p(scores, [each.min_p for each in params])
        _keep_top(scores, [each.top_k for each in params], [each.top_p for each in params])
        # The largest quotient by exponential noise: the same draw as a multinomial one, but each
        # row's noise can come from a generator of its own.
        pairs = zip(scores, rows, strict=True)
        noise = torch.stack([row.draw_noise(like, self._generator) for like, row in pairs])
        noise.clamp_min_(torch.finfo(noise.dtype).tiny)
        return (scores.softmax(dim=-1) / noise).argmax(dim=-1)


def _num_logprobs(params: SamplingParams) -> int | None:
    """Most probable tokens wanted; None: no numbers are."""
    if params.logprobs is None and params.num_answers > params.n:
        return 0
    return params.logprobs


def _shape(scores: Tensor, row: SamplingRow) -> None:
    """Apply what holds for greedy decoding too, in place. [vocabulary]"""
    params, output = row.params, row.output_token_ids
    for function in params.logits_processors or ():
        takes_prompt = len(inspect.signature(function).parameters) == 3
        before = (list(row.prompt_token_ids), output) if takes_prompt else (output,)
        scores.copy_(function(*before, scores.clone()))
    if params.allowed_token_ids is not None:
        kept = scores[list(params.allowed_token_ids)]
        scores.fill_(_NONE)
        scores[list(params.allowed_token_ids)] = kept
    for *front, last in row.bad_words:
        if not front or output[-len(front) :] == front:
            scores[last] = _NONE
    if len(output) < params.min_tokens and row.end_token_ids:
        scores[sorted(row.end_token_ids)] = _NONE
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    _penalise(scores, row)
    leaves_out = params.allowed_token_ids or row.bad_words or params.min_tokens
    if (leaves_out or params.logit_bias or params.logits_processors) and not _has_choice(scores):
        raise ConfigError(
            "no token is left to choose: allowed_token_ids, bad_words, min_tokens, logit_bias or "
            "logits_processors leave out all of them"
        )


def _has_choice(scores: Tensor) -> bool:
    return bool((scores > _NONE).any())


def _penalise(scores: Tensor, row: SamplingRow) -> None:
    params = row.params
    if params.repetition_penalty != 1:
        seen = row.seen(scores.device)
        seen = seen[seen < scores.shape[0]]  # some vocabularies are wider than their head
        values, penalty = scores[seen], params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.output_token_ids and (params.frequency_penalty or params.presence_penalty):
        counted = Counter(row.output_token_ids)
        tokens = torch.tensor(list(counted), device=scores.device)
        counts = scores.new_tensor(list(counted.values()))
        scores[tokens] -= params.frequency_penalty * counts + params.presence_penalty


def _keep_min_p(scores: Tensor, min_p: Sequence[float]) -> None:
    if any(min_p):
        probabilities = scores.softmax(dim=-1)
        least = probabilities.amax(dim=-1, keepdim=True) * scores.new_tensor(min_p)[:, None]
        scores.masked_fill_(probabilities < least, _NONE)


def _keep_top(scores: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> None:
    """Leave out all but the most probable tokens, in place. [rows, vocabulary]"""
    vocabulary = scores.shape[1]
    width, counts = vocabulary, [min(k, vocabulary) if k > 0 else vocabulary for k in top_k]
    limited = [row for row, count in enumerate(counts) if count < vocabulary]
    if limited:
        best = scores[limited].topk(max(counts[row] for row in limited), dim=-1).values
        last = torch.tensor([counts[row] - 1 for row in limited], device=scores.device)
        least = scores.new_full((len(counts), 1), _NONE)
        least[limited] = best.gather(1, last[:, None])
        scores.masked_fill_(scores < least, _NONE)
    if all(p == 1 for p in top_p):
        return
    if len(limited) == len(counts):  # sorting a whole vocabulary takes as long as a small model
        width = int((scores > _NONE).sum(dim=-1).max())
    values, ids = scores.topk(width, dim=-1)
    values, ids = values.flip(-1), ids.flip(-1)
    left_out = values.softmax(dim=-1).cumsum(dim=-1) <= 1 - scores.new_tensor(top_p)[:, None]
    left_out[:, -1] = False
    scores.scatter_(1, ids, values.masked_fill(left_out, _NONE))
