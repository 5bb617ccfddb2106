"""The bundled model's words: adjectives and nouns for keys, and all of them for filler."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import ConfigError

_ADJECTIVES = ("amber", "zealous")
_NOUNS = ("acorn", "zebra")
_COMMON = ("able", "yet")


class Tokenizer(Protocol):
    """Whatever can list its vocabulary, as every Hugging Face tokenizer can."""

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        ...


@dataclass(frozen=True, slots=True)
class Words:
    """Word lists of the bundled model.

    Attributes:
        adjectives: first words of a key.
        nouns: second words of a key; also the variables' names.
        filler: every word that an essay sentence may hold.
    """

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    filler: tuple[str, ...]

    @classmethod
    def of(cls, source: "Words | Tokenizer | Mapping[str, int]") -> "Words":
        """Take the word lists out of a tokenizer or its vocabulary.

        The vocabulary holds the adjectives, the nouns and the common words as three runs,
        one behind the other; their first and last words mark them.

        Raises:
            ConfigError: the vocabulary is not the bundled model's.
        """
        if isinstance(source, Words):
            return source
        vocabulary = source if isinstance(source, Mapping) else source.get_vocab()
        by_id = sorted(vocabulary, key=lambda word: vocabulary[word])
        runs = [_run(by_id, first, last) for first, last in (_ADJECTIVES, _NOUNS, _COMMON)]
        return cls(runs[0], runs[1], runs[0] + runs[1] + runs[2])

    def key_pool(self, rng: random.Random, count: int) -> list[str]:
        """Draw `count` different keys of two words, in three cases of ten from a tight pool.

        In a tight pool most keys share a word with others, so that a half-remembered key
        is not enough to find the right one.

        Raises:
            ConfigError: there are fewer than `count` keys.
        """
        adjectives, nouns = self.adjectives, self.nouns
        if rng.random() < 0.3:
            side = max(4, int((3 * count) ** 0.5) + 1)
            adjectives = tuple(rng.sample(adjectives, min(side, len(adjectives))))
            nouns = tuple(
                rng.sample(nouns, min(max(side, 3 * count // len(adjectives) + 1), len(nouns)))
            )
        total = len(adjectives) * len(nouns)
        if count > total:
            raise ConfigError(f"{count} different keys were asked for; there are {total}")
        picks = rng.sample(range(total), count)
        return [f"{adjectives[p // len(nouns)]} {nouns[p % len(nouns)]}" for p in picks]


def _run(by_id: list[str], first: str, last: str) -> tuple[str, ...]:
    """The words from `first` to `last`, both included, in the order of their ids."""
    if first not in by_id or last not in by_id or by_id.index(first) >= by_id.index(last):
        raise ConfigError(
            f"the recall tasks need the bundled model's vocabulary; "
            f"this one has no run of words from {first!r} to {last!r}"
        )
    return tuple(by_id[by_id.index(first) : by_id.index(last) + 1])
