"""rate_hops(): a verifier for pointer chasing that checks each hop against the document's rules.

It knows nothing but the prompt: the rules as they stand there ("a b > c d ;") and where the path
starts (the prompt's last two words). It works with any search on such a prompt, e.g.
`penstock search --scorer research.search_accuracy.verifier:rate_hops`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.core.errors import ConfigError

ARROW, END_OF_RULE, STOP, END = ">", ";", "stop", "."
_NODE_WORDS = 2
_QUESTION = "Question :"


class Followed(NamedTuple):
    """How far a text follows the rules."""

    hops: int
    """Whole hops before the first mistake, the one to "stop" counted in."""
    is_broken: bool
    """Whether there is a mistake: a word that is not the rules' next one."""


def rate_hops(prompt: str, texts: Sequence[str]) -> list[float]:
    """Rate continuations of a pointer-chasing prompt; a function for `CallableScorer`.

    A text without a mistake scores its hops. One with a mistake scores less than any of those,
    between -1 and 0, and more the later the mistake comes.

    Args:
        prompt: document and question.
        texts: behind the prompt; may end in the middle of a hop.

    Raises:
        ConfigError: the prompt has no rules, or does not end in a node that has one.
    """
    rules, start = read_rules(prompt)
    rated = (follow(rules, start, text) for text in texts)
    return [-1 / (1 + one.hops) if one.is_broken else float(one.hops) for one in rated]


def read_rules(prompt: str) -> tuple[dict[str, str], str]:
    """The rules of a prompt by the nodes that they lead away from, and the path's first node.

    Raises:
        ConfigError: see `rate_hops`.
    """
    words = prompt.rpartition(_QUESTION)[0].split()
    rules = {}
    for at, word in enumerate(words):
        if word == ARROW and END_OF_RULE in words[at:]:
            end = words.index(END_OF_RULE, at)
            rules[" ".join(words[at - _NODE_WORDS : at])] = " ".join(words[at + 1 : end])
    start = " ".join(prompt.split()[-_NODE_WORDS:])
    if start not in rules:
        raise ConfigError(
            "rate_hops rates answers to pointer_chasing prompts: rules such as 'a b > c d ;', and "
            "a question that ends in the node to start at"
        )
    return rules, start


def follow(rules: Mapping[str, str], start: str, text: str) -> Followed:
    """Go along a text ("> c d > e f ... > stop .") hop by hop, up to its first mistake."""
    words = text.split()
    place, at, hops = start, 0, 0
    while at < len(words):
        if place == STOP or place not in rules:
            return Followed(hops, True)
        target = rules[place]
        expected = [ARROW, *target.split(), *([END] if target == STOP else [])]
        said = words[at : at + len(expected)]
        if said != expected[: len(said)]:
            return Followed(hops, True)
        hops += len(said) == len(expected)
        at += len(expected)
        place = target
    return Followed(hops, False)
