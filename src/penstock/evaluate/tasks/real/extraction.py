"""Extraction: a long report becomes a JSON list, record by record."""

import json
import random
from itertools import islice

from penstock.evaluate.tasks.english.lexicon import coined_word_deck
from penstock.evaluate.tasks.english.prompt_fit import Draft
from penstock.evaluate.tasks.real.ground import Ground

FEWEST, MOST = 20, 60
_TOKENS_PER_RECORD = 2048
"""Beyond the fewest, one record more for so many tokens of the prompt."""


def extraction(rng: random.Random, tokens: int, ground: Ground) -> Draft:
    """Numbered deliveries lie scattered in a report; a JSON list of all of them is asked for.

    Source: ours, after the tasks at which "KV Cache Offloading for Context-Intensive Tasks"
    (arXiv 2604.08426) found that offloaded caches fail: every record of the answer lies somewhere
    else. 20 records in short prompts, up to 60 in long ones. The answer's first record is given,
    so that small models keep to the form; the score is the share of the others' fields.
    """
    count = min(MOST, FEWEST + tokens // _TOKENS_PER_RECORD)
    names = [word.capitalize() for word in islice(coined_word_deck(rng), count)]
    records = [
        {"delivery": number, "carrier": name, "boxes": rng.randrange(100, 1000)}
        for number, name in enumerate(names, 1)
    ]
    facts = [_told(record, ground) for record in records]
    given, *lines = [json.dumps(record) for record in records]
    opening = '{"delivery": 2,'
    return Draft(
        task="extraction",
        preface=f"The {ground.noun} below records deliveries here and there. Each of them has a "
        "number, a carrier and a number of boxes.\n",
        pieces=ground.hiding(facts, rng, in_order=True),
        question=f"\nQuestion: List all {count} deliveries of the {ground.noun} above as JSON, in "
        'the order of their numbers, one a line, with the fields "delivery", "carrier" and '
        '"boxes".',
        lead=f"```json\n[\n{given},\n{opening}",
        answer=",\n".join(lines).removeprefix(opening) + "\n]\n```",
        values=tuple(lines),
        metric="record_fields",
        opening=opening,
        new_tokens=0,
    )


def _told(record: dict[str, object], ground: Ground) -> str:
    said = "Delivery {delivery}: carrier {carrier}, boxes {boxes}".format(**record)
    return ground.told(f"{said}.", f"# {said}")
