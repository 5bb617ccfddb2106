"""Tasks of many steps: variable tracking, pointer chasing, two walkers, and copying a list."""

import random
from collections.abc import Callable
from itertools import pairwise

from penstock.evaluate.tasks.documents import Document, count_tokens, essay, hide
from penstock.evaluate.tasks.sample import Sample
from penstock.evaluate.tasks.words import Words

_CHAINS = (2, 4)
_HOPS_OF_A_CHAIN = 4
_VARIABLE_DIGITS = 5
_RULE_TOKENS = 6
_LONGEST_LIST = 400
# The longest path that the bundled model was trained on, by the document's tokens.
_HOPS = ((1024, 66), (2048, 100), (4096, 150), (8192, 200), (16384, 266), (32768, 333))
_VARIABLE_PREFACE = "Memorize and track the chain of variables hidden in the following text ."
_PATH_PREFACE = "Memorize the path rules below . Follow the path later ."
_LIST_PREFACE = "Memorize the list hidden in the following text . Repeat it later ."


def variable_tracking(tokens: int, rng: random.Random, words: Words) -> Sample:
    """Chains of assignments; every variable of one chain is asked for."""
    count = rng.randint(*_CHAINS)
    length = _HOPS_OF_A_CHAIN + 1
    names = rng.sample(words.nouns, count * length)
    chains = [names[start : start + length] for start in range(0, len(names), length)]
    values: dict[str, None] = {}
    while len(values) < count:
        values[" ".join(str(rng.randrange(10)) for _ in range(_VARIABLE_DIGITS))] = None
    assignments = [
        [f"VAR {chain[0]} = {value} .", *(f"VAR {b} = VAR {a} ." for a, b in pairwise(chain))]
        for chain, value in zip(chains, values, strict=True)
    ]
    turns = [index for index in range(count) for _ in range(length)]
    rng.shuffle(turns)
    remaining = [iter(chain) for chain in assignments]
    needles = [next(remaining[index]) for index in turns]
    target = rng.randrange(count)
    value = list(values)[target]
    question = (
        f"Question : Find all variables assigned the value {value} . Answer : "
        f"{length} variables are assigned the value {value} they are :"
    )
    document = Document(tokens, _VARIABLE_PREFACE, question, sum(map(count_tokens, needles)))
    prompt = document.finish(hide(needles, essay(document.room, words, rng), rng))
    answer = " ".join(chains[target])
    return _sample("variable_tracking", prompt, f"{answer} .", tuple(chains[target]))


def pointer_chasing(tokens: int, rng: random.Random, words: Words) -> Sample:
    """A path through rules in random order, followed to its end."""
    hops = longest_path(tokens)
    (path,), rules, question = _rules(tokens, rng, words, [hops], _path_question)
    document = Document(tokens, _PATH_PREFACE, question, sum(map(count_tokens, rules)))
    answer = "".join(f"> {node} " for node in [*path[1:], "stop"]) + "."
    return _sample("pointer_chasing", document.finish(rules), answer, (answer,))


def two_walkers(tokens: int, rng: random.Random, words: Words) -> Sample:
    """Two paths of the same length, followed in turns."""
    hops = max(2, longest_path(tokens) // 5)
    (red, blue), rules, question = _rules(tokens, rng, words, [hops, hops], _walkers_question)
    document = Document(tokens, _PATH_PREFACE, question, sum(map(count_tokens, rules)))
    parts: list[str] = []
    steps = zip(pairwise([*red, "stop"]), pairwise([*blue, "stop"]), strict=True)
    for (red_from, red_to), (blue_from, blue_to) in steps:
        parts.append(f"red : {red_from} > {red_to}")
        parts.append(f"blue : {blue_from} > {blue_to}")
    answer = " ; ".join(parts).removeprefix(f"red : {red[0]} ") + " ."
    return _sample("two_walkers", document.finish(rules), answer, (answer,))


def copy(tokens: int, rng: random.Random, words: Words) -> Sample:
    """A list of random words somewhere in the text, repeated whole."""
    longest = min(_LONGEST_LIST, max(8, tokens // 8))
    length = rng.randint(longest // 4, longest)
    listed = " ".join(rng.choices(words.filler, k=length))
    passage = f"( {listed} )"
    question = "Question : Repeat the list . Answer : ("
    document = Document(tokens, _LIST_PREFACE, question, count_tokens(passage))
    prompt = document.finish(hide([passage], essay(document.room, words, rng), rng))
    return _sample("copy", prompt, f"{listed} )", (f"{listed} )",))


def longest_path(tokens: int) -> int:
    """Hops of the path in a document of `tokens` tokens."""
    hops = max(4, tokens // 16)
    for size, longest in _HOPS:
        if tokens >= size:
            hops = longest
    return hops


def _path_question(starts: list[str]) -> str:
    return f"Question : Start at {starts[0]} and follow the path until stop . Answer : {starts[0]}"


def _walkers_question(starts: list[str]) -> str:
    red, blue = starts
    return f"Question : Walk red at {red} and blue at {blue} until stop . Answer : red : {red}"


def _rules(
    tokens: int, rng: random.Random, words: Words, hops: list[int], ask: Callable[[list[str]], str]
) -> tuple[list[list[str]], list[str], str]:
    """Paths of `hops` nodes each, and as many rules in random order as the document can hold.

    Returns:
        The paths, the rules, and the question that `ask` makes of the paths' first nodes.
    """
    nodes = words.key_pool(rng, max(2 * sum(hops), tokens // _RULE_TOKENS))
    paths: list[list[str]] = []
    for length in hops:
        start = sum(map(len, paths))
        paths.append(nodes[start : start + length])
    rules = [f"{a} > {b} ;" for path in paths for a, b in pairwise([*path, "stop"])]
    question = ask([path[0] for path in paths])
    room = Document(tokens, _PATH_PREFACE, question, sum(map(count_tokens, rules))).room
    distractors = nodes[sum(hops) :][: room // _RULE_TOKENS]
    rules += [f"{node} > {rng.choice(nodes)} ;" for node in distractors]
    rng.shuffle(rules)
    return paths, rules, question


def _sample(task: str, prompt: str, answer: str, values: tuple[str, ...]) -> Sample:
    """A sample whose answer is followed by `<eos>`."""
    return Sample(task, prompt, answer, count_tokens(answer) + 1, values)
