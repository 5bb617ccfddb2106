"""Variable tracking in books and in source code: a variable is traced back to its number."""

import random
from itertools import islice, pairwise

from penstock.evaluate.tasks.english.lexicon import digits, key_deck
from penstock.evaluate.tasks.english.needles import listed
from penstock.evaluate.tasks.english.prompt_fit import Draft
from penstock.evaluate.tasks.real.ground import Ground

_CHAINS = 4
_ASKED = 3
_HOPS = 3
_VALUE_DIGITS = 5


def tracking(rng: random.Random, ground: Ground) -> Draft:
    """Four chains of three assignments, scattered; all names of three chains are asked for.

    Source: after RULER's variable tracking (Hsieh et al., COLM 2024): chains of assignments in a
    long text.

    Differences: RULER gives the number and asks for all names, at which models of half a billion
    parameters fail. Here the end of a chain is given and every step back to the number is named, so
    that each is looked up while it is written. Names are words; the first chain is given, so that
    small models keep to the form, and one chain is not asked for.
    """
    names = (key.replace("-", "_") for key in key_deck(rng))
    chains = [[*islice(names, _HOPS), digits(rng, _VALUE_DIGITS)] for _ in range(_CHAINS)]
    told = [
        ground.told(f"VAR {a} = {b}.", f"{a} = {b}") for chain in chains for a, b in pairwise(chain)
    ]
    rng.shuffle(told)
    given, *asked = [", ".join(f'"{name}"' for name in chain) for chain in chains[:_ASKED]]
    lines = [f"[{chain}]" for chain in asked]
    opening = f'["{chains[1][0]}",'
    return Draft(
        task="tracking",
        preface=f"The {ground.noun} below assigns variables here and there. Keep track of them.\n",
        pieces=ground.hiding(told, rng),
        question=f"\nQuestion: In the {ground.noun} above each of the variables "
        f"{listed([chain[0] for chain in chains[:_ASKED]])} is set to another variable, that one "
        f"to the next, and the last one to a number. Follow the {_HOPS} assignments of each and "
        "give the variables on the way and the number, as JSON, one list a line.",
        lead=f"```json\n[\n[{given}],\n{opening}",
        answer=",\n".join(lines).removeprefix(opening) + "\n]\n```",
        values=tuple(name for chain in chains[1:_ASKED] for name in chain[1:]),
        new_tokens=0,
    )
