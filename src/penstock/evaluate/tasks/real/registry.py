"""The tasks of the suite by name, and samples of them by number."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.prompt_fit import Draft, Prompter, TextTokenizer
from penstock.evaluate.tasks.real import long_answers, needles
from penstock.evaluate.tasks.real.aggregation import aggregation
from penstock.evaluate.tasks.real.equal_length import EqualLength
from penstock.evaluate.tasks.real.extraction import extraction
from penstock.evaluate.tasks.real.ground import Ground, grounds_of
from penstock.evaluate.tasks.real.hops import multi_hop
from penstock.evaluate.tasks.real.passages import FIDELITY, passages
from penstock.evaluate.tasks.real.repository import Repository
from penstock.evaluate.tasks.real.texts import read_shipped_texts
from penstock.evaluate.tasks.real.tracking import tracking
from penstock.evaluate.tasks.sample import Sample

_Make = Callable[[random.Random, int, Ground, Repository], Draft]
"""From a prompt's tokens, what it is hidden in, and the files of the repository."""


def _needle(
    task: str, rng: random.Random, tokens: int, ground: Ground, repository: Repository
) -> Draft:
    return needles.needles(task, rng, ground)


ANSWERED: Mapping[str, Sequence[_Make]] = MappingProxyType({
    "extraction": (lambda rng, tokens, ground, _: extraction(rng, tokens, ground),),
    "multi_query": (partial(_needle, "multi_query"),),
    "long_answer": (
        lambda rng, tokens, ground, _: long_answers.rewriting(rng, ground),
        lambda rng, tokens, ground, _: long_answers.translating(rng, ground),
        lambda rng, tokens, ground, repository: repository.listing(rng, tokens),
    ),
    "multi_hop": (lambda rng, tokens, ground, _: multi_hop(rng, ground),),
    "multi_value": (partial(_needle, "multi_value"),),
    "repository": (lambda rng, tokens, ground, repository: repository.question(rng, tokens),),
    "tracking": (lambda rng, tokens, ground, _: tracking(rng, ground),),
    "single_3": (partial(_needle, "single_3"),),
    "multi_key": (partial(_needle, "multi_key"),),
    "aggregation": (lambda rng, tokens, ground, _: aggregation(rng, ground),),
    "single_2": (partial(_needle, "single_2"),),
})  # fmt: skip
"""Tasks that are answered, the most telling first. A task's samples take its kinds in turn, and
each kind its grounds: a book, then source code."""


EDITION = 2
"""Grows with every change of a task: results of another edition are not gone on with."""
ROOM = 1024
"""More tokens than an answer has."""


class RealTasks:
    """Tasks for pretrained models, asked through the chat template; see `TaskSource`.

    Args:
        tokenizer: of the model that will be asked.
        positions: that the model has; a prompt leaves `ROOM` of them to its answer.

    Raises:
        ConfigError: it has no chat template.
    """

    def __init__(self, tokenizer: TextTokenizer, *, positions: int) -> None:
        self._longest = positions - ROOM
        self._length = EqualLength(Prompter(tokenizer, chat=True))
        self._texts = read_shipped_texts()
        self._grounds = grounds_of(self._texts)
        self._repository = Repository(self._texts.files)
        self._tokenizer = tokenizer

    @property
    def names(self) -> Sequence[str]:
        """Answered tasks and measurements of fidelity, the most telling first."""
        first, *rest = ANSWERED
        return (first, *FIDELITY, *rest)

    @property
    def default_names(self) -> Sequence[str]:
        """All of them."""
        return self.names

    @property
    def depth_names(self) -> frozenset[str]:
        """None: places are drawn."""
        return frozenset()

    @property
    def digest(self) -> str:
        """Tells other texts and other editions of the tasks apart."""
        return f"{self._texts.digest}-{EDITION}"

    def draw(
        self, task: str, first: int, count: int, *, tokens: int, seed: int,
        depth: float | None = None,
    ) -> list[Sample]:  # fmt: skip
        """See `TaskSource.draw`; there is no end of samples. Prompts have one length."""
        if task not in ANSWERED:
            raise ConfigError(f"no task is called {task!r}; there are {', '.join(ANSWERED)}")
        if depth is not None:
            raise ConfigError(f"{task} has no depth: its places are drawn")
        return [
            self._sample(task, number, tokens, random.Random(f"{seed}/{task}/{tokens}/{number}"))
            for number in range(first, first + count)
        ]

    def _sample(self, task: str, number: int, tokens: int, rng: random.Random) -> Sample:
        kinds = ANSWERED[task]
        ground = self._grounds[number // len(kinds) % len(self._grounds)]
        draft = kinds[number % len(kinds)](rng, tokens, ground, self._repository)
        return self._length.finish(draft, min(tokens, self._longest))

    def passages(
        self, name: str, first: int, count: int, *, tokens: int, seed: int
    ) -> Sequence[tuple[int, ...]]:
        """Token ids of held-out texts, see `passages.passages`."""
        return passages(
            name, self._texts, self._tokenizer, tokens=min(tokens, self._longest), first=first,
            count=count, seed=seed,
        )  # fmt: skip
