"""Documents of an exact length: a preface, filler with things hidden in it, a question."""

import random
from collections.abc import Sequence
from itertools import cycle

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.grid import places_at
from penstock.evaluate.tasks.words import Words

PREFACE = (
    "Some special information is hidden in the following text . "
    "Memorize it . There is a quiz about it later ."
)
NOISE = (
    "The grass is green .",
    "The sky is blue .",
    "The sun is yellow .",
    "Here we go .",
    "There and back again .",
)
_SENTENCE_WORDS = (6, 14)
_SHORTEST_ESSAY = 3
_BOS = 1


def count_tokens(text: str) -> int:
    """Tokens of a piece of text, without `<bos>`: the bundled tokenizer splits on spaces."""
    return len(text.split())


class Document:
    """A document being made, of at most a given number of tokens.

    Args:
        tokens: length of the finished prompt, `<bos>` and question included.
        preface: what the document starts with.
        question: what follows the document; the answer comes right after it.
        reserve: tokens of the things that will be hidden.

    Raises:
        ConfigError: `tokens` cannot hold even these.
    """

    def __init__(self, tokens: int, preface: str, question: str, reserve: int) -> None:
        self._preface = preface
        self._question = question
        used = _BOS + count_tokens(preface) + count_tokens(question) + reserve
        if tokens < used:
            raise ConfigError(f"tokens={tokens} is too short for this task: it takes {used}")
        self.room = tokens - used

    def finish(self, sentences: Sequence[str]) -> str:
        """The prompt with `sentences` as the document's body."""
        return " ".join([self._preface, *sentences, self._question])


def noise(room: int) -> list[str]:
    """Fill `room` tokens with the same five sentences, over and over.

    A rest shorter than the next sentence is left empty.
    """
    sentences: list[str] = []
    for sentence in cycle(NOISE):
        room -= count_tokens(sentence)
        if room < 0:
            return sentences
        sentences.append(sentence)
    return sentences


def essay(room: int, words: Words, rng: random.Random) -> list[str]:
    """Fill `room` tokens exactly with sentences of random words, some of them frequent.

    How often a word comes falls off with its rank (Zipf's law), and the ranks are drawn anew
    for every document. A rest of one or two tokens is left empty.
    """
    ranked = rng.sample(words.filler, len(words.filler))
    weights = [1.0 / (rank + 10) for rank in range(len(ranked))]
    drawn = rng.choices(ranked, weights, k=max(room, 0))
    shortest, longest = _SENTENCE_WORDS
    sentences: list[str] = []
    while room >= _SHORTEST_ESSAY:
        length = rng.randint(shortest, longest) + 1
        if room - length < _SHORTEST_ESSAY:
            length = room
        sentences.append(" ".join([*drawn[room - length + 1 : room], "."]))
        room -= length
    return sentences


def hide(things: Sequence[str], sentences: Sequence[str], rng: random.Random) -> list[str]:
    """Put `things`, in their order, between the sentences at random places."""
    places = sorted(rng.randrange(len(sentences) + 1) for _ in things)
    body: list[str] = []
    start = 0
    for place, thing in zip(places, things, strict=True):
        body.extend(sentences[start:place])
        body.append(thing)
        start = place
    body.extend(sentences[start:])
    return body


def hide_at(depth: float, thing: str, sentences: Sequence[str]) -> list[str]:
    """Put `thing` between the sentences with about `depth` (0 to 1) of the tokens before it."""
    [place] = places_at([depth], [count_tokens(sentence) for sentence in sentences])
    return [*sentences[:place], thing, *sentences[place:]]
