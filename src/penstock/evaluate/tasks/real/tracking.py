"""Variable tracking in books and in source code: a variable is traced back to its number."""

import random
from itertools import islice, pairwise

from penstock.evaluate.tasks.english.lexicon import digits, key_deck
from penstock.evaluate.tasks.english.prompt_fit import Draft
from penstock.evaluate.tasks.real.ground import Ground

_CHAINS = 2
_HOPS = 4
_VALUE_DIGITS = 5


def tracking(rng: random.Random, ground: Ground) -> Draft:
    """Two chains of four assignments, scattered; all names of one chain are asked for.

    Source: after RULER's variable tracking (Hsieh et al., COLM 2024): chains of assignments in a
    long text.

    Differences: RULER gives the number and asks for all names, at which models of half a billion
    parameters fail. Here the end of a chain is given and every step back to the number is named, so
    that each is looked up while it is written. Names are words, and one chain more distracts.
    """
    names = (key.replace("-", "_") for key in key_deck(rng))
    chains = [
        [*islice(names, _HOPS), digits(rng, _VALUE_DIGITS)] for _ in range(_CHAINS)
    ]  # fmt: skip
    told = [
        ground.told(f"VAR {a} = {b}.", f"{a} = {b}") for chain in chains for a, b in pairwise(chain)
    ]
    rng.shuffle(told)
    asked, *following = chains[0]
    opening = f'["{asked}",'
    return Draft(
        task="tracking",
        preface=f"The {ground.noun} below assigns variables here and there. Keep track of them.\n",
        pieces=ground.hiding(told, rng),
        question=f"\nQuestion: In the {ground.noun} above the variable {asked} is set to another "
        f"variable, that one to the next, and the last one to a number. Follow the {_HOPS} "
        "assignments and give all variables on the way and the number, as a JSON list of strings.",
        lead=f"```json\n{opening}",
        answer=" " + ", ".join(f'"{name}"' for name in following) + "]\n```",
        values=tuple(following),
        new_tokens=0,
    )
