"""Variable tracking in books and in source code: a variable is traced back to its number."""

import random
from itertools import islice, pairwise

from penstock.evaluate.tasks.english.lexicon import digits, key_deck
from penstock.evaluate.tasks.english.prompt_fit import Draft
from penstock.evaluate.tasks.real.ground import Ground

_CHAINS = 3
_HOPS = 5
_VALUE_DIGITS = 5


def tracking(rng: random.Random, ground: Ground) -> Draft:
    """Three chains of five assignments, scattered; the steps back from one chain's end are asked.

    Source: after RULER's variable tracking (Hsieh et al., COLM 2024): chains of assignments in a
    long text.

    Differences: RULER gives the number and asks for all names, at which models of half a billion
    parameters fail. Here the end of a chain is given and every step back is spelled out, so that
    each is looked up while it is written. Names are words, and two chains more distract.
    """
    names = (key.replace("-", "_") for key in key_deck(rng))
    chains = [
        [*islice(names, _HOPS), digits(rng, _VALUE_DIGITS)] for _ in range(_CHAINS)
    ]  # fmt: skip
    steps = [list(pairwise(chain)) for chain in chains]
    told = [ground.told(f"VAR {a} = {b}.", f"{a} = {b}") for chain in steps for a, b in chain]
    rng.shuffle(told)
    asked, said = chains[0][0], [f"{a} = {b}" for a, b in steps[0]]
    return Draft(
        task="tracking",
        preface=f"The {ground.noun} below assigns variables here and there. Keep track of them.\n",
        pieces=ground.hiding(told, rng),
        question=f"\nQuestion: Trace the variable {asked} in the {ground.noun} above back to its "
        "number. Give every assignment on the way, separated by commas, like this: "
        "first = second, second = third, third = 12345",
        lead=f"Answer: {asked} =",
        answer=f"{', '.join(said).removeprefix(f'{asked} =')}",
        values=tuple(said),
        opening=f"{asked} =",
        new_tokens=0,
    )
