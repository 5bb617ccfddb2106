"""Answers of up to 8K tokens that must be read again while they are written: walks with totals.

Many walkers take turns along rules; every rule carries a digit, and every step says who goes from
where to where and the walker's total so far, of which only the last digit is kept. The document
has the rules, but a walker's place and total stand in the answer alone, where they were said one
round ago (10 tokens for each walker: 40 to 320 tokens back, behind most rolling windows).

What a small model can learn of it: walking and restating the place is two_walkers, which
recall-7m does without error over 860 tokens; the order of the walkers is a copy of the round
before; new is the sum of two digits, a table of a hundred entries. An exact answer of 8K tokens
needs errors below one in 10^5 tokens, so the measure counts the steps before the first mistake.
"""

import random
from itertools import pairwise

from penstock.bench.tasks.documents import Document, count_tokens
from penstock.bench.tasks.sample import Sample
from penstock.bench.tasks.words import Words
from penstock.core.errors import ConfigError

_PREFACE = (
    "Memorize the path rules below . Each path has values . Follow the path and add them later ."
)
_RULE_TOKENS = 7
_STEP_TOKENS = 10
_WALKERS = (4, 8, 16, 32)
_LONGEST_OUTPUT = 8192


def output_tokens(tokens: int) -> int:
    """Most tokens of the answer to a prompt of `tokens` tokens, its `<eos>` counted in."""
    return min(_LONGEST_OUTPUT, tokens // 2)


def long_walk(tokens: int, rng: random.Random, words: Words) -> Sample:
    """Walkers in turns until all of them stop; place and total are restated at every step.

    The answer is half as long as the prompt, 8,192 tokens at most, less what does not make a
    whole round; the prompt is shorter than `tokens` by less than a rule.
    """
    steps = (output_tokens(tokens) - 1) // _STEP_TOKENS
    walkers = rng.choice([count for count in _WALKERS if count <= max(_WALKERS[0], steps // 3)])
    rounds = steps // walkers
    if rounds < 2:
        raise ConfigError(f"tokens={tokens} is too short for this task: no two rounds fit in")
    names = rng.sample(words.nouns, walkers)
    nodes = words.key_pool(rng, max(walkers * rounds + 2, tokens // _RULE_TOKENS))
    paths = [nodes[at * rounds : (at + 1) * rounds] for at in range(walkers)]
    hops = {a: (b, rng.randrange(10)) for path in paths for a, b in pairwise([*path, "stop"])}
    starts = " , ".join(f"{name} at {path[0]}" for name, path in zip(names, paths, strict=True))
    question = f"Question : Walk {starts} until stop and add the values . Answer :"
    rules = [f"{a} > {b} {digit} ;" for a, (b, digit) in hops.items()]
    document = Document(tokens, _PREFACE, question, sum(map(count_tokens, rules)))
    others = nodes[walkers * rounds :][: document.room // _RULE_TOKENS]
    rules += [f"{node} > {rng.choice(nodes)} {rng.randrange(10)} ;" for node in others]
    rng.shuffle(rules)
    said = _walk(names, paths, hops)
    answer = " ; ".join(said) + " ."
    return Sample(
        "long_walk", document.finish(rules), answer, count_tokens(answer) + 1, tuple(said),
        metric="leading_steps",
    )  # fmt: skip


def _walk(names: list[str], paths: list[list[str]], hops: dict[str, tuple[str, int]]) -> list[str]:
    """What is said, step by step: one step of every walker in each round."""
    totals = dict.fromkeys(names, 0)
    said = []
    for places in zip(*paths, strict=True):
        for name, place in zip(names, places, strict=True):
            following, digit = hops[place]
            totals[name] = (totals[name] + digit) % 10
            said.append(f"{name} : {place} > {following} = {totals[name]}")
    return said
