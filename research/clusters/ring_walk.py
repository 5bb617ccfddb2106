"""A walk that never stops: the right answer is as long as wanted, behind a prompt of any length.

The long-output tasks end: an answer of `long_walk` is half as long as its prompt at most, and that
of `two_walkers` a fifth. DynaKV is about outputs several times as long as the prompt, so that here
both paths of `two_walkers` are closed to rings, and the walkers go round until they are cut off.
The bundled model knows the format, rules and steps word by word, from `two_walkers`.
"""

import random
from itertools import pairwise

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.documents import Document, count_tokens
from penstock.evaluate.tasks.words import Words

_PREFACE = "Memorize the path rules below . Follow the path later ."
_RULE_TOKENS = 6
_STEP_TOKENS = 8
_RING_PART = 4
"""A ring is made of one rule in so many; the rules of no ring lead anywhere."""


def ring_walk(
    tokens: int, output_tokens: int, rng: random.Random, words: Words
) -> tuple[str, str]:  # fmt: skip
    """A prompt of at most `tokens` tokens, and an answer of at least `output_tokens`.

    Raises:
        ConfigError: `tokens` is too short for two rings of two rules.
    """
    nodes = words.key_pool(rng, tokens // _RULE_TOKENS + 4)
    hops = tokens // _RULE_TOKENS // _RING_PART
    if hops < 2:
        raise ConfigError(f"a prompt of {tokens} tokens is too short for two walkers; give more")
    red, blue = nodes[:hops], nodes[hops : 2 * hops]
    question = f"Question : Walk red at {red[0]} and blue at {blue[0]} until stop . Answer :"
    rules = [f"{a} > {b} ;" for ring in (red, blue) for a, b in pairwise([*ring, ring[0]])]
    document = Document(tokens, _PREFACE, question, sum(map(count_tokens, rules)))
    others = nodes[2 * hops :][: document.room // _RULE_TOKENS]
    rules += [f"{node} > {rng.choice(nodes)} ;" for node in others]
    rng.shuffle(rules)
    steps = []
    for place in range(-(-output_tokens // (2 * _STEP_TOKENS))):
        for name, ring in (("red", red), ("blue", blue)):
            here, there = ring[place % hops], ring[(place + 1) % hops]
            steps.append(f"{name} : {here} > {there} ;")
    return document.finish(rules), " ".join(steps)
