"""VerifiedDecoding: tokens are drafted under the policy and checked in one exact pass."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.generation.answer import Answer
from penstock.generation.sampler import Sampler
from penstock.generation.verified_counts import Verified
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument, position_argument
from penstock.models.loader import CausalLM
from penstock.models.weight_access import model_device

UNCHECKED = "every step attends to the whole past already, so that verify changes nothing"
"""What is said where nothing is drafted."""


def check_verifiable(cache: TieredCache) -> None:
    """Refuse a cache that has not kept what an exact pass attends to.

    Raises:
        ConfigError: its policy drops tokens, or its model has recurrent layers.
    """
    if cache.is_recurrent:
        raise ConfigError(
            "this model has recurrent layers, whose state cannot be taken back to the last token "
            "that was drafted right; leave verify out"
        )
    if cache.policy.drops:
        raise ConfigError(
            f"{cache.policy.name} drops tokens, so that no pass over its cache is exact; take "
            "another policy, or leave verify out"
        )


class Tokens:
    """Passes a model's newest tokens through it, over a cache that may begin with padding."""

    def __init__(
        self, model: CausalLM, cache: TieredCache, mask: Tensor, pad_token_id: int
    ) -> None:
        """Remember where the prompts begin.

        Args:
            mask: False at padding of the prompts. [rows, tokens]
            pad_token_id: stands where a token is needed that means nothing.
        """
        self._model: Any = model
        self._cache, self._device, self._pad = cache, model_device(model), pad_token_id
        self._mask = None if bool(mask.all()) else mask.to(self._device, torch.int64)
        parameters = inspect.signature(self._model.forward).parameters
        self._takes_last = "logits_to_keep" in parameters

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Logits behind a token of each row, under the policy. [rows, vocabulary]"""
        return self._pass([tokens])[:, -1]

    @torch.no_grad()
    def exactly(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits behind each of some tokens, by full attention. [rows, places, vocabulary]

        A single token, which would be a decode step, comes with another that nothing sees: the
        caller takes back what goes beyond `tokens`.

        Args:
            tokens: by place and row.
        """
        fed = tokens if len(tokens) > 1 else [*tokens, [self._pad] * len(tokens[0])]
        with self._cache.verifying():
            return self._pass(fed)

    def _pass(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        ids = torch.tensor(tokens, device=self._device).T.contiguous()
        options: dict[str, Any] = {}
        if self._mask is not None:
            begin = self._cache.get_seq_length()
            held = self._mask[:, : begin + ids.shape[1]]
            new = self._mask.new_ones((len(ids), begin + ids.shape[1] - held.shape[1]))
            options["attention_mask"] = mask = torch.cat([held, new], dim=1)
            options["position_ids"] = (mask.cumsum(dim=1) - 1)[:, begin:]
        else:
            begin = self._cache.get_seq_length()
            options |= position_argument(
                self._model, self._cache, begin, begin + ids.shape[1], len(ids)
            )
        if self._takes_last:
            options["logits_to_keep"] = ids.shape[1]
        cache = cache_argument(self._model, self._cache)
        logits: Tensor = self._model(input_ids=ids, **cache, **options, use_cache=True).logits
        return logits


class VerifiedDecoding:
    """Decodes with the policy's speed to the tokens of full attention (speculative decoding, where
    the draft model is the model itself under sparse attention).

    A round drafts K tokens under the policy, takes them back, and feeds them again together, with
    exact attention over the whole past. Every token is chosen from that pass's logits; the round
    ends behind the first that was drafted otherwise. Keys and values that stay are the exact ones.

    Draft and check choose by the same noise, so that sampled tokens too are those which an exact
    run chooses with the same seed, whatever was drafted (Gumbel sampling of Daliri et al., arXiv
    2408.07978, which exponential races are). Leviathan et al. (arXiv 2211.17192) accept a little
    more often, and their tokens depend on the drafts.

    Rows go on together: a round ends where the first of them must.
    """

    def __init__(
        self, model: CausalLM, cache: TieredCache, mask: Tensor, answers: Sequence[Answer], *,
        drafts: int, pad_token_id: int, sampler: Sampler,
        choose: Callable[[Tensor], list[int]], take: Callable[[], list[bool]],
    ) -> None:  # fmt: skip
        """Prepare to go on behind the answers' first tokens.

        Args:
            cache: holds the prompts.
            mask: False at padding of the prompts. [rows, tokens]
            answers: one for each row.
            drafts: most tokens of a draft.
            choose: makes the tokens of all rows from their logits [rows, vocabulary].
            take: adds them to the answers; returns which are done.
        """
        self._cache, self._answers, self._drafts = cache, answers, drafts
        self._pad, self._sampler = pad_token_id, sampler
        self._choose, self._take = choose, take
        self._tokens = Tokens(model, cache, mask, pad_token_id)
        self.counts = Verified(rows=len(answers))

    def run(self, tokens: list[int]) -> None:
        """Make the rest of all answers. tokens: the newest of each row, which no pass has seen."""
        before = copy.deepcopy(self._cache.stats)
        done = [answer.finish_reason is not None for answer in self._answers]
        with self._cache.checking_drafts():
            while not all(done):
                drafts = self._draft(tokens, done)
                tokens, done = self._verify(tokens, drafts, done)
        self.counts.count(before, self._cache.stats)

    def _draft(self, tokens: list[int], done: Sequence[bool]) -> list[list[int]]:
        """Tokens that the policy would go on with, by place and row."""
        live = [row for row, is_done in enumerate(done) if not is_done]
        rows = [self._answers[row].row.ahead() for row in live]
        room = max(self._answers[row].room for row in live)
        drafts: list[list[int]] = []
        with self._cache.drafting():
            while len(drafts) < min(self._drafts, room - 1):
                logits = self._tokens.step(tokens)[live]
                chosen = self._sampler.tokens(logits, rows)
                tokens = [self._pad] * len(done)
                for row, ahead, token in zip(live, rows, chosen, strict=True):
                    tokens[row] = token
                    ahead.output_token_ids.append(token)
                drafts.append(tokens)
                if all(self._answers[row].is_end(tokens[row]) for row in live):
                    break
        return drafts

    def _verify(
        self, tokens: list[int], drafts: list[list[int]], done: list[bool]
    ) -> tuple[list[int], list[bool]]:
        """Choose from exact logits as long as that goes on as drafted; the newest tokens, and which
        answers are done."""
        cache, start, kept = self._cache, self._cache.get_seq_length(), 0
        logits = self._tokens.exactly([tokens, *drafts])
        self.counts.passes += 1
        self.counts.drafted += len(drafts)
        try:
            for place in range(len(drafts) + 1):
                kept = place + 1
                self.counts.tokens += done.count(False)
                tokens = self._choose(logits[:, place])
                done = self._take()
                if all(done) or place == len(drafts):
                    break
                rows = zip(tokens, drafts[place], done, strict=True)
                if any(token != draft for token, draft, is_done in rows if not is_done):
                    break
                self.counts.accepted += 1
        finally:
            cache.crop(start + kept - cache.get_seq_length())
        return tokens, done
