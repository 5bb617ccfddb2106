"""RULER's retrieval family in books and in source code.

Source: Hsieh et al., "RULER" (COLM 2024), section 3. Facts, questions and keys are those of
`tasks.english.needles`; in source code a fact is a call. Its variant with several keys has as many
facts as a model of half a billion parameters can tell apart in a few thousand tokens.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.evaluate.tasks.english.lexicon import key_deck
from penstock.evaluate.tasks.english.needles import NeedleKind, Wording, draft_of
from penstock.evaluate.tasks.english.prompt_fit import Draft
from penstock.evaluate.tasks.real.ground import Ground

_NEW_TOKENS = 24
KINDS: Mapping[str, NeedleKind] = MappingProxyType({
    "single_2": NeedleKind(haystack="prose"),
    "single_3": NeedleKind(haystack="prose", uuid_values=True),
    "multi_key": NeedleKind(haystack="prose", keys=12),
    "multi_value": NeedleKind(haystack="prose", values=4),
    "multi_query": NeedleKind(haystack="prose", keys=4, asked=4),
})  # fmt: skip
IN_CODE = Wording(
    preface=(
        "The source code below registers {noun}s here and there. Read it closely and keep the "
        "{noun}s in mind; at its end you will be asked about them.\n"
    ),
    fact='\nregister("{noun}", of="{key}", value="{value}")',
    ask_one="\nQuestion: What is the {noun} of {names} in the source code above?",
    ask_many="\nQuestion: What are all the {noun}s of {names} in the source code above?",
    lead_one="Answer: According to the source code above, the {noun} of {names} is",
    lead_many="Answer: According to the source code above, the {noun}s of {names} are",
)


def needles(task: str, rng: random.Random, ground: Ground) -> Draft:
    """A draft of a task of `KINDS`."""
    wording = IN_CODE if ground.is_code else Wording()
    made = draft_of(
        task, KINDS[task], key_deck(rng), rng, haystack=ground.haystack, wording=wording
    )
    pieces = ground.hiding(list(made.told), rng)
    return replace(made.draft, pieces=pieces, separator=" ", new_tokens=_NEW_TOKENS)
