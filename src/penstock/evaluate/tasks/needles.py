"""Needle tasks: facts about keys hidden in filler (single, multi-key, multi-value, multi-query)."""

import random
from collections.abc import Callable

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.documents import (
    PREFACE,
    Document,
    count_tokens,
    essay,
    hide,
    hide_at,
    noise,
)
from penstock.evaluate.tasks.sample import Sample
from penstock.evaluate.tasks.words import Words

_VALUES = 4
_QUERIES = 4
_FEW = (4, 24)
_DIGITS = (4, 6)
_WORD_NEEDLE = 10


class Facts:
    """How one document words its facts: two-word values or numbers, and the noun for them.

    Args:
        words: the word lists.
        rng: drawn from for the kind and for every value.
    """

    def __init__(self, words: Words, rng: random.Random) -> None:
        self._words = words
        self._rng = rng
        self._digits = rng.randint(*_DIGITS) if rng.random() < 0.5 else 0
        self.noun = "special magic number" if self._digits else "secret word"

    def value(self) -> str:
        """A random value: digits, or two words."""
        if self._digits:
            return " ".join(str(self._rng.randrange(10)) for _ in range(self._digits))
        return f"{self._rng.choice(self._words.adjectives)} {self._rng.choice(self._words.nouns)}"

    def tell(self, key: str, value: str) -> str:
        """The sentence that hides one fact."""
        return f"The {self.noun} for {key} is {value} ."

    def ask(self, key: str) -> str:
        """The question after one fact, up to where the answer starts."""
        return (
            f"Question : What is the {self.noun} for {key} ? Answer : The {self.noun} for {key} is"
        )


def single(
    tokens: int, rng: random.Random, words: Words, *, repeated: bool, depth: float | None = None
) -> Sample:
    """One fact in repeated sentences (`repeated`) or in random ones."""
    facts = Facts(words, rng)
    key = words.key_pool(rng, 1)[0]
    value = facts.value()
    needle = facts.tell(key, value)
    document = Document(tokens, PREFACE, facts.ask(key), count_tokens(needle))
    filler = noise(document.room) if repeated else essay(document.room, words, rng)
    body = hide([needle], filler, rng) if depth is None else hide_at(depth, needle, filler)
    task = "single_noise" if repeated else "single_essay"
    return _sample(task, document.finish(body), [value], value, depth)


def multi_key_few(
    tokens: int, rng: random.Random, words: Words, *, depth: float | None = None
) -> Sample:
    """A few facts of one kind in random sentences, one of them asked for."""
    facts = Facts(words, rng)
    keys = words.key_pool(rng, 1 + _few(tokens, rng))
    values = [facts.value() for _ in keys]
    needles = [facts.tell(key, value) for key, value in zip(keys, values, strict=True)]
    asked = needles[0]
    rng.shuffle(needles)
    document = Document(tokens, PREFACE, facts.ask(keys[0]), sum(map(count_tokens, needles)))
    body = hide(needles, essay(document.room, words, rng), rng)
    prompt = document.finish(_moved(asked, body, depth))
    return _sample("multi_key_few", prompt, [values[0]], values[0], depth)


def multi_key_full(
    tokens: int, rng: random.Random, words: Words, *, depth: float | None = None
) -> Sample:
    """A document that is nothing but facts of one kind, one of them asked for."""
    facts = Facts(words, rng)
    keys = words.key_pool(rng, max(2, tokens // _WORD_NEEDLE))
    document = Document(tokens, PREFACE, facts.ask(keys[0]), 0)
    needles: list[str] = []
    room = document.room
    answer = ""
    for key in keys:
        value = facts.value()
        needle = facts.tell(key, value)
        room -= count_tokens(needle)
        if room < 0:
            break
        needles.append(needle)
        answer = answer or value
    if not needles:
        raise ConfigError(f"tokens={tokens} is too short for this task: no fact fits in")
    asked = needles[0]
    rng.shuffle(needles)
    prompt = document.finish(_moved(asked, needles, depth))
    return _sample("multi_key_full", prompt, [answer], answer, depth)


def multi_value(
    tokens: int, rng: random.Random, words: Words, *,
    draw: Callable[[Facts], list[str]] | None = None,
) -> Sample:  # fmt: skip
    """One key with several values among other facts; all are asked for, in order of appearance.

    Args:
        tokens: most tokens of the prompt.
        rng: drawn from.
        words: the word lists.
        draw: makes the asked key's values; None: independent ones.
    """
    facts = Facts(words, rng)
    key, *others = words.key_pool(rng, 1 + _few(tokens, rng))
    values = [facts.value() for _ in range(_VALUES)] if draw is None else draw(facts)
    needles = [facts.tell(key, value) for value in values]
    for other in others:
        needles.insert(rng.randrange(len(needles) + 1), facts.tell(other, facts.value()))
    question = (
        f"Question : What are all the {facts.noun}s for {key} ? "
        f"Answer : The {facts.noun}s for {key} are"
    )
    document = Document(tokens, PREFACE, question, sum(map(count_tokens, needles)))
    prompt = document.finish(hide(needles, essay(document.room, words, rng), rng))
    return _sample("multi_value", prompt, values, " , ".join(values))


def multi_query(tokens: int, rng: random.Random, words: Words) -> Sample:
    """Several keys among other facts, asked for in one question."""
    facts = Facts(words, rng)
    keys = words.key_pool(rng, _QUERIES + _few(tokens, rng))
    told = {key: facts.value() for key in keys}
    asked = keys[:_QUERIES]
    question = f"Question : What are the {facts.noun}s for {' , '.join(asked)} ? Answer :"
    needles = [facts.tell(key, value) for key, value in told.items()]
    rng.shuffle(needles)
    document = Document(tokens, PREFACE, question, sum(map(count_tokens, needles)))
    prompt = document.finish(hide(needles, essay(document.room, words, rng), rng))
    answers = [f"{key} is {told[key]}" for key in asked]
    return _sample("multi_query", prompt, answers, " , ".join(answers))


def _few(tokens: int, rng: random.Random) -> int:
    """How many facts besides those asked for; fewer in a short document."""
    return min(rng.randint(*_FEW), max(1, tokens // 64))


def _moved(needle: str, body: list[str], depth: float | None) -> list[str]:
    """The body with one of its sentences moved to a depth, if there is one."""
    if depth is None:
        return body
    return hide_at(depth, needle, [sentence for sentence in body if sentence != needle])


def _sample(
    task: str, prompt: str, values: list[str], answer: str, depth: float | None = None
) -> Sample:
    """A sample whose answer ends in a full stop (and `<eos>`)."""
    return Sample(task, prompt, f"{answer} .", count_tokens(answer) + 2, tuple(values), depth=depth)
