"""Variable tracking in English: who holds a value after a chain of assignments."""

import random
import string
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise

from penstock.evaluate.tasks.english.filler import joined, noise
from penstock.evaluate.tasks.english.lexicon import different, digits, letters
from penstock.evaluate.tasks.english.needles import insert_at
from penstock.evaluate.tasks.english.prompt_fit import Draft

_HOPS = 4
_VALUE_DIGITS = 5
_NAME_LETTERS = 5
_EXAMPLE_LETTERS = 3
_EXAMPLE_SENTENCES = 40
_NEW_TOKENS = 30
_PREFACE = "The text below assigns values to variables. Keep track of every assignment.\n"


def variable_tracking(rng: random.Random) -> Draft:
    """One chain of five variables in noise; every variable of it is asked for.

    Source: RULER (Hsieh et al., COLM 2024), variable tracking: one chain, four hops, noise as
    haystack, a worked example with shorter names in front.

    Differences: sentences and noise are our own.
    """
    example_names, example_value, example = _chain(rng, _EXAMPLE_LETTERS)
    names, value, pieces = _chain(rng, _NAME_LETTERS)
    shown = "\n".join([
        _PREFACE, joined(example(_EXAMPLE_SENTENCES), " "), _question(example_value),
        f"{_lead(example_value)} {', '.join(example_names)}.",
    ])  # fmt: skip
    return Draft(
        task="variable_tracking",
        preface=f"{shown}\n\n{_PREFACE}",
        pieces=pieces,
        question=_question(value),
        lead=_lead(value),
        answer=f" {', '.join(names)}.",
        values=tuple(names),
        new_tokens=_NEW_TOKENS,
    )


def _chain(
    rng: random.Random, name_letters: int
) -> tuple[Sequence[str], str, Callable[[int], Sequence[str]]]:
    """Names, their value, and the text's sentences by its number of noise sentences."""
    names_of = different(partial(letters, rng, name_letters, string.ascii_uppercase))
    names = list(islice(names_of, _HOPS + 1))
    value = digits(rng, _VALUE_DIGITS)
    assignments = [
        f"VAR {names[0]} = {value}.", *(f"VAR {b} = VAR {a}." for a, b in pairwise(names))
    ]  # fmt: skip
    places = sorted(rng.random() for _ in assignments)

    def pieces(units: int) -> Sequence[str]:
        return insert_at(places, assignments, noise().take(units))

    return names, value, pieces


def _question(value: str) -> str:
    return f"\nQuestion: Which variables have the value {value} in the text above?"


def _lead(value: str) -> str:
    return (
        f"Answer: Following the assignments in the text above, {_HOPS + 1} variables have the "
        f"value {value}:"
    )
