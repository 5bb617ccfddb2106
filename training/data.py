"""Rows of training tokens out of the bench's own generators, and batches of rows.

A row is `<bos>`, a document, its question and answer, `<eos>`, and further questions with their
answers behind it, filled up with padding to its length. What a row holds follows from the run's
seed, the micro-batch's number and the row's number in it, and from nothing else. The random
numbers of the bench's samples start from `SEED/TASK/...`, with a number in front; ours start
from `train/...`: training never sees an evaluation's sample, whatever the seeds.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import TASKS, Sample, Words
from penstock.evaluate.tasks.aggregation import count_words, flagged_sum, frequent_words
from training.dense import DENSE, Generate
from training.prose_settings import ProseRows
from training.questions import SEVERAL, further_questions
from training.settings import Rows, Settings

GENERATORS: Mapping[str, Generate] = MappingProxyType({
    **TASKS,
    "frequent_words": frequent_words,
    "count_words": count_words,
    "flagged_sum": flagged_sum,
})  # fmt: skip
"""The bench's tasks, and those that no model of ours has learnt."""

OTHER = -1
"""Group of the tokens outside answers."""

PAD, BOS, EOS = 0, 1, 2
_TRIES = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch."""

    tokens: NDArray[np.int32]
    """[length]"""
    positions: NDArray[np.int32]
    """[length]"""
    weights: NDArray[np.float32]
    """Weight of guessing the token that stands here; 0 at most places. [length]"""
    is_answer: NDArray[np.bool_]
    """[length]"""
    task: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one length, and where their loss is taken; small, for the way to the training."""

    tokens: NDArray[np.uint16]
    """[rows, length]"""
    positions: NDArray[np.int32]
    """[rows, length]"""
    places: NDArray[np.int32]
    """Where a token with a weight is guessed, counted over all rows: one before it. [guesses]"""
    targets: NDArray[np.uint16]
    """The tokens there. [guesses]"""
    weights: NDArray[np.float32]
    """[guesses]"""
    groups: NDArray[np.int8]
    """Number of the task among the settings' groups, or `OTHER`. [guesses]"""
    codes: NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, dtype=np.uint16))
    """What is in the cells of clips, row by row. [visual tokens]"""
    grid: tuple[int, int] = (0, 0)
    """Frames of each clip, and cells of a frame's side."""


class RowMaker:
    """Makes rows for one run.

    Args:
        settings: of the run.
        vocabulary: the tokenizer's words with their ids.

    Raises:
        ConfigError: the mix names a task that does not exist, or the vocabulary is not the
            bundled model's.
    """

    def __init__(self, settings: Settings, vocabulary: Mapping[str, int]) -> None:
        for task in settings.groups:
            if task not in GENERATORS and task not in DENSE:
                known = ", ".join([*GENERATORS, *DENSE])
                raise ConfigError(f"no task is called {task!r}; there are {known}")
        self._settings = settings
        self._ids = vocabulary
        self._words = Words.of(vocabulary)
        self._groups = settings.groups

    def batch(self, number: int) -> Batch:
        """Micro-batch `number` of the run, from 0."""
        settings = self._settings
        step = number // settings.micro_batches
        stage, mix = settings.stage_at(step), settings.mix_at(step)
        name = f"train/{settings.seed}/{number}"
        length = random.Random(name).choice(stage.lengths)
        count = settings.micro_batch_tokens // length
        rows = [self.row(length, f"{name}/{index}", mix) for index in range(count)]
        return _join(rows, self._groups)

    def row(self, length: int, name: str, mix: Mapping[str, float] | None = None) -> Row:
        """One row of `length` tokens, of a task drawn from a mix.

        Args:
            mix: share of each task; None: the run's own.
            name: where its randomness comes from.

        Raises:
            ConfigError: none of the mix's tasks fits into so few tokens.
        """
        mix = self._settings.mix if mix is None else mix
        tasks, shares = list(mix), list(mix.values())
        rng = random.Random(name)
        error: ConfigError | None = None
        for _ in range(_TRIES):
            task = rng.choices(tasks, shares)[0]
            try:
                return self._row_of(task, length, rng)
            except ConfigError as refusal:  # too short for this task: another one
                error = refusal
        raise ConfigError(f"rows of {length} tokens are too short: {error}")

    def _row_of(self, task: str, length: int, rng: random.Random) -> Row:
        plan = self._settings.rows
        most, share = plan.further_most, rng.uniform(0, plan.further_share)
        if task in DENSE:
            generate, share = DENSE[task]
            most = length
        else:
            generate = GENERATORS[task]
            share = share if task in SEVERAL else 0.0
        spare = int(length * share)
        sample = self._fitting(task, generate, length, spare, rng.random())
        ids = [BOS, *self._encode(sample.prompt)]
        answers: list[range] = []
        document = ids[: ids.index(self._ids["Question"])]
        self._append_answer(ids, answers, sample.answer)
        for question, answer in further_questions(sample, rng) if spare else ():
            asked, said = self._encode(question), self._encode(answer)
            if len(answers) > most or len(ids) + len(asked) + len(said) + 1 > length:
                break
            ids += asked
            self._append_answer(ids, answers, answer)
        row = _row(task, ids, answers, length, len(document), plan, self._settings, rng)
        state = np.zeros(length, dtype=np.bool_)
        equals = np.flatnonzero(row.is_answer & (row.tokens == self._ids["="]))
        state[equals + 1] = state[equals + 2] = True
        row.weights[state] *= plan.state_weight
        return row

    def _fitting(
        self, task: str, generate: Generate, length: int, spare: int, seed: float
    ) -> Sample:
        """A sample that leaves `spare` tokens of a row, with the longest prompt soon found."""
        tokens = length - spare
        for _ in range(_TRIES):
            sample = generate(tokens, random.Random(f"sample/{seed!r}"), self._words)
            used = 1 + len(sample.prompt.split()) + sample.max_new_tokens + spare
            over = used - length
            if over <= 0:
                return sample
            if over * 8 > length:  # answers that grow with their documents
                tokens = min(tokens - 1, int(tokens * (length - spare) / (used - spare)))
            else:
                tokens -= over
        raise ConfigError(f"no {task} was found that fits into {length} tokens")

    def _append_answer(self, ids: list[int], answers: list[range], text: str) -> None:
        start = len(ids)
        ids += [*self._encode(text), EOS]
        answers.append(range(start, len(ids)))

    def _encode(self, text: str) -> list[int]:
        """Ids of a text; a word that is not in the vocabulary is a programmer's mistake."""
        ids = self._ids
        return [ids[word] for word in text.split()]


