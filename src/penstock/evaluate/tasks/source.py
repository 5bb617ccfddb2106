"""Where samples come from: generated for a tokenizer, or read from files; one way to draw them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.filler import Haystack, prose
from penstock.evaluate.tasks.english.haystack import TextHaystack
from penstock.evaluate.tasks.english.prompt_fit import Prompter, TextTokenizer
from penstock.evaluate.tasks.english.registry import (
    ENGLISH_DEPTH_TASKS,
    ENGLISH_TASKS,
    make_english_sample,
)
from penstock.evaluate.tasks.jsonl import Record, read_records, record_sample
from penstock.evaluate.tasks.recall import DEFAULT_TASKS, DEPTH_TASKS, TASKS, make_sample
from penstock.evaluate.tasks.sample import Sample
from penstock.evaluate.tasks.words import Words


class TaskSource(Protocol):
    """Tasks by name, and samples of them by number."""

    @property
    def names(self) -> Sequence[str]:
        """Every task's name."""
        ...

    @property
    def default_names(self) -> Sequence[str]:
        """Of them, those that are asked if none is named, in their order."""
        ...

    @property
    def depth_names(self) -> frozenset[str]:
        """Tasks that take a depth."""
        ...

    def draw(
        self, task: str, first: int, count: int, *, tokens: int, seed: int,
        depth: float | None = None,
    ) -> list[Sample]:  # fmt: skip
        """Samples `first` to `first + count - 1` of a task, fewer where there are no more.

        The same arguments give the same samples, whatever was drawn before; depths change
        nothing but the needle's place.

        Args:
            task: one of `names`.
            first: number of the first sample, from 0.
            count: how many.
            tokens: most tokens of a prompt.
            seed: of generated samples.
            depth: 0 to 1, for tasks of `depth_names`.

        Raises:
            ConfigError: no such task, or it cannot be made like that.
        """
        ...


class GeneratedTasks:
    """Generated tasks in the language that a tokenizer's model understands.

    The recall tasks for the bundled model's vocabulary, the English tasks for any other.

    Args:
        tokenizer: of the model that will be asked.
        chat: wrap English questions into the tokenizer's chat template.
        texts: real documents that English tasks are hidden in; none: made-up prose.

    Raises:
        ConfigError: `chat` without a chat template; texts that are empty, or for the bundled model.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, chat: bool = False, texts: Sequence[str] = ()
    ) -> None:
        Prompter(tokenizer, chat=chat)
        self._tokenizer = tokenizer
        self._chat = chat
        self._words = _bundled_words(tokenizer)
        if texts and self._words is not None:
            raise ConfigError("the bundled model does not read English: leave out --haystack")
        self._haystack: Haystack = TextHaystack(texts) if texts else prose
        self.language = "english" if self._words is None else "recall"

    @property
    def names(self) -> Sequence[str]:
        """Every task's name."""
        return tuple(ENGLISH_TASKS if self._words is None else TASKS)

    @property
    def default_names(self) -> Sequence[str]:
        """All English tasks; of the recall tasks those that the bundled model answers."""
        return self.names if self._words is None else DEFAULT_TASKS

    @property
    def depth_names(self) -> frozenset[str]:
        """Tasks that ask for a single needle."""
        return ENGLISH_DEPTH_TASKS if self._words is None else DEPTH_TASKS

    def draw(
        self, task: str, first: int, count: int, *, tokens: int, seed: int,
        depth: float | None = None,
    ) -> list[Sample]:  # fmt: skip
        """See `TaskSource.draw`; there is no end of samples."""
        samples = []
        for number in range(first, first + count):
            rng = random.Random(f"{seed}/{task}/{tokens}/{number}")
            if self._words is not None:
                sample = make_sample(task, tokens, rng, self._words, depth=depth)
            else:
                sample = make_english_sample(
                    task, tokens, rng, self._tokenizer, depth=depth, chat=self._chat,
                    haystack=self._haystack,
                )  # fmt: skip
            samples.append(sample)
        return samples


class FileTasks:
    """Tasks from JSONL files, see `read_records`; a file's order is the samples' order.

    Args:
        path: file or folder.
        tokenizer: of the model that will be asked.
        metric: for lines that name none.
        chat: wrap prompts into the tokenizer's chat template.
        template: of the prompts, see `record_sample`.

    Raises:
        ConfigError: a line is not usable (names file and line), or `chat` without a template.
    """

    def __init__(
        self, path: str | Path, tokenizer: TextTokenizer, *, metric: str | None = None,
        chat: bool = False, template: str | None = None,
    ) -> None:  # fmt: skip
        Prompter(tokenizer, chat=chat)
        self._tokenizer = tokenizer
        self._chat = chat
        self._template = template
        self._records: dict[str, list[Record]] = {}
        for record in read_records(path, metric=metric):
            self._records.setdefault(record.task, []).append(record)

    @property
    def names(self) -> Sequence[str]:
        """Every task's name, in the order of the files."""
        return tuple(self._records)

    @property
    def default_names(self) -> Sequence[str]:
        """All of them."""
        return self.names

    @property
    def depth_names(self) -> frozenset[str]:
        """None: what is asked for lies where it lies."""
        return frozenset()

    def draw(
        self, task: str, first: int, count: int, *, tokens: int, seed: int,
        depth: float | None = None,
    ) -> list[Sample]:  # fmt: skip
        """See `TaskSource.draw`; `seed` changes nothing."""
        if task not in self._records:
            raise ConfigError(f"no task is called {task!r}; there are {', '.join(self._records)}")
        if depth is not None:
            raise ConfigError(f"{task} has no depth: it comes from a file")
        return [
            record_sample(
                record, self._tokenizer, tokens=tokens, chat=self._chat, template=self._template
            )
            for record in self._records[task][first : first + count]
        ]


def _bundled_words(tokenizer: TextTokenizer) -> Words | None:
    """The bundled model's words, if this is its tokenizer."""
    vocabulary = getattr(tokenizer, "get_vocab", None)
    if vocabulary is None:
        return None
    try:
        return Words.of(vocabulary())
    except ConfigError:
        return None
