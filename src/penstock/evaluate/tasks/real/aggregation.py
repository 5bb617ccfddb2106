"""RULER's aggregation in books and in source code: who is named most often."""

import random
from itertools import islice

from penstock.evaluate.tasks.english.lexicon import coined_word_deck
from penstock.evaluate.tasks.english.prompt_fit import Draft
from penstock.evaluate.tasks.real.ground import Ground

_OFTEN = (12, 10, 8)
_SELDOM = 8
"""People who are named once."""


def aggregation(rng: random.Random, ground: Ground) -> Draft:
    """Reviews by eleven people, scattered; the three who signed most of them are asked for.

    Source: RULER's common and frequent words (Hsieh et al., COLM 2024, section 3).

    Differences: counts are fixed, and what is counted lies in a book or in source code: three
    people sign 12, 10 and 8 times, eight others once.
    """
    people = [word.capitalize() for word in islice(coined_word_deck(rng), len(_OFTEN) + _SELDOM)]
    often = people[: len(_OFTEN)]
    counts = [*_OFTEN, *[1] * _SELDOM]
    signed = [name for name, count in zip(people, counts, strict=True) for _ in range(count)]
    rng.shuffle(signed)
    facts = [ground.told(f"(Reviewed by {name}.)", f"# reviewed by {name}") for name in signed]
    return Draft(
        task="aggregation",
        preface=f"The {ground.noun} below carries notes of who reviewed it. Keep count of them.\n",
        pieces=ground.hiding(facts, rng),
        question=f"\nQuestion: Which three people reviewed most often in the {ground.noun} above?",
        lead="Answer: The three people who reviewed most often are:",
        answer=f" {', '.join(often)}.",
        values=tuple(often),
        new_tokens=24,
    )
