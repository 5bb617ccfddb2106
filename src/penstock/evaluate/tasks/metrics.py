"""The measures of an answer: exact match, RULER's string match, token F1, steps, fields, facts.

Every measure takes the generated text, special tokens removed, and one or more references, and
gives a score from 0 (wrong) to 1 (right). No reference at all is a programmer's mistake. What a
reference is differs: `exact_match`, `string_match_part` and `token_f1` take whole answers, of
which one is enough; `string_match_all` and `leading_steps` take the parts of one answer.
"""

import ast
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock.core.errors import ConfigError

Metric = Callable[[str, Sequence[str]], float]

_CONTROL = re.compile(r"[\x00-\x1f]")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_STEP_END = re.compile(r"->|[;,\n]")
_STEP_WORD = re.compile(r"[\w-]+")
_RECORD = re.compile(r"\{[^{}]*\}")
_FACT_WORD = re.compile(r"[\w-]+")


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


def record_fields(text: str, references: Sequence[str]) -> float:
    """The share of the records' fields that the text has.

    Source: ours, for tables and lists as JSON or as Python literals. A record is known by its first
    field, which counts for nothing itself; of two records with one first field the earlier counts.
    Values are compared as text, without white space at their ends. What is no flat record is
    skipped, so that an answer that was cut keeps what it has.

    Args:
        text: has records in braces, whatever stands around them.
        references: the records, each as JSON or a literal. What is no record with a second field
            counts as one: right if the text is that, or has a record of that name.
    """
    assert references
    said: dict[str, dict[str, str]] = {}
    for found in _RECORD.findall(text):
        record = _record(found)
        if record:
            said.setdefault(next(iter(record.values())), record)
    right = total = 0
    for reference in references:
        key, *fields = _record(reference).items() or [("", reference)]
        if not fields:  # a text, or a record of nothing but a key
            total += 1
            right += exact_match(text, [key[1]]) == 1.0 or key[1] in said
            continue
        record = said.get(key[1], {})
        total += len(fields)
        right += sum(record.get(name) == value for name, value in fields)
    return right / total


def facts(text: str, references: Sequence[str]) -> float:
    """The share of the facts that the text has kept.

    Source: ours, for free answers. A fact is a subject and a value; it is kept if a line of the
    text has both as whole words, in whatever order. A subject without values is a fact itself.

    Args:
        text: lines.
        references: a subject and its values each, separated by tabs.
    """
    assert references
    lines = [set(_FACT_WORD.findall(line)) for line in text.splitlines()]
    right = total = 0
    for reference in references:
        subject, *values = reference.split("\t")
        known = [line for line in lines if subject in line]
        wanted = values or [subject]
        total += len(wanted)
        right += sum(any(value in line for line in known) for value in wanted)
    return right / total


def rouge_l(text: str, references: Sequence[str]) -> float:
    """How much of an answer follows another one, for the reference that fits best.

    Source: ROUGE-L (Lin, "ROUGE: a package for automatic evaluation of summaries", 2004): harmonic
    mean of precision and recall of the longest common subsequence, of words and numbers in lower
    case. Two texts without words are alike.
    """
    assert references
    said = _STEP_WORD.findall(text.lower())
    return max(_rouge_l(said, _STEP_WORD.findall(one.lower())) for one in references)


def fenced_code(text: str, references: Sequence[str]) -> float:
    """`rouge_l` of what stands before a fence (three backticks), which ends code in a chat."""
    return rouge_l(_before_fence(text), [_before_fence(one) for one in references])


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
    "record_fields": record_fields,
    "facts": facts,
    "rouge_l": rouge_l,
    "fenced_code": fenced_code,
})  # fmt: skip

OF_PARTS = frozenset({"string_match_all", "leading_steps", "record_fields", "facts"})
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


def _before_fence(text: str) -> str:
    return text.partition("```")[0]


def _rouge_l(said: list[str], wanted: list[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    row = [0] * (len(wanted) + 1)
    for word in said:
        before = 0
        for at, other in enumerate(wanted, 1):
            above = row[at]
            row[at] = before + 1 if word == other else max(above, row[at - 1])
            before = above
    return 2 * row[-1] / (len(said) + len(wanted))


def _record(text: str) -> dict[str, str]:
    """A flat record, values as text; empty where it cannot be read."""
    for read in (json.loads, ast.literal_eval):
        try:
            record: Any = read(text)
        except (ValueError, SyntaxError):
            continue
        if isinstance(record, dict):
            return {str(name): str(value).strip() for name, value in record.items()}
    return {}


def _step(text: str) -> list[str]:
    return _STEP_WORD.findall(text.lower())
