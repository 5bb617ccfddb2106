"""Rows of training only: the bench's wording, with as much to answer as a row can hold.

What a question of the bench teaches in a row of hundreds of tokens is a few tokens, and a model
that has found nothing yet to retrieve by does not soon find it from so few. Two runs with few
questions a row learnt keys of two words after 2,000 and 10,000 steps, one with many within 1,300
(they differed in other settings too, see research/notes/2026-11-21-training-on-the-h200.md).
`dense_replay` is for keys of two words; `dense_copy` and `dense_chains` are the same for single
words. `dense_values` is for several values of one key, which recall-2's first runs found by looking
for keys that come again: asked here, where all do, they named other keys' values (same note). They
lost their way where two values had
the same digit at the same place, and so did the model after three sittings (26 of its 30 wrong
answers in 304): in `dense_values` and `alike_values` that is what every answer is full of, so that
more than one token before has to be looked at to know which value is being said. `dense_walk` is
for the digits that a walk's rules set, which one run had not found in 28,000 steps, `short_walks`
for where a walk ends, which is said once in an answer of long_walk, `many_walkers` for looking a
place up a round of 160 or 320 tokens back (seven of nine wrong walks had so many). `alike_copy` is
for lists in which a word comes again: six of seven wrong copies of 100 (4K, after four sittings)
went on as another place did where the same word stands.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import TASKS, Sample, Words
from penstock.evaluate.tasks.documents import PREFACE, Document, count_tokens, essay, hide
from penstock.evaluate.tasks.long_output import long_walk
from penstock.evaluate.tasks.needles import Facts, multi_value

Generate = Callable[[int, random.Random, Words], Sample]

_LIST_PREFACE = "Memorize the list hidden in the following text . Repeat it later ."
_CHAIN_PREFACE = "Memorize and track the chain of variables hidden in the following text ."
_LONGEST_LIST = 400
_SHORTEST_LIST = 8
_FEWEST_WORDS = 8
_SAID = (2, 8)
_VARIABLES = (5, 9)
_DIGITS = 5
_FIRST_TOKENS, _LATER_TOKENS = 9, 7
_VALUES = 4
_SHARED = (0.1, 0.5)
_SETTING = 0.85
_SOME, _MANY, _ROOM_FOR_MANY = (8,), (16, 32), 680


def dense_copy(tokens: int, rng: random.Random, words: Words) -> Sample:
    """A list of different words and its copy, which together fill most of `tokens` tokens."""
    return _copied(tokens, rng, words, lambda length: rng.sample(words.filler, length))


def alike_copy(tokens: int, rng: random.Random, words: Words) -> Sample:
    """The same where each word stands in the list 2 to 8 times, with other words behind it."""

    def draw(length: int) -> list[str]:
        few = rng.sample(words.filler, max(_FEWEST_WORDS, length // rng.randint(*_SAID)))
        return rng.choices(few, k=length)

    return _copied(tokens, rng, words, draw)


def dense_chains(tokens: int, rng: random.Random, words: Words) -> Sample:
    """As many chains of variables as fit in, of 5 to 9 variables each; one of them is asked for."""
    frame = Document(tokens, _CHAIN_PREFACE, _chain_question("0 " * _DIGITS, 0), 0)
    most = (frame.room // 2 - _FIRST_TOKENS) // _LATER_TOKENS + 1
    fewest, longest = _VARIABLES
    if most < fewest:
        raise ConfigError(f"tokens={tokens} is too short for this task: no two chains fit in")
    length = rng.randint(fewest, min(longest, most))
    count = frame.room // (_FIRST_TOKENS + _LATER_TOKENS * (length - 1))
    count = min(count, len(words.nouns) // length)
    names = rng.sample(words.nouns, count * length)
    chains = [names[start : start + length] for start in range(0, len(names), length)]
    numbers = rng.sample(range(10**_DIGITS), count)
    values = [" ".join(f"{number:0{_DIGITS}}") for number in numbers]
    turns = [at for at in range(count) for _ in range(length)]
    rng.shuffle(turns)
    remaining = [
        iter([f"VAR {c[0]} = {v} .", *(f"VAR {b} = VAR {a} ." for a, b in pairwise(c))])
        for c, v in zip(chains, values, strict=True)
    ]
    assignments = [next(remaining[at]) for at in turns]
    question = _chain_question(values[0], length)
    document = Document(tokens, _CHAIN_PREFACE, question, sum(map(count_tokens, assignments)))
    prompt = document.finish(hide(assignments, essay(document.room, words, rng), rng))
    answer = " ".join(chains[0])
    return Sample("variable_tracking", prompt, f"{answer} .", length + 2, tuple(chains[0]))


def dense_values(tokens: int, rng: random.Random, words: Words) -> Sample:
    """As many keys as fit in, of four values each; one key's values are asked for, in order."""
    facts = Facts(words, rng)
    frame = count_tokens(facts.tell("a b", facts.value()))
    room = Document(tokens, PREFACE, _values_question(facts, "a b"), 0).room
    count = room // (_VALUES * frame)
    if count < 2:
        raise ConfigError(f"tokens={tokens} is too short for this task: no two keys fit in")
    keys = words.key_pool(rng, count)
    told = [(key, value) for key in keys for value in _alike(facts, rng)]
    rng.shuffle(told)
    needles = [facts.tell(key, value) for key, value in told]
    question = _values_question(facts, keys[0])
    document = Document(tokens, PREFACE, question, sum(map(count_tokens, needles)))
    prompt = document.finish(hide(needles, essay(document.room, words, rng), rng))
    values = tuple(value for key, value in told if key == keys[0])
    answer = " , ".join(values)
    return Sample("dense_values", prompt, f"{answer} .", count_tokens(answer) + 2, values)


