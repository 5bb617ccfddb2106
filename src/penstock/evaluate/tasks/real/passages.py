"""Passages of held-out text that is decoded as it goes on: for fidelity."""

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.prompt_fit import TextTokenizer
from penstock.evaluate.tasks.real.texts import ShippedTexts

FIDELITY: Mapping[str, str] = MappingProxyType({
    "fidelity_prose": "a book", "fidelity_code": "source code",
})  # fmt: skip
"""Measurements of fidelity, and what is read."""
STEPS = 256
"""Tokens that are decoded behind a passage."""
_CHARACTERS_PER_TOKEN = 8
_TRIES = 100


def passage(
    name: str, texts: ShippedTexts, rng: random.Random, tokens: int, tokenizer: TextTokenizer
) -> tuple[int, ...]:
    """Exactly `tokens` tokens of a text from a random paragraph on.

    Args:
        name: one of `FIDELITY`.

    Raises:
        ConfigError: the texts are too short.
    """
    is_code = name == "fidelity_code"
    for _ in range(_TRIES):
        if is_code:
            files = rng.sample(texts.code, len(texts.code))
            text = "\n\n".join(files)
            start = 0
        else:
            text = rng.choice(texts.books)
            start = text.find("\n\n", rng.randrange(len(text))) + 2
        part = text[start : start + tokens * _CHARACTERS_PER_TOKEN]
        if len(part) < tokens:  # no tokenizer makes more tokens than characters of English
            continue
        ids = tokenizer.encode(part, add_special_tokens=True, verbose=False)
        if len(ids) >= tokens:
            return tuple(ids[:tokens])
    raise ConfigError(f"the texts that ship have no passage of {tokens:,} tokens")


def passages(
    name: str, texts: ShippedTexts, tokenizer: TextTokenizer, *, tokens: int, first: int,
    count: int, seed: int,
) -> Sequence[tuple[int, ...]]:  # fmt: skip
    """Passages `first` to `first + count - 1`; the same arguments give the same passages."""
    return [
        passage(name, texts, random.Random(f"{seed}/{name}/{tokens}/{number}"), tokens, tokenizer)
        for number in range(first, first + count)
    ]
