"""Prompts of a given length in tokens for any tokenizer, fitted by measuring them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.filler import joined
from penstock.evaluate.tasks.sample import Sample

_FIRST_GUESS = 16
_INTERPOLATIONS = 12


class TextTokenizer(Protocol):
    """Whatever turns text into token ids, as every Hugging Face tokenizer does."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Sequence[int]:
        """Token ids; the tokenizer's own special tokens among them if asked for.

        `verbose` allows warnings about texts that are longer than the model's positions.
        """
        ...


class Prompter:
    """Puts a task's text into the form that a model is asked in, and counts its tokens.

    Args:
        tokenizer: of the model that will be asked.
        chat: wrap the text into the tokenizer's chat template; the answer then starts behind
            the beginning of the assistant's turn.

    Raises:
        ConfigError: `chat` is asked for and the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: TextTokenizer, *, chat: bool = False) -> None:
        self._tokenizer = tokenizer
        self.chat = chat
        if chat:
            # Templates bring torch along, which a process that makes texts would start with.
            from penstock.generation.chat_template import ChatTemplate, has_chat_template

            if not has_chat_template(tokenizer):
                raise ConfigError("this tokenizer has no chat template; ask without one")
            self._template = ChatTemplate()

    def render(self, text: str, lead: str) -> str:
        """The prompt of a text and of the words that the answer starts with.

        Args:
            text: document and question.
            lead: what the answer starts with, without white space at its end; may be empty.
        """
        if not self.chat:
            return f"{text}\n{lead}" if lead else text
        opened = self._template.render(self._tokenizer, [{"role": "user", "content": text}])
        return f"{opened}{lead}"

    def ids(self, prompt: str) -> Sequence[int]:
        """Token ids of a rendered prompt, with special tokens added unless it has its own."""
        return self._encode(prompt, not self.chat)

    def count_answer(self, text: str) -> int:
        """Tokens of a generated text, its end-of-sequence token not counted."""
        return len(self._encode(text, False))

    def _encode(self, text: str, special: bool) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=special, verbose=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A task's text before its length is chosen.

    Attributes:
        task: the task's name.
        preface: what stands before the document.
        pieces: what the document is joined from, with a given number of filler units; grows with
            it and depends on nothing else.
        separator: what stands between pieces (see `filler.joined`).
        least_units: fewest units that the task makes sense with.
        question: what stands behind the document.
        lead: what the answer starts with.
        answer: the expected continuation behind the lead.
        values: the parts of the answer, or its steps.
        metric: the measure that judges the answer.
        new_tokens: fewest tokens to generate; a quarter more than the answer has, if that is more.
        depth: where the needle was asked to be.
        opening: the lead's end that is judged with the answer.
    """

    task: str
    preface: str
    pieces: Callable[[int], Sequence[str]]
    separator: str = " "
    least_units: int = 0
    question: str
    lead: str
    answer: str
    values: tuple[str, ...]
    metric: str = "string_match_all"
    new_tokens: int
    depth: float | None = None
    opening: str = ""

    def prompt(self, prompter: Prompter, units: int) -> str:
        """The rendered prompt with that many filler units."""
        body = joined(self.pieces(units), self.separator)
        text = f"{self.preface}\n{body}\n{self.question}"
        return prompter.render(text, self.lead)


def finish(draft: Draft, tokens: int, prompter: Prompter) -> Sample:
    """Give a draft as many filler units as `tokens` can hold.

    Returns:
        A sample whose prompt has at most `tokens` tokens, special tokens included, and would
        have more with another unit.

    Raises:
        ConfigError: `tokens` cannot hold the shortest form of the task.
    """
    units = fit(
        tokens,
        lambda count: len(prompter.ids(draft.prompt(prompter, count))),
        least=draft.least_units,
    )
    return sample_of(draft, draft.prompt(prompter, units), prompter)


def sample_of(draft: Draft, prompt: str, prompter: Prompter) -> Sample:
    """The sample that a draft makes with a rendered prompt."""
    return Sample(
        task=draft.task, prompt=prompt, answer=draft.answer,
        max_new_tokens=max(draft.new_tokens, prompter.count_answer(draft.answer) * 5 // 4) + 1,
        values=draft.values, metric=draft.metric, depth=draft.depth,
        token_ids=tuple(prompter.ids(prompt)) if prompter.chat else None,
        opening=draft.opening,
    )  # fmt: skip


def fit(
    limit: int, measure: Callable[[int], int], *, least: int = 0, most: int | None = None
) -> int:
    """The number of units that measures at most `limit`, while one more measures above it.

    Interpolates, so that it takes few measurements even of long prompts.

    Args:
        limit: in the unit of `measure`, tokens mostly.
        measure: size of a thing of that many units; grows with them, on the whole.
        least: fewest units.
        most: most units; None: no end.

    Raises:
        ConfigError: even `least` units measure more than `limit`.
    """
    low, base = least, measure(least)
    if base > limit:
        raise ConfigError(f"tokens={limit} is too short for this task: it takes {base}")
    high = None if most is None else most + 1
    guess, measured = least + _FIRST_GUESS, 0
    while high is None or high - low > 1:
        if high is not None:
            inside = measured < _INTERPOLATIONS
            guess = min(max(guess, low + 1), high - 1) if inside else (low + high) // 2
        size = measure(guess)
        measured += 1
        slope = max((size - base) / (guess - least), 1e-3)
        if size <= limit:
            low = guess
            guess = low + max(1, int((limit - size) / slope))
        else:
            high = guess
            guess = guess - max(1, round((size - limit) / slope))
    return low
