"""Prompts of exactly one length, so that a batch of them has no padding."""

from dataclasses import replace
from functools import lru_cache
from itertools import product

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.prompt_fit import Draft, Prompter, fit, sample_of
from penstock.evaluate.tasks.sample import Sample

_FILL = ("", "\n-", " -", "\n", " and", "\n\n", "\n- -", " so it")
"""What may be put in front of the question to come out even: no token, one, or a few."""
_NEARLY = 3
"""Tokens that filling makes up for."""
_ROUNDS = 5
_TAIL_CHARACTERS = 4000
"""What is put in front of the question changes no token farther from the end than that."""
_KNOWN_PIECES = 100_000


class EqualLength:
    """Fits drafts to a length without reading the whole prompt at every try.

    Pieces are counted one by one, and each but once, as texts are used again. What their sum is off
    by is measured on the whole prompt, and made up for in the next round.

    Args:
        prompter: of the model that will be asked.
    """

    def __init__(self, prompter: Prompter) -> None:
        self._prompter = prompter
        self._count = lru_cache(_KNOWN_PIECES)(prompter.count_answer)

    def finish(self, draft: Draft, tokens: int) -> Sample:
        """A draft with as much filler as makes exactly `tokens` tokens, chat template included.

        Where no filling comes out even, the prompt is a token or a few shorter.

        Raises:
            ConfigError: `tokens` cannot hold the shortest form of the task.
        """
        units, size = self._nearly(draft, tokens)
        filled = replace(draft, question=self._filling(draft, units, tokens - size))
        for one in (filled, draft):  # the second if the tail's tokens reach further than thought
            prompt = one.prompt(self._prompter, units)
            if len(self._prompter.ids(prompt)) <= tokens:
                break
        return sample_of(draft, prompt, self._prompter)

    def _nearly(self, draft: Draft, tokens: int) -> tuple[int, int]:
        """Units of filler that make at most `tokens` tokens and few less, and the tokens."""

        def estimate(units: int) -> int:
            return sum(map(self._count, draft.pieces(units)))

        def measure(units: int) -> int:
            return len(self._prompter.ids(draft.prompt(self._prompter, units)))

        best, size = draft.least_units, measure(draft.least_units)
        if size > tokens:
            raise ConfigError(f"tokens={tokens} is too short for this task: it takes {size}")
        beside = size - estimate(best)
        for _ in range(_ROUNDS):
            units = fit(tokens - beside, estimate, least=draft.least_units)
            found = measure(units)
            if size < found <= tokens:
                best, size = units, found
            off = found - estimate(units) - beside
            if tokens - size <= _NEARLY or not off:
                break
            beside += off
        return best, size

    def _filling(self, draft: Draft, units: int, missing: int) -> str:
        """The question with `missing` tokens in front, or as many of them as can be had."""
        tail = draft.prompt(self._prompter, units)[-_TAIL_CHARACTERS:]
        before, question, after = tail.rpartition(draft.question)
        if not question:
            return draft.question
        bare, best, most = self._prompter.count_answer(tail), draft.question, 0
        for first, second in product(_FILL, _FILL):
            if most == missing:
                break
            text = f"{first}{second}{question}"
            more = self._prompter.count_answer(f"{before}{text}{after}") - bare
            if most < more <= missing:
                best, most = text, more
        return best
