"""Further questions about a document of the bench, worded like the one that it came with.

A document of thousands of tokens with one answer of a few teaches little. The bench asks one
question; here the facts are read back out of its document, and the question is asked of others.
"""

import random
import re
from collections.abc import Iterator

from penstock.evaluate.tasks import Sample
from penstock.evaluate.tasks.long_output import walk_question, walk_steps

_FACT = re.compile(r"The (?:special magic number|secret word) for (\S+ \S+) is ([^.]+) \.")
_ASSIGNMENT = re.compile(r"VAR (\S+) = ([^.]+) \.")
_MENTION = re.compile(r"Here is the (\S+) \.")
_RULE = re.compile(r"(\S+ \S+) > (stop|\S+ \S+) ([!:]) (\d) ;")
_START = " Question : "
_WALKS, _MOST_WALKERS, _LONGEST_WALK = 60, 8, 4


def further_questions(sample: Sample, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Questions with their answers, in random order, without the sample's own.

    Nothing for tasks whose documents hold one thing to ask for. Every answer follows from the
    document as the sample's own does; the strings are to be encoded behind the `<eos>` before.
    """
    asker = _ASKERS.get(sample.task)
    if asker is None:
        return
    document, question = sample.prompt.rsplit(_START, 1)
    yield from asker(document, _START.strip() + " " + question, rng)


def _one_key(document: str, question: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """The value of another key."""
    asked = _found(r"for (\S+ \S+) \?", question)
    told: dict[str, str] = dict(_FACT.findall(document))
    others = [key for key in told if key != asked]
    rng.shuffle(others)
    for key in others:
        yield question.replace(asked, key), f"{told[key]} ."


def _all_values(document: str, question: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """All values of another key, in the document's order."""
    asked = _found(r"for (\S+ \S+) \?", question)
    told: dict[str, list[str]] = {}
    for key, value in _FACT.findall(document):
        told.setdefault(key, []).append(value)
    others = [key for key in told if key != asked]
    rng.shuffle(others)
    for key in others:
        yield question.replace(asked, key), f"{' , '.join(told[key])} ."


def _some_keys(document: str, question: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """The values of other keys, as many as were asked for."""
    asked = _found(r"for ([^?]+) \?", question)
    told: dict[str, str] = dict(_FACT.findall(document))
    count = asked.count(" , ") + 1
    others = [key for key in told if key not in asked.split(" , ")]
    rng.shuffle(others)
    for start in range(0, len(others) - count + 1, count):
        keys = others[start : start + count]
        answer = " , ".join(f"{key} is {told[key]}" for key in keys)
        yield question.replace(asked, " , ".join(keys)), f"{answer} ."


def _chains(document: str, question: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """The variables of another chain."""
    asked = _found(r"the value ((?:\d )+)\.", question).strip()
    chain_of: dict[str, list[str]] = {}
    chains: dict[str, list[str]] = {}
    for name, right in _ASSIGNMENT.findall(document):
        source = right.removeprefix("VAR ")
        chain = chain_of[source] if source in chain_of else chains.setdefault(right, [])
        chain.append(name)
        chain_of[name] = chain
    values = [value for value in chains if value != asked]
    rng.shuffle(values)
    for value in values:
        assert len(chains[value]) == len(chains[asked]), "the question names the chain's length"
        yield question.replace(asked, value), " ".join(chains[value]) + " ."


def _counts(document: str, question: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """The counts of other words, as many as were asked for."""
    asked = _found(r"numbers of (.+?) in the text", question)
    mentions = _MENTION.findall(document)
    others = sorted(set(mentions) - set(asked.split(" , ")))
    rng.shuffle(others)
    count = asked.count(" , ") + 1
    for start in range(0, len(others) - count + 1, count):
        words = others[start : start + count]
        answer = " , ".join(f"{word} is {mentions.count(word)}" for word in words)
        yield question.replace(asked, " , ".join(words)), f"{answer} ."


def _walks(document: str, question: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Short walks of some of the walkers, in another order, from places before a stop."""
    hops = {a: (b, mark, int(digit)) for a, b, mark, digit in _RULE.findall(document)}
    before: dict[str, list[str]] = {}
    for place, (following, _, _) in hops.items():
        before.setdefault(following, []).append(place)
    names = re.findall(r"(\S+) at \S+ \S+ = \d", question)
    paths = [[last] for last in before["stop"]]
    while paths and min(map(len, paths)) < _LONGEST_WALK:
        longer = [[p, *path] for path in paths for p in before.get(path[0], [])[:1]]
        if len(longer) < len(paths):
            break
        paths = longer
    for _ in range(_WALKS):
        count = rng.randint(1, min(len(names), len(paths), _MOST_WALKERS))
        length = rng.randint(1, len(paths[0]))
        taken = [path[len(path) - length :] for path in rng.sample(paths, count)]
        values = {name: rng.randrange(10) for name in rng.sample(names, count)}
        asked = walk_question(values, [path[0] for path in taken])
        yield asked, " ; ".join(walk_steps(values, taken, hops)) + " ."


_ASKERS = {
    "short_walks": _walks,
    "multi_key_few": _one_key,
    "multi_key_full": _one_key,
    "multi_query": _some_keys,
    "dense_values": _all_values,
    "variable_tracking": _chains,
    "count_words": _counts,
}
"""By the task's name. The other tasks ask for all that there is, or, as multi_value, for what is
alone of its kind: the other keys of its documents have one value each."""

SEVERAL = frozenset(_ASKERS) - {"dense_values", "short_walks"}
"""Tasks of the bench whose documents answer further questions."""


def _found(pattern: str, question: str) -> str:
    match = re.search(pattern, question)
    assert match is not None, (pattern, question)
    return match.group(1)
