"""Rows of a video run: a clip's tokens, and questions with their answers behind it.

All rows of a micro-batch have clips of as many frames of one size, so that visual tokens stand at
the same places of each; their cells go to the device as codes. What a row holds follows from the
run's seed, the micro-batch's number and the row's number in it, as in `training.data`.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from training.clips import FIRST_S, LAST_S, TASKS, Clip, Examiner, draw_clip
from training.data import BOS, EOS, OTHER, PAD, Batch
from training.video_settings import VideoRows, VideoSettings
from training.video_words import BEFORE_FRAME, BEHIND_FRAME, END, SECONDS, START, VIDEO

_AROUND = BEFORE_FRAME + BEHIND_FRAME


class Grid(NamedTuple):
    """The clips of a micro-batch."""

    frames: int
    side: int
    """Cells of a frame's side."""

    @property
    def frame_tokens(self) -> int:
        """Of one frame, with the text around it."""
        return self.side * self.side + _AROUND

    @property
    def tokens(self) -> int:
        """Of a clip, and `<bos>` in front of it."""
        return 1 + self.frames * self.frame_tokens

    @property
    def visual_tokens(self) -> int:
        """Of a clip."""
        return self.frames * self.side * self.side

    @classmethod
    def fitting(cls, length: int, side: int, share: float) -> "Grid":
        """As many frames as take up a share of a row.

        Raises:
            ConfigError: not two of them do.
        """
        frames = int((length * share - 1) / (side * side + _AROUND))
        if frames < 2:
            raise ConfigError(f"rows of {length} tokens hold no two frames of side {side}")
        return cls(min(frames, LAST_S + 1 - FIRST_S), side)


@dataclass(frozen=True, slots=True)
class VideoRow:
    """One row of a batch; arrays as in `training.data.Row`."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    """On the axis of time."""
    weights: NDArray[np.float32]
    groups: NDArray[np.int8]
    """Number of the task in answers, else `OTHER`. [length]"""
    codes: NDArray[np.uint16]
    """[frames, side * side]"""


class VideoRowMaker:
    """Makes rows for one run.

    Args:
        settings: of the run.
        vocabulary: words with their ids.
    """

    def __init__(self, settings: VideoSettings, vocabulary: Mapping[str, int]) -> None:
        self._settings, self._ids = settings, vocabulary

    def batch(self, number: int) -> Batch:
        """Micro-batch `number` of the run, from 0."""
        settings = self._settings
        stage = settings.video_stage_at(number // settings.micro_batches)
        name = f"train/{settings.seed}/{number}"
        rng = random.Random(name)
        length = rng.choice(stage.lengths)
        share = max(rng.choice(stage.shares), 1 - settings.rows.questions / length)
        grid = Grid.fitting(length, rng.choice(stage.sides), share)
        mix = settings.mix if stage.mix is None else stage.mix
        count = settings.micro_batch_tokens // length
        rows = [self.row(length, grid, f"{name}/{row}", mix) for row in range(count)]
        return _join(rows, grid)

    def row(self, length: int, grid: Grid, name: str, mix: Mapping[str, float]) -> VideoRow:
        """One row of `length` tokens.

        Args:
            grid: of its clip.
            name: where its randomness comes from.
            mix: share of each task among its questions.
        """
        rng = random.Random(name)
        cast = self._settings.cast
        clip = draw_clip(grid.frames, grid.side, cast, rng)
        ids = [BOS, *clip_ids(clip, self._ids)]
        assert len(ids) == grid.tokens
        groups = np.full(length, OTHER, dtype=np.int8)
        weights = np.zeros(length, dtype=np.float32)
        examiner, plan, words = Examiner(clip, cast, rng), self._settings.rows, self._ids
        while asked := examiner.ask(mix):
            question, answer = word_ids(asked.question, words), word_ids(asked.answer, words)
            start = len(ids) + len(question)
            end = start + len(answer) + 1
            if end > length:
                break
            ids += [*question, *answer, EOS]
            groups[start:end] = TASKS.index(asked.task)
            weights[start:end] = max(1.0, plan.answer_floor / (end - start))
        draw = np.random.default_rng(rng.getrandbits(64))
        tokens = np.full(length, PAD, dtype=np.int32)
        tokens[: len(ids)] = ids
        other = (groups == OTHER) & (draw.random(length) < plan.other_share)
        other &= (tokens != self._ids[VIDEO]) & (tokens != PAD)
        other[0] = False
        weights[other] = plan.other_weight
        positions = video_positions(length, grid, plan, draw)
        return VideoRow(tokens, positions, weights, groups, clip.codes)


def word_ids(text: str, ids: Mapping[str, int]) -> list[int]:
    """Ids of words that are separated by blanks."""
    return [ids[word] for word in text.split()]


def clip_ids(clip: Clip, ids: Mapping[str, int]) -> list[int]:
    """A clip's tokens, as Qwen3-VL's processor writes them; without `<bos>`."""
    frames, cells = clip.codes.shape
    digits = [ids[str(digit)] for digit in range(10)]
    seen = [ids[VIDEO]] * cells
    said: list[int] = []
    for time in range(clip.first, clip.first + frames):
        said += [ids["<"], *(digits[int(digit)] for digit in str(time)), ids[SECONDS], ids[START]]
        said += [*seen, ids[END]]
    return said


def video_positions(
    length: int, grid: Grid, plan: VideoRows | None = None, draw: np.random.Generator | None = None
) -> NDArray[np.int32]:
    """Positions on the axis of time: a frame is at one, and moves on what follows by its side.

    Args:
        plan: with jumps between frames, as often as it says; None: none.
        draw: their randomness.
    """
    steps = np.ones(length, dtype=np.int64)
    steps[0] = 0
    cells = grid.side * grid.side
    starts = 1 + BEFORE_FRAME + np.arange(grid.frames) * grid.frame_tokens
    for cell in range(1, cells):
        steps[starts + cell] = 0
    steps[starts + cells] = grid.side
    if plan is not None and draw is not None and draw.random() < plan.jump_share:
        room = plan.jump_to - int(steps.sum())
        if room > 0 and plan.jumps > 0:
            count = int(draw.integers(1, plan.jumps + 1))
            far = np.diff(np.sort(draw.integers(0, room + 1, size=count)), prepend=0)
            frames = draw.integers(0, grid.frames, size=count)
            np.add.at(steps, 1 + frames * grid.frame_tokens, far)
    return np.cumsum(steps).astype(np.int32)


def _join(rows: list[VideoRow], grid: Grid) -> Batch:
    length = len(rows[0].tokens)
    weights = np.stack([row.weights for row in rows]).reshape(-1)
    tokens = np.stack([row.tokens for row in rows]).astype(np.uint16)
    found = np.flatnonzero(weights)
    assert (found % length > 0).all(), "nothing stands before a row's first token"
    return Batch(
        tokens=tokens,
        positions=np.stack([row.positions for row in rows]),
        places=(found - 1).astype(np.int32),
        targets=tokens.reshape(-1)[found],
        weights=weights[found],
        groups=np.stack([row.groups for row in rows]).reshape(-1)[found],
        codes=np.stack([row.codes for row in rows]).reshape(-1),
        grid=(grid.frames, grid.side),
    )
