"""RULER's retrieval family in English: one or more facts about keys, hidden in a haystack.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(COLM 2024), section 3 and the published configuration of its thirteen tasks.

Differences: sentences, filler and keys are our own, prose from a small grammar stands for the
essays, and the prompt's length does not include the tokens to generate.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.evaluate.tasks.english.filler import Filler, Haystack, noise, prose
from penstock.evaluate.tasks.english.lexicon import different, digits, key_deck, random_uuid
from penstock.evaluate.tasks.english.prompt_fit import Draft
from penstock.evaluate.tasks.grid import places_at

_NEW_TOKENS = 128
_NUMBER_DIGITS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedleKind:
    """One member of the family.

    Attributes:
        haystack: "noise" (five sentences repeated), "prose", or "needles" (nothing but facts).
        keys: how many keys have facts, besides those of a haystack of needles.
        values: facts of each key.
        asked: how many of the keys are asked for.
        uuid_keys: keys are UUIDs rather than words.
        uuid_values: values are UUIDs rather than numbers of seven digits.
    """

    haystack: str
    keys: int = 1
    values: int = 1
    asked: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """How the facts are told and asked for; `{noun}`, `{key}`, `{value}`, `{names}` are put in."""

    number: str = "vault number"
    code: str = "pass code"
    preface: str = (
        "The text below contains {noun}s. Read it closely and keep the {noun}s in mind; "
        "at its end you will be asked about them.\n"
    )
    fact: str = "One {noun} of {key} is {value}."
    ask_one: str = "\nQuestion: What is the {noun} of {names} in the text above?"
    ask_many: str = "\nQuestion: What are all the {noun}s of {names} in the text above?"
    lead_one: str = "Answer: According to the text above, the {noun} of {names} is"
    lead_many: str = "Answer: According to the text above, the {noun}s of {names} are"

    def question(self, noun: str, keys: Sequence[str], *, many: bool) -> str:
        """What stands behind the document, with its line break."""
        return (self.ask_many if many else self.ask_one).format(noun=noun, names=listed(keys))

    def lead(self, noun: str, keys: Sequence[str], *, many: bool) -> str:
        """What the answer starts with."""
        return (self.lead_many if many else self.lead_one).format(noun=noun, names=listed(keys))


BENCH_WORDING = Wording()
NEEDLE_KINDS = {
    "single_1": NeedleKind(haystack="noise"),
    "single_2": NeedleKind(haystack="prose"),
    "single_3": NeedleKind(haystack="prose", uuid_values=True),
    "multi_key_1": NeedleKind(haystack="prose", keys=4),
    "multi_key_2": NeedleKind(haystack="needles"),
    "multi_key_3": NeedleKind(haystack="needles", uuid_keys=True, uuid_values=True),
    "multi_value": NeedleKind(haystack="prose", values=4),
    "multi_query": NeedleKind(haystack="prose", keys=4, asked=4),
}


def draft(
    task: str, rng: random.Random, *, depth: float | None = None, haystack: Haystack = prose
) -> Draft:
    """Draw everything of a task of `NEEDLE_KINDS` but its length.

    Args:
        task: its name.
        rng: where all randomness comes from.
        depth: where the fact that is asked for goes, 0 to 1; only where it is a single one.
            Nothing else changes with it.
        haystack: makes the prose of the tasks that have some.
    """
    kind = NEEDLE_KINDS[task]
    keys = _deck(rng, uuids=kind.uuid_keys)
    return draft_of(task, kind, keys, rng, depth=depth, haystack=haystack).draft


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedleDraft:
    """A draft, and what its document tells."""

    draft: Draft
    noun: str
    told: dict[str, tuple[str, str]]
    """Key and value of each fact by its sentence; of a haystack of needles also of facts that a
    longer document would have."""
    asked: list[str]


def draft_of(
    task: str, kind: NeedleKind, keys: Iterator[str], rng: random.Random, *,
    depth: float | None = None, haystack: Haystack = prose, wording: Wording = BENCH_WORDING,
) -> NeedleDraft:  # fmt: skip
    """Draw a draft of any kind, with any keys and wording; see `draft`."""
    noun = wording.code if kind.uuid_values else wording.number
    values = different(partial(_value, rng, uuids=kind.uuid_values))
    told = {next(keys): [next(values) for _ in range(kind.values)] for _ in range(kind.keys)}
    asked = list(told)[: kind.asked]
    by_fact: dict[str, tuple[str, str]] = {}

    def tell(key: str, value: str) -> str:
        fact = wording.fact.format(noun=noun, key=key, value=value)
        by_fact[fact] = (key, value)
        return fact

    facts = [tell(key, value) for key in told for value in told[key]]
    places = [rng.random() for _ in facts]
    if depth is not None:
        assert kind.values == kind.asked == 1, task
        places[0] = depth
    if kind.haystack == "noise":
        filler = noise()
    elif kind.haystack == "prose":
        filler = haystack(rng)
    else:
        filler = Filler(tell(key, next(values)) for key in keys)
    wanted = tuple(value for key in asked for value in told[key])
    many = len(wanted) > 1
    draft = Draft(
        task=task,
        preface=wording.preface.format(noun=noun),
        pieces=partial(_pieces, filler, facts, places),
        separator="\n" if kind.haystack == "needles" else " ",
        question=wording.question(noun, asked, many=many),
        lead=wording.lead(noun, asked, many=many),
        answer=f" {', '.join(wanted)}.",
        values=wanted,
        new_tokens=_NEW_TOKENS,
        depth=depth,
    )
    return NeedleDraft(draft=draft, noun=noun, told=by_fact, asked=asked)


def insert_at(
    places: Sequence[float], things: Sequence[str], sentences: Sequence[str]
) -> list[str]:
    """Put things between sentences.

    Args:
        places: for each thing, the share of the sentences' characters before it, 0 to 1.
        things: kept in the order of their places; equal places keep their order.
        sentences: the text.
    """
    pairs = sorted(zip(places, things, strict=True), key=lambda pair: pair[0])
    indexes = places_at([place for place, _ in pairs], [len(sentence) for sentence in sentences])
    body: list[str] = []
    start = 0
    for index, (_, thing) in zip(indexes, pairs, strict=True):
        body.extend(sentences[start:index])
        body.append(thing)
        start = index
    body.extend(sentences[start:])
    return body


def _pieces(
    filler: Filler, facts: Sequence[str], places: Sequence[float], units: int
) -> Sequence[str]:
    return insert_at(places, facts, filler.take(units))


def _deck(rng: random.Random, *, uuids: bool) -> Iterator[str]:
    draw: Callable[[], str] = partial(random_uuid, rng)
    return different(draw) if uuids else key_deck(rng)


def _value(rng: random.Random, *, uuids: bool) -> str:
    return random_uuid(rng) if uuids else digits(rng, _NUMBER_DIGITS)


def listed(keys: Sequence[str]) -> str:
    """Keys as a phrase: commas, and "and" before the last."""
    *first, last = keys
    return f"{', '.join(first)} and {last}" if first else last
