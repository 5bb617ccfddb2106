"""Multi-hop over documents: from a person to a firm, to its town, to the town's mayor."""

import random
from itertools import islice

from penstock.evaluate.tasks.english.lexicon import coined_word_deck
from penstock.evaluate.tasks.english.needles import listed
from penstock.evaluate.tasks.english.prompt_fit import Draft
from penstock.evaluate.tasks.real.ground import Ground

_CHAINS = 6
_ASKED = 4


def multi_hop(rng: random.Random, ground: Ground) -> Draft:
    """Eighteen documents in random order hold six chains of three hops; four chains are asked for.

    Source: ours, after RULER's multi-hop tracing and question answering over documents. Each
    document states one fact and goes on as a book or as source code; the answer spells every hop
    out, so that each is looked up while it is written. The first chain is given, so that small
    models keep to the form; the score is the share of the others' hops.
    """
    words = (word.capitalize() for word in coined_word_deck(rng))
    chains = [tuple(islice(words, 4)) for _ in range(_CHAINS)]
    told = [fact for chain in chains for fact in _facts(*chain)]
    rng.shuffle(told)
    facts = [
        f"\n\nDocument {number}: {subject}\n{fact}\n"
        for number, (subject, fact) in enumerate(told, 1)
    ]
    asked = chains[:_ASKED]
    given, *lines = ["- " + " ".join(fact for _, fact in _facts(*chain)) for chain in asked]
    opening = f"- {asked[1][0]} works for"
    return Draft(
        task="multi_hop",
        preface="Below are documents. Each begins with a fact about a person, a firm or a town.\n",
        pieces=ground.hiding(facts, rng, in_order=True),
        question=f"\nQuestion: For each of {listed([chain[0] for chain in asked])}: which firm "
        "does the person work for, in which town is that firm, and who is the mayor of that town? "
        "Answer with one line for each person.",
        lead=f"Answer:\n{given}\n{opening}",
        answer="\n".join(lines).removeprefix(opening),
        values=tuple(name for chain in asked[1:] for name in chain[1:]),
        new_tokens=0,
    )


def _facts(person: str, firm: str, town: str, mayor: str) -> list[tuple[str, str]]:
    return [
        (person, f"{person} works for the firm {firm}."),
        (firm, f"The firm {firm} is in the town of {town}."),
        (town, f"The mayor of {town} is {mayor}."),
    ]
