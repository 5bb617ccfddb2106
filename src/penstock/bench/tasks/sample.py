"""One question about one generated document, and how an answer to it is judged."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt that hides something, and what should be said about it.

    Attributes:
        task: the task's name, one of `TASKS`.
        prompt: the document and the question, words separated by single spaces. The tokenizer
            adds the `<bos>` token itself.
        answer: the expected continuation, without the end-of-sequence token.
        max_new_tokens: tokens that the answer needs, its end-of-sequence token counted in.
        values: the parts that the answer must name (several in multi_value, multi_query and
            variable_tracking), for the measure that ignores their order.
    """

    task: str
    prompt: str
    answer: str
    max_new_tokens: int
    values: tuple[str, ...]


def score(sample: Sample, text: str) -> float:
    """Exact match: 1.0 when `text` is the answer, word for word, else 0.0.

    Args:
        sample: the sample that was asked.
        text: the generated continuation, special tokens removed. Runs of white space count
            as one space; nothing else is forgiven.
    """
    return float(text.split() == sample.answer.split())


def score_any_order(sample: Sample, text: str) -> float:
    """The share of the sample's values that `text` names, in whatever order (RULER's measure).

    Args:
        sample: the sample that was asked.
        text: the generated continuation, special tokens removed.
    """
    padded = f" {' '.join(text.split())} "
    found = sum(f" {value} " in padded for value in sample.values)
    return found / len(sample.values)