def alike_values(tokens: int, rng: random.Random, words: Words) -> Sample:
    """The bench's multi_value with values that have much in common."""
    return multi_value(tokens, rng, words, draw=lambda facts: _alike(facts, rng))


def dense_walk(tokens: int, rng: random.Random, words: Words) -> Sample:
    """The bench's long_walk where nearly every rule sets its walker's value."""
    return long_walk(tokens, rng, words, set_share=_SETTING)


def many_walkers(tokens: int, rng: random.Random, words: Words) -> Sample:
    """The bench's long_walk with 16 or 32 walkers, in short rows too (8 in the shortest)."""
    return long_walk(tokens, rng, words, counts=_MANY if tokens >= _ROOM_FOR_MANY else _SOME)


def short_walks(tokens: int, rng: random.Random, words: Words) -> Sample:
    """long_walk with many short walks by the same rules behind it: their ends come often."""
    return replace(long_walk(tokens, rng, words), task="short_walks")


def _copied(
    tokens: int, rng: random.Random, words: Words, draw: Callable[[int], list[str]]
) -> Sample:
    question = "Question : Repeat the list . Answer : ("
    room = Document(tokens, _LIST_PREFACE, question, 4).room  # brackets twice, <eos>, and a rest
    longest = min(_LONGEST_LIST, room // 2)
    if longest < _SHORTEST_LIST:
        raise ConfigError(f"tokens={tokens} is too short for this task: no list fits in")
    listed = draw(rng.randint(max(_SHORTEST_LIST, longest * 2 // 3), longest))
    text = " ".join(listed)
    passage = f"( {text} )"
    document = Document(
        tokens - len(listed) - 2, _LIST_PREFACE, question, count_tokens(passage)
    )  # the answer is part of `tokens` here
    prompt = document.finish(hide([passage], essay(document.room, words, rng), rng))
    return Sample("copy", prompt, f"{text} )", len(listed) + 2, (f"{text} )",))


def _alike(facts: Facts, rng: random.Random) -> list[str]:
    """Different values of one key; each digit or word may be an earlier value's at its place."""
    values: list[list[str]] = []
    shared = rng.uniform(*_SHARED)
    while len(values) < _VALUES:
        value = facts.value().split()
        for place in range(len(value)):
            if values and rng.random() < shared:
                value[place] = rng.choice(values)[place]
        if value not in values:
            values.append(value)
    return [" ".join(value) for value in values]


def _values_question(facts: Facts, key: str) -> str:
    return (
        f"Question : What are all the {facts.noun}s for {key} ? "
        f"Answer : The {facts.noun}s for {key} are"
    )


def _chain_question(value: str, length: int) -> str:
    return (
        f"Question : Find all variables assigned the value {value} . Answer : "
        f"{length} variables are assigned the value {value} they are :"
    )


DENSE: Mapping[str, tuple[Generate, float]] = MappingProxyType({
    "dense_replay": (TASKS["multi_key_full"], 0.5),
    "dense_copy": (dense_copy, 0.0),
    "alike_copy": (alike_copy, 0.0),
    "dense_chains": (dense_chains, 0.4),
    "dense_values": (dense_values, 0.45),
    "alike_values": (alike_values, 0.0),
    "dense_walk": (dense_walk, 0.0),
    "many_walkers": (many_walkers, 0.0),
    "short_walks": (short_walks, 0.5),
})  # fmt: skip
"""By name: what makes the sample, and the share of the row that is kept for further questions."""
