"""Answers of up to 8K tokens that must be read again while they are written: walks with values.

Many walkers take turns along rules. Every walker carries a value, a digit; a rule with a "!" sets
it to the rule's digit, a rule with a ":" leaves it as it is, whatever its digit. Every step says
who goes from where to where, and the walker's value behind it. The document has the rules, but a
walker's place and value stand in the answer alone, where they were said one round ago (10 tokens
for each walker: 40 to 320 tokens back, behind most rolling windows).

What a small model can learn of it: walking and restating the place is two_walkers, which
recall-7m does without error over 860 tokens; the order of the walkers is a copy of the round
before; new is a choice between two digits that are both found by looking. Seen before that, with
every rule's digit added to a total of which the last digit was said: not learnt in 0.69 G tokens,
the total at chance (0.22 nats a token, which is that of one digit in ten tokens) and everything
else right. An exact answer of 8K tokens needs errors below one in 10^5 tokens, so the measure
counts the steps before the first mistake.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.documents import Document, count_tokens
from penstock.evaluate.tasks.sample import Sample
from penstock.evaluate.tasks.words import Words

_PREFACE = (
    "Memorize the path rules below . Some have a ! and a value to follow . "
    "Follow the path with its value later ."
)
_RULE_TOKENS = 8
_STEP_TOKENS = 10
_WALKERS = (4, 8, 16, 32)
_LONGEST_OUTPUT = 8192
_SET_SHARE = 0.4


def output_tokens(tokens: int) -> int:
    """Most tokens of the answer to a prompt of `tokens` tokens, its `<eos>` counted in."""
    return min(_LONGEST_OUTPUT, tokens // 2)


def long_walk(
    tokens: int, rng: random.Random, words: Words, *, set_share: float = _SET_SHARE,
    counts: Sequence[int] = _WALKERS,
) -> Sample:  # fmt: skip
    """Walkers in turns until all of them stop; place and value are restated at every step.

    The answer is half as long as the prompt, 8,192 tokens at most, less what does not make a
    whole round; the prompt is shorter than `tokens` by less than a rule.

    Args:
        tokens: most of the prompt.
        rng: what it is drawn by.
        words: to draw from.
        set_share: of the rules, how many set a value.
        counts: of walkers, ascending; one that leaves three rounds or more is drawn, or the first.

    Raises:
        ConfigError: `tokens` is too short for two rounds.
    """
    steps = (output_tokens(tokens) - 1) // _STEP_TOKENS
    walkers = rng.choice([count for count in counts if count <= max(counts[0], steps // 3)])
    rounds = steps // walkers
    if rounds < 2:
        raise ConfigError(f"tokens={tokens} is too short for this task: no two rounds fit in")
    names = rng.sample(words.nouns, walkers)
    nodes = words.key_pool(rng, max(walkers * rounds + 2, tokens // _RULE_TOKENS))
    paths = [nodes[at * rounds : (at + 1) * rounds] for at in range(walkers)]
    values = {name: rng.randrange(10) for name in names}
    question = walk_question(values, [path[0] for path in paths])
    hops = {a: (b, *_mark(rng, set_share)) for path in paths for a, b in pairwise([*path, "stop"])}
    rules = [f"{a} > {b} {mark} {digit} ;" for a, (b, mark, digit) in hops.items()]
    document = Document(tokens, _PREFACE, question, sum(map(count_tokens, rules)))
    others = nodes[walkers * rounds :][: document.room // _RULE_TOKENS]
    rules += [
        "{} > {} {} {} ;".format(node, rng.choice(nodes), *_mark(rng, set_share)) for node in others
    ]
    rng.shuffle(rules)
    said = walk_steps(values, paths, hops)
    answer = " ; ".join(said) + " ."
    return Sample(
        "long_walk", document.finish(rules), answer, count_tokens(answer) + 1, tuple(said),
        metric="leading_steps",
    )  # fmt: skip


def _mark(rng: random.Random, set_share: float) -> tuple[str, int]:
    """What a rule does with its digit, and the digit."""
    return "!" if rng.random() < set_share else ":", rng.randrange(10)


def walk_question(values: Mapping[str, int], places: Sequence[str]) -> str:
    """Asks for the walk of some walkers, by name with their values, from one place each."""
    starts = " , ".join(
        f"{name} at {place} = {value}"
        for (name, value), place in zip(values.items(), places, strict=True)
    )
    return f"Question : Walk {starts} until stop . Answer :"


def walk_steps(
    starts: Mapping[str, int],
    paths: Sequence[Sequence[str]],
    hops: Mapping[str, tuple[str, str, int]],
) -> list[str]:
    """What is said, step by step: one step of every walker in each round.

    Args:
        starts: the walkers' values at the start.
        paths: of each walker, all of one length: the places that it leaves.
        hops: by place, where it leads, "!" if it sets the value, and its digit.
    """
    values = dict(starts)
    said = []
    for places in zip(*paths, strict=True):
        for name, place in zip(values, places, strict=True):
            following, mark, digit = hops[place]
            if mark == "!":
                values[name] = digit
            said.append(f"{name} : {place} > {following} = {values[name]}")
    return said
