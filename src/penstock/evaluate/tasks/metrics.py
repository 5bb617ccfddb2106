"""The measures of an answer: exact match, RULER's string match, token F1, leading steps.

Every measure takes the generated text, special tokens removed, and one or more references, and
gives a score from 0 (wrong) to 1 (right). No reference at all is a programmer's mistake. What a
reference is differs: `exact_match`, `string_match_part` and `token_f1` take whole answers, of
which one is enough; `string_match_all` and `leading_steps` take the parts of one answer.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from penstock.core.errors import ConfigError

Metric = Callable[[str, Sequence[str]], float]

_CONTROL = re.compile(r"[\x00-\x1f]")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_STEP_END = re.compile(r"->|[;,\n]")
_STEP_WORD = re.compile(r"[\w-]+")


def exact_match(text: str, references: Sequence[str]) -> float:
    """1.0 when the text is one of the references, word for word, else 0.0.

    Source: ours. Runs of white space count as one space, at the ends as none; letter case,
    punctuation and anything behind the answer do matter.
    """
    assert references
    return float(any(text.split() == reference.split() for reference in references))


def string_match_all(text: str, references: Sequence[str]) -> float:
    """The share of the references that the text contains.

    Source: RULER (Hsieh et al., COLM 2024), `string_match_all`, its measure for all tasks but
    question answering: order does not matter, nor letter case, nor what stands around. A
    reference also counts inside a longer word or number, so generated references must not be
    parts of one another. Control characters count as line ends.
    """
    assert references
    plain = _plain(text)
    return sum(reference.lower() in plain for reference in references) / len(references)


def string_match_part(text: str, references: Sequence[str]) -> float:
    """1.0 when the text contains at least one of the references, else 0.0.

    Source: RULER, `string_match_part`, its measure for question answering; letter case and
    surroundings as in `string_match_all`.
    """
    assert references
    plain = _plain(text)
    return float(any(reference.lower() in plain for reference in references))


def token_f1(text: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, for the reference that fits best.

    Source: SQuAD (Rajpurkar et al., EMNLP 2016), also LongBench's measure for question
    answering in English. Words are compared as bags, after `normalise`. Where normalisation
    leaves nothing of the text or of the reference, the score is 1.0 if nothing is left of
    both, else 0.0 (SQuAD 2.0's rule).
    """
    assert references
    return max(_f1(normalise(text).split(), normalise(r).split()) for r in references)


def leading_steps(text: str, references: Sequence[str]) -> float:
    """The share of an answer's steps that are right before the first wrong one.

    Source: ours, for long answers whose later steps need earlier ones: a step that is right by
    chance behind a mistake counts for nothing. Steps end at `->`, `;`, `,` or a line end, and
    are compared as words and numbers, letter case and other punctuation aside; empty steps are
    skipped. What comes behind the last expected step is not looked at.

    Args:
        text: the generated steps.
        references: the expected steps in order.
    """
    assert references
    steps = (_step(part) for part in _STEP_END.split(text))
    said = [step for step in steps if step]
    right = 0
    for step, reference in zip(said, references, strict=False):
        if step != _step(reference):
            break
        right += 1
    return right / len(references)


def normalise(text: str) -> str:
    """Lower case without ASCII punctuation, articles (a, an, the) and extra white space.

    Source: SQuAD's evaluation; in its order, so that `a.` is an article and `state-of-the-art`
    one word.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


METRICS: Mapping[str, Metric] = MappingProxyType({
    "exact_match": exact_match,
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "token_f1": token_f1,
    "leading_steps": leading_steps,
})  # fmt: skip

OF_PARTS = frozenset({"string_match_all", "leading_steps"})
"""Measures whose references are the parts of one answer."""


def metric_called(name: str) -> Metric:
    """The measure of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in METRICS:
        raise ConfigError(f"no metric is called {name!r}; there are {', '.join(METRICS)}")
    return METRICS[name]


def _plain(text: str) -> str:
    return _CONTROL.sub("\n", text).lower()


def _f1(said: list[str], wanted: list[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted))


def _step(text: str) -> list[str]:
    return _STEP_WORD.findall(text.lower())
