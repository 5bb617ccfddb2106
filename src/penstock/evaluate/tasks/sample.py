"""One question about one document, and how an answer to it is judged."""

import re
from dataclasses import dataclass

from penstock.evaluate.tasks.metrics import OF_PARTS, exact_match, metric_called


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt that hides something, and what should be said about it.

    Attributes:
        task: the task's name.
        prompt: the document and the question, up to where the answer starts. The tokenizer
            adds its own special tokens (`<bos>`) to it.
        answer: the expected continuation, without the end-of-sequence token.
        max_new_tokens: tokens that the answer needs, its end-of-sequence token counted in.
        values: the parts that the answer must name, or its steps; of a sample from a file,
            every answer that is right.
        metric: the measure that judges it, a name of `METRICS`.
        also_right: whole answers that are as right as `answer`.
        depth: where the needle was asked to be, 0 (first) to 1 (last); None: anywhere.
        token_ids: the prompt as the model should get it, where encoding `prompt` would not do:
            a chat template's text holds its special tokens already. None: encode `prompt`.
        opening: the prompt's end, where it is part of what is judged: a record's beginning.
    """

    task: str
    prompt: str
    answer: str
    max_new_tokens: int
    values: tuple[str, ...]
    metric: str = "exact_match"
    also_right: tuple[str, ...] = ()
    depth: float | None = None
    token_ids: tuple[int, ...] | None = None
    opening: str = ""

    @property
    def references(self) -> tuple[str, ...]:
        """What `metric` compares a text with: the parts, or the whole answers."""
        return self.values if self.metric in OF_PARTS else (self.answer, *self.also_right)

    @property
    def is_all_or_nothing(self) -> bool:
        """Whether every measure gives 0 to any text but the whole answer."""
        alone = self.values == (self.answer,) and not self.also_right
        return self.metric == "exact_match" and alone


def judge(sample: Sample, text: str) -> float:
    """The score of a text by the sample's own measure, 0 to 1.

    Args:
        sample: the sample that was asked.
        text: the generated continuation, special tokens removed.

    Raises:
        ConfigError: the sample names a measure that does not exist.
    """
    return metric_called(sample.metric)(f"{sample.opening}{text}", sample.references)


def score(sample: Sample, text: str) -> float:
    """Exact match, whatever the sample's own measure: 1.0 when `text` is the answer, else 0.0.

    Args:
        sample: the sample that was asked.
        text: the generated continuation, special tokens removed. Runs of white space count
            as one space; nothing else is forgiven.
    """
    return exact_match(text, [sample.answer])


def score_any_order(sample: Sample, text: str) -> float:
    """The share of the sample's values that `text` names as whole words, in whatever order.

    RULER's `string_match_all` for a vocabulary of whole words: there a value must not count
    inside another one. Punctuation may touch it.

    Args:
        sample: the sample that was asked.
        text: the generated continuation, special tokens removed.
    """
    plain = " ".join(text.split())
    whole = (rf"(?<!\w){re.escape(value)}(?!\w)" for value in sample.values)
    return sum(re.search(pattern, plain) is not None for pattern in whole) / len(sample.values)
