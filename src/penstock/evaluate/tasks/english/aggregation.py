"""RULER's aggregation family in English: the words that a text holds most often.

Source: Hsieh et al., "RULER" (COLM 2024), section 3 and its published configuration.
"""

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from penstock.evaluate.tasks.english.filler import Filler
from penstock.evaluate.tasks.english.lexicon import coined_word_deck, different, letters
from penstock.evaluate.tasks.english.prompt_fit import Draft, Prompter

_COMMON_WORDS = 10
_LONG_PROMPT_TOKENS = 4096
_CODED_LETTERS = 6
_TOKENS_PER_CODED_WORD = 50
_FEWEST_CODED_WORDS = 5
_ZETA_OF_2 = math.pi**2 / 6
_SURE_RANKING_DRAWS = 74  # from here on rank 4 gets at least one word more than rank 5
_COMMON_NEW_TOKENS = 120
_FREQUENT_NEW_TOKENS = 50
_COMMON_PREFACE = (
    "Here is a numbered list of words. Some of them occur far more often than the others. "
    "Keep an eye on those.\n"
)
_COMMON_QUESTION = f"\nQuestion: Which {_COMMON_WORDS} words occur most often in the list above?"
_COMMON_LEAD = f"Answer: The {_COMMON_WORDS} words that occur most often are:"


def common_words(rng: random.Random, tokens: int, prompter: Prompter) -> Draft:
    """Ten words occur often, all others seldom; the ten are asked for.

    RULER's common words extraction: 30 times against 3 in prompts of 4096 tokens and more,
    6 times against 1 in shorter ones; a small worked example goes first. A filler unit is one
    more seldom word.

    Differences: words are coined from syllables, all of one length, so that there are enough
    of them and none is part of another. Where a tokenizer needs so many tokens that 4096 or more
    cannot hold ten seldom words three times, the prompt is made as a shorter one.
    """
    seed = rng.getrandbits(64)
    long = _common_words(random.Random(seed), long=True)
    fits = len(prompter.ids(long.prompt(prompter, _COMMON_WORDS))) <= tokens
    if tokens >= _LONG_PROMPT_TOKENS and fits:
        return long
    return _common_words(random.Random(seed), long=False)


def _common_words(rng: random.Random, *, long: bool) -> Draft:
    often, seldom = (30, 3) if long else (6, 1)
    shown_often, shown_seldom, shown_others = (10, 3, 30) if long else (3, 1, 10)
    deck = coined_word_deck(rng)
    shown, shown_rest = _take(deck, _COMMON_WORDS), _take(deck, shown_others)
    common, rest = _take(deck, _COMMON_WORDS), Filler(deck)
    seed = rng.getrandbits(64)
    example = _shuffled([*shown * shown_often, *shown_rest * shown_seldom], seed)
    shown_text = "\n".join([
        _COMMON_PREFACE, _numbered(example), _COMMON_QUESTION,
        f"{_COMMON_LEAD} {_numbered(shown)}",
    ])  # fmt: skip

    def pieces(units: int) -> Sequence[str]:
        return _entries(_shuffled([*common * often, *rest.take(units) * seldom], seed))

    return Draft(
        task="common_words",
        preface=f"{shown_text}\n\n{_COMMON_PREFACE}",
        pieces=pieces,
        least_units=1,
        question=_COMMON_QUESTION,
        lead=_COMMON_LEAD,
        answer=f" {_numbered(common)}",
        values=tuple(common),
        new_tokens=_COMMON_NEW_TOKENS,
    )


def frequent_words(rng: random.Random, tokens: int) -> Draft:
    """Coded words whose frequencies fall off with the square of their rank; three are asked for.

    RULER's frequent words extraction: alpha = 2, six random letters, a vocabulary of one word
    per 50 tokens, and dots in place of the first rank. A filler unit is one drawn word.

    Differences: the prompt is never so short that the third and the fourth word are level.
    """
    coded = different(partial(letters, rng, _CODED_LETTERS))
    ranked = list(islice(coded, max(_FEWEST_CODED_WORDS, tokens // _TOKENS_PER_CODED_WORD)))
    ranked[0] = "..."
    frequent = ranked[1:4]
    return Draft(
        task="frequent_words",
        preface="Here is a text in code. Count how often every coded word occurs in it.\n",
        pieces=partial(_coded_text, ranked, rng.getrandbits(64)),
        least_units=_SURE_RANKING_DRAWS,
        question="\nQuestion: Leaving the dots (...) aside, which three coded words occur most "
        "often in the text above?",
        lead="Answer: The three coded words that occur most often are:",
        answer=f" {', '.join(frequent)}.",
        values=tuple(frequent),
        new_tokens=_FREQUENT_NEW_TOKENS,
    )


def _take(deck: Iterator[str], count: int) -> list[str]:
    return list(islice(deck, count))


def _shuffled(words: list[str], seed: int) -> list[str]:
    random.Random(seed).shuffle(words)
    return words


def _numbered(words: Sequence[str]) -> str:
    return " ".join(_entries(words))


def _entries(words: Sequence[str]) -> list[str]:
    return [f"{number}. {word}" for number, word in enumerate(words, 1)]


def _coded_text(ranked: Sequence[str], seed: int, units: int) -> Sequence[str]:
    """About `units` words, the word of rank k with a share of k ** -2 / zeta(2), shuffled."""
    drawn = [
        word
        for rank, word in enumerate(ranked, 1)
        for _ in range(int(units / rank**2 / _ZETA_OF_2))
    ]
    return _shuffled(drawn, seed)
