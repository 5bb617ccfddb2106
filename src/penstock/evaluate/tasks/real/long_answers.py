"""Long answers that must keep to the text: minutes rewritten, a table turned into code."""

import random
from itertools import islice

from penstock.evaluate.tasks.english.lexicon import NOUNS, coined_word_deck
from penstock.evaluate.tasks.english.prompt_fit import Draft
from penstock.evaluate.tasks.real.ground import Ground

_MINUTES = 14
_ROWS = 18


def rewriting(rng: random.Random, ground: Ground) -> Draft:
    """Minutes in the middle of a long text are told again as a list of one line for each person.

    Source: ours. 14 people with four facts each. The first line is given, so that small models keep
    to the form; the score is the share of the others' facts kept.
    """
    words = (word.capitalize() for word in coined_word_deck(rng))
    people = []
    for name in islice(words, _MINUTES):
        goods, other = rng.sample(NOUNS, 2)
        people.append((name, next(words), goods, str(rng.randrange(100, 1000)), other))
    told = " ".join(
        f"{name} from {town} spoke of the {goods}, asked for {sum_} crowns and was followed by a "
        f"talk about the {other}."
        for name, town, goods, sum_, other in people
    )
    opening = f"- {people[1][0]}"
    given, *lines = [
        f"- {name} ({town}): spoke of the {goods}, asked for {sum_} crowns; then a talk about the "
        f"{other}"
        for name, town, goods, sum_, other in people
    ]
    heading = "Minutes of the meeting"
    begins = f"\n\n# {heading}\n# " if ground.is_code else f"\n\n{heading}\n\n"
    return Draft(
        task="long_answer",
        preface=f"The {ground.noun} below has the minutes of a meeting somewhere in it.\n",
        pieces=ground.hiding([f"{begins}{told}\n"], rng),
        question=f"\nQuestion: Rewrite the {heading.lower()} in the {ground.noun} above as a list "
        "with one line for each person, in their order. Each line begins with the name and keeps "
        "the town, what the person spoke of, the sum and the talk that followed.",
        lead=f"Answer:\n{given}\n{opening}",
        answer="\n".join(lines).removeprefix(opening),
        values=tuple("\t".join(person) for person in people[1:]),
        metric="facts",
        opening=opening,
        new_tokens=0,
    )


def translating(rng: random.Random, ground: Ground) -> Draft:
    """A table in the middle of a long text becomes a list of Python dictionaries.

    Source: ours. 18 rows of four columns. The first one is given, so that small models keep to the
    form; the score is the share of the others' fields.
    """
    names = [word.capitalize() for word in islice(coined_word_deck(rng), 2 * _ROWS)]
    rows = [
        {"name": name, "town": town, "item": rng.choice(NOUNS), "count": rng.randrange(10, 1000)}
        for name, town in zip(names[:_ROWS], names[_ROWS:], strict=True)
    ]
    head = ["| name | town | item | count |", "| --- | --- | --- | ---: |"]
    table = [*head, *("| " + " | ".join(map(str, row.values())) + " |" for row in rows)]
    mark = "# " if ground.is_code else ""
    told = "\n".join(f"{mark}{line}" for line in ["Table of stock", "", *table])
    given, *lines = [f"    {row}," for row in rows]
    opening = "    {'name':"
    return Draft(
        task="long_answer",
        preface=f"The {ground.noun} below has a table of stock somewhere in it.\n",
        pieces=ground.hiding([f"\n\n{told}\n"], rng),
        question=f"\nQuestion: Translate the table of stock in the {ground.noun} above into Python "
        "code: a list called stock with one dictionary for each row, one a line, in the order of "
        "the table, with the keys 'name', 'town', 'item' and 'count'.",
        lead=f"```python\nstock = [\n{given}\n{opening}",
        answer="\n".join(lines).removeprefix(opening) + "\n]\n```",
        values=tuple(map(str, rows[1:])),
        metric="record_fields",
        opening=opening,
        new_tokens=0,
    )
