"""Filler text in English: five sentences over and over, or prose made up from a small grammar."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice

_NOISE = (
    "Rain falls on the roof.",
    "Bread is baked at dawn.",
    "The road runs north.",
    "One day follows another.",
    "So it goes, round and round.",
)
_PEOPLE = (
    "Abena", "Bertil", "Carmen", "Dmitri", "Elske", "Farid", "Greta", "Hiroshi", "Ingrid", "Jamal",
    "Katya", "Lorenzo", "Mirela", "Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Stefan", "Tomoko",
    "Ulrich", "Vera", "Walid", "Xenia", "Yusuf", "Zofia",
)  # fmt: skip
_TRADES = (
    "carpenter", "teacher", "farmer", "printer", "nurse", "baker", "surveyor", "painter",
    "librarian", "mason", "potter", "gardener", "tailor", "ferryman", "clerk", "engineer", "cook",
    "brewer", "weaver", "postman", "watchmaker", "geologist",
)  # fmt: skip
_PLACES = (
    "the old town", "the market square", "the upper valley", "the railway yard", "the north coast",
    "the lower mill", "the hillside", "the school", "the town hall", "the ferry landing",
    "the apple orchard", "the workshop", "the bath house", "the border post", "the quarry",
)  # fmt: skip
_TIMES = (
    "in the spring", "after the harvest", "before noon", "late in the evening", "that winter",
    "during the holidays", "on most Sundays", "for several years", "once the snow had melted",
    "at the end of the month", "when the shops had closed", "in those days",
)  # fmt: skip
_THINGS = (
    "a crate of books", "a broken clock", "the annual accounts", "a set of maps", "a pair of boots",
    "the new timetable", "a sack of flour", "a box of photographs", "the village fund",
    "an unfinished letter", "a stone wall", "the drainage plan", "a rowing boat", "the choir",
    "a small printing press", "the water pump", "a barrel of cider", "a chest of tools",
)  # fmt: skip
_VERBS = (
    "repaired", "described", "carried home", "worried about", "paid for", "looked after", "drew",
    "argued about", "forgot", "counted", "inherited", "sold", "borrowed", "wrote about", "admired",
    "rebuilt", "hid", "insured",
)  # fmt: skip
_VIEWS = (
    "patience is worth more than talent", "nobody reads the small print",
    "good tools last longer than good advice", "a short road is seldom a quiet one",
    "every plan looks better in the morning", "the cheapest repair is the one done early",
    "most quarrels begin with a borrowed ladder", "habits travel faster than news",
    "it is easier to start than to stop", "silence is a kind of answer",
    "a good neighbour asks twice", "the best maps leave something out",
)  # fmt: skip
_REASONS = (
    "the weather had turned", "there was little else to do", "the roads were closed",
    "money was short", "everybody expected it", "the old way had failed", "no one had objected",
    "the family insisted", "it seemed the polite thing", "the council had asked for it",
)  # fmt: skip
_PATTERNS = (
    "{time}, {name} {verb} {thing} near {place}.",
    "{name} often said that {view}.",
    "The {trade} from {place} {verb} {thing}, because {reason}.",
    "Nobody in {place} knew why {name} {verb} {thing}.",
    "{time}, the {trade} and {name} met at {place} and talked about {thing}.",
    "It was said in {place} that {view}, and the {trade} agreed.",
    "{name} {verb} {thing} and, because {reason}, {verb2} {thing2} as well.",
    "If {view}, thought {name}, then {thing} could wait.",
    "Because {reason}, the {trade} left {place} {time}.",
    "There is a story that {name} once {verb} {thing} for a {trade}.",
    "{time}, {place} was empty, and only {name} {verb} {thing}.",
    "The {trade} believed that {view}; {name} was not so sure.",
    "What {name} remembered best was how the {trade} {verb} {thing} {time}.",
    "{thing} stood in {place} {time}, since {reason}.",
    "Perhaps {view}, but {name} {verb} {thing} all the same.",
)
_PARAGRAPH_SENTENCES = (5, 12)


class Filler:
    """Sentences without end, made when they are first asked for; the same ones every time."""

    def __init__(self, sentences: Iterator[str]) -> None:
        self._sentences = sentences
        self._made: list[str] = []

    def take(self, count: int) -> list[str]:
        """The first `count` sentences. [count]"""
        self._made.extend(islice(self._sentences, max(0, count - len(self._made))))
        return self._made[:count]


Haystack = Callable[[random.Random], Filler]
"""Makes the prose that facts are hidden in; `prose` is one, `TextHaystack` another."""


def joined(pieces: Sequence[str], separator: str) -> str:
    """Pieces as one text; one that begins with a line break needs no separator before it."""
    first, *rest = pieces or ("",)
    spaced = (piece if piece.startswith("\n") else f"{separator}{piece}" for piece in rest)
    return first.lstrip("\n") + "".join(spaced)


def noise() -> Filler:
    """Five short sentences, over and over."""
    return Filler(cycle(_NOISE))


def prose(rng: random.Random) -> Filler:
    """Made-up prose without digits; each paragraph has its own person, trade and place.

    The random numbers are split off, so that what is drawn from `rng` afterwards does not
    depend on how many sentences are taken.
    """
    return Filler(_sentences(random.Random(rng.getrandbits(64))))


def _sentences(rng: random.Random) -> Iterator[str]:
    while True:
        name, trade = rng.choice(_PEOPLE), rng.choice(_TRADES)
        places = rng.sample(_PLACES, 2)
        for _ in range(rng.randint(*_PARAGRAPH_SENTENCES)):
            verbs, things = rng.sample(_VERBS, 2), rng.sample(_THINGS, 2)
            sentence = rng.choice(_PATTERNS).format(
                name=name, trade=trade, place=rng.choice(places), time=rng.choice(_TIMES),
                thing=things[0], thing2=things[1], verb=verbs[0], verb2=verbs[1],
                view=rng.choice(_VIEWS), reason=rng.choice(_REASONS),
            )  # fmt: skip
            yield sentence[0].upper() + sentence[1:]
