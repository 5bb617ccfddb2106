"""Tasks with answers of 200 to 1000 tokens in which later tokens need earlier ones.

Source: ours. The longer the prompt, the longer the answer; a method that loses its way once
gets no step right any more, so the measure is the share of leading steps.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise

from penstock.evaluate.tasks.english.filler import Haystack, prose
from penstock.evaluate.tasks.english.lexicon import key_deck
from penstock.evaluate.tasks.english.needles import insert_at
from penstock.evaluate.tasks.english.prompt_fit import Draft, Prompter, fit

SHORTEST_ANSWER_TOKENS = 200
LONGEST_ANSWER_TOKENS = 1000
_PROMPT_TOKENS_PER_ANSWER_TOKEN = 16
_COLOURS = ("red", "blue", "green", "yellow")
_LARGEST_COUNT = 99
_COPY_SHARE = 0.2
_EXIT = "exit"


def pointer_chasing(rng: random.Random, tokens: int, prompter: Prompter) -> Draft:
    """A way from place to place through rules in random order, followed to the exit.

    All other rules lead on to places of the way or to one another, never to the exit.
    """
    deck = key_deck(rng)
    pool = list(islice(deck, LONGEST_ANSWER_TOKENS))
    hops = _steps(tokens, prompter, lambda count: _way(pool[1:count]), len(pool))
    path, unused = pool[:hops], pool[hops:]
    rules = [f"{a} leads to {b}." for a, b in pairwise([*path, f"the {_EXIT}"])]
    rules_rng = random.Random(rng.getrandbits(64))
    keyed = [(rules_rng.random(), rule) for rule in rules]
    others = _Detours(path, unused, deck, rules_rng)

    def pieces(units: int) -> Sequence[str]:
        return [rule for _, rule in sorted([*keyed, *others.take(units)])]

    return Draft(
        task="pointer_chasing",
        preface="Each line below says which place leads to which. Read them closely; you will "
        "be asked to follow a way.\n",
        pieces=pieces,
        separator="\n",
        question=f"\nQuestion: Start at {path[0]} and follow the lines above until the {_EXIT}. "
        f"List every place on the way in order, joined by arrows (->), and end with {_EXIT}.",
        lead=f"Answer: {path[0]} ->",
        answer=_way(path[1:]),
        values=(*path[1:], _EXIT),
        metric="leading_steps",
        new_tokens=0,
    )


class _Detours:
    """Rules away from the path, each with its random place in the document."""

    def __init__(
        self, path: Sequence[str], unused: Sequence[str], deck: Iterator[str], rng: random.Random
    ) -> None:
        self._known = list(path)
        self._unused = iter(unused)
        self._deck = deck
        self._rng = rng
        self._made: list[tuple[float, str]] = []

    def take(self, count: int) -> list[tuple[float, str]]:
        """The first `count` rules: (place from 0 to 1, rule)."""
        while len(self._made) < count:
            source = next(self._unused, None) or next(self._deck)
            rule = f"{source} leads to {self._rng.choice(self._known)}."
            self._made.append((self._rng.random(), rule))
            self._known.append(source)
        return self._made[:count]


def _way(places: Sequence[str]) -> str:
    return "".join(f" {place} ->" for place in places) + f" {_EXIT}"


def state_tracking(
    rng: random.Random, tokens: int, prompter: Prompter, haystack: Haystack = prose
) -> Draft:
    """Counters that numbered events change; each step's new value is asked for, in order.

    The events lie in random order in prose. An event adds to its counter, takes from it, or
    copies another one, so that every line of the answer needs an event from the document and an
    earlier line. Counts stay between 0 and 99.
    """
    start = {colour: rng.randrange(20, 80) for colour in _COLOURS}
    events, results = _life(start, rng, LONGEST_ANSWER_TOKENS)
    steps = _steps(tokens, prompter, lambda count: _report(results[:count]), len(results))
    filler = haystack(rng)
    places = [rng.random() for _ in range(steps)]
    told = ", ".join(f"the {colour} counter at {count}" for colour, count in start.items())

    def pieces(units: int) -> Sequence[str]:
        return insert_at(places, events[:steps], filler.take(units))

    return Draft(
        task="state_tracking",
        preface=f"There are {len(start)} counters. At the beginning they stand like this: {told}. "
        "Numbered steps that change them are scattered through the text below, in no order.\n",
        pieces=pieces,
        question=f"\nQuestion: Carry out steps 1 to {steps} in the order of their numbers. For "
        "each step give its number, the counter that it changes and the counter's new value, "
        "separated by semicolons, like this: 1: red 50; 2: blue 7",
        lead="Answer:",
        answer=_report(results[:steps]),
        values=tuple(results[:steps]),
        metric="leading_steps",
        new_tokens=0,
    )


def _life(
    start: dict[str, int], rng: random.Random, steps: int
) -> tuple[Sequence[str], Sequence[str]]:
    """Events as sentences, and what each of them leads to (`3: red 41`)."""
    counts = dict(start)
    events, results = [], []
    for step in range(1, steps + 1):
        colour, other = rng.sample(_COLOURS, 2)
        change = rng.randint(1, 9)
        if rng.random() < _COPY_SHARE and counts[other] != counts[colour]:
            counts[colour] = counts[other]
            happens = f"is set to the value of the {other} counter"
        elif counts[colour] - change < 0 or (
            counts[colour] + change <= _LARGEST_COUNT and rng.random() < 0.5
        ):
            counts[colour] += change
            happens = f"goes up by {change}"
        else:
            counts[colour] -= change
            happens = f"goes down by {change}"
        events.append(f"In step {step}, the {colour} counter {happens}.")
        results.append(f"{step}: {colour} {counts[colour]}")
    return events, results


def _report(results: Sequence[str]) -> str:
    return f" {'; '.join(results)}."


def _steps(tokens: int, prompter: Prompter, answer: Callable[[int], str], most: int) -> int:
    """The number of steps whose answer is as long as a prompt of `tokens` tokens asks for."""
    wanted = tokens // _PROMPT_TOKENS_PER_ANSWER_TOKEN
    wanted = min(max(wanted, SHORTEST_ANSWER_TOKENS), LONGEST_ANSWER_TOKENS)
    return fit(wanted, lambda count: prompter.count_answer(answer(count)), least=2, most=most)