def _row(
    task: str, ids: list[int], answers: list[range], length: int, document: int,
    plan: Rows, settings: Settings, rng: random.Random,
) -> Row:  # fmt: skip
    assert len(ids) <= length, (task, len(ids), length)
    draw = np.random.default_rng(rng.getrandbits(64))
    tokens = np.full(length, PAD, dtype=np.int32)
    tokens[: len(ids)] = ids
    is_answer = np.zeros(length, dtype=np.bool_)
    for answer in answers:
        is_answer[answer.start : answer.stop] = True
    said = int(is_answer.sum())
    weight = min(1.0, plan.answer_cap / said)
    if said < plan.answer_floor:
        weight = plan.answer_floor / said
    counts = draw.random(length) < plan.other_share
    counts[0] = False
    counts[len(ids) :] = False
    weights = np.where(is_answer, weight, np.where(counts, plan.other_weight, 0.0))
    positions = positions_of(length, document, plan, settings.model.positions, draw)
    return Row(tokens, positions, weights.astype(np.float32), is_answer, task)


def positions_of(
    length: int, document: int, plan: Rows | ProseRows, most: int, draw: np.random.Generator
) -> NDArray[np.int32]:
    """Positions that jump a few times inside the document, so that short rows teach far distances.

    Source: after Zhu et al., "PoSE: Efficient context window extension of LLMs via positional
    skip-wise training" (ICLR 2024).
    """
    steps = np.ones(length, dtype=np.int64)
    steps[0] = 0
    room = most - length
    if length < plan.jump_below and room > 0 and document > 1 and draw.random() < plan.jump_share:
        count = int(draw.integers(1, plan.jumps + 1))
        far = np.diff(np.sort(draw.integers(0, room + 1, size=count)), prepend=0)
        np.add.at(steps, draw.integers(1, document, size=count), far)
    return np.cumsum(steps).astype(np.int32)


def _join(rows: list[Row], groups: list[str]) -> Batch:
    length = len(rows[0].tokens)
    weights = np.stack([row.weights for row in rows]).reshape(-1)
    tokens = np.stack([row.tokens for row in rows]).astype(np.uint16)
    found = np.flatnonzero(weights)
    starts = np.array(list(accumulate([length] * (len(rows) - 1), initial=0)))
    assert not np.isin(found, starts).any(), "nothing stands before a row's first token"
    numbers = np.array([groups.index(row.task) for row in rows])
    is_answer = np.stack([row.is_answer for row in rows]).reshape(-1)[found]
    return Batch(
        tokens=tokens,
        positions=np.stack([row.positions for row in rows]),
        places=(found - 1).astype(np.int32),
        targets=tokens.reshape(-1)[found],
        weights=weights[found],
        groups=np.where(is_answer, numbers[found // length], OTHER).astype(np.int8),
    )
