"""Questions with their right answers as token ids, made where they are needed or ahead of it."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import Sample, Words
from training.data import BOS, EOS, GENERATORS


@dataclass(frozen=True, slots=True)
class Job:
    """One sample of one cell."""

    cell: int
    """Number of the cell."""
    task: str
    tokens: int
    """Most tokens of the prompt."""
    number: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and the right answer behind it."""

    job: Job
    ids: NDArray[np.int32]
    """`<bos>`, prompt, answer and `<eos>`. [tokens]"""
    answer_tokens: int
    """Of them, how many are the answer's, `<eos>` counted in."""
    sample: Sample | None
    """Only if it is decoded as well."""
    refused: str = ""
    """Why there is none."""
    only_decoded: bool = False
    """Whether the right answer is one of many orders, so that giving it would say nothing."""


Draw = Callable[[Job], Sample]
Encode = Callable[[Sample], tuple[Sequence[int], Sequence[int]]]
"""Prompt and answer as ids, `<bos>` in front of the one and no `<eos>` behind the other."""


class Asker:
    """Makes what is asked.

    Args:
        draw: makes a job's sample.
        encode: makes ids of it.
        keep: the first so many samples of a cell are kept, for decoding.
        free: tasks whose answers may be in any order.
    """

    def __init__(
        self, draw: Draw, encode: Encode, keep: int, free: frozenset[str] = frozenset()
    ) -> None:
        self._draw, self._encode, self._keep, self._free = draw, encode, keep, free

    def __call__(self, job: Job) -> Asked:
        """Make one; a sample that cannot be made is refused, with the reason."""
        try:
            sample = self._draw(job)
        except ConfigError as error:
            return Asked(job, np.zeros(0, dtype=np.int32), 0, None, str(error))
        prompt, answer = self._encode(sample)
        ids = np.array([*prompt, *answer, EOS], dtype=np.int32)
        return Asked(
            job, ids, len(answer) + 1, sample if job.number < self._keep else None,
            only_decoded=job.task in self._free,
        )  # fmt: skip


def recall_asker(vocabulary: Mapping[str, int], seed: int, keep: int) -> Asker:
    """Samples of `GENERATORS`, the same that `penstock bench accuracy --seed` asks."""
    words = Words.of(vocabulary)

    def draw(job: Job) -> Sample:
        name = f"{seed}/{job.task}/{job.tokens}/{job.number}"
        return GENERATORS[job.task](job.tokens, random.Random(name), words)

    def encode(sample: Sample) -> tuple[list[int], list[int]]:
        prompt = [BOS, *(vocabulary[word] for word in sample.prompt.split())]
        return prompt, [vocabulary[word] for word in sample.answer.split()]

    return Asker(draw, encode, keep)
