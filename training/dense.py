"""Rows of training only: the bench's wording, with as much to answer as a row can hold.

What a question of the bench teaches in a row of hundreds of tokens is a few tokens, and a model
that has found nothing yet to retrieve by does not soon find it from so few. Two runs with few
questions a row learnt keys of two words after 2,000 and 10,000 steps, one with many within 1,300
(they differed in other settings too, see `docs/log.md`). `dense_replay` is for keys of two words;
`dense_copy` and `dense_chains` are the same for single words.
"""

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType

from penstock.bench.tasks import TASKS, Sample, Words
from penstock.bench.tasks.documents import Document, count_tokens, essay, hide
from penstock.core.errors import ConfigError

Generate = Callable[[int, random.Random, Words], Sample]

_LIST_PREFACE = "Memorize the list hidden in the following text . Repeat it later ."
_CHAIN_PREFACE = "Memorize and track the chain of variables hidden in the following text ."
_LONGEST_LIST = 400
_SHORTEST_LIST = 8
_VARIABLES = (5, 9)
_DIGITS = 5
_FIRST_TOKENS, _LATER_TOKENS = 9, 7


def dense_copy(tokens: int, rng: random.Random, words: Words) -> Sample:
    """A list of different words and its copy, which together fill most of `tokens` tokens."""
    question = "Question : Repeat the list . Answer : ("
    room = Document(tokens, _LIST_PREFACE, question, 4).room  # brackets twice, <eos>, and a rest
    longest = min(_LONGEST_LIST, room // 2)
    if longest < _SHORTEST_LIST:
        raise ConfigError(f"tokens={tokens} is too short for this task: no list fits in")
    listed = rng.sample(words.filler, rng.randint(max(_SHORTEST_LIST, longest * 2 // 3), longest))
    text = " ".join(listed)
    passage = f"( {text} )"
    document = Document(
        tokens - len(listed) - 2, _LIST_PREFACE, question, count_tokens(passage)
    )  # the answer is part of `tokens` here
    prompt = document.finish(hide([passage], essay(document.room, words, rng), rng))
    return Sample("copy", prompt, f"{text} )", len(listed) + 2, (f"{text} )",))


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


def _chain_question(value: str, length: int) -> str:
    return (
        f"Question : Find all variables assigned the value {value} . Answer : "
        f"{length} variables are assigned the value {value} they are :"
    )


DENSE: Mapping[str, tuple[Generate, float]] = MappingProxyType({
    "dense_replay": (TASKS["multi_key_full"], 0.5),
    "dense_copy": (dense_copy, 0.0),
    "dense_chains": (dense_chains, 0.4),
})  # fmt: skip
"""By name: what makes the sample, and the share of the row that is kept for further questions."""
