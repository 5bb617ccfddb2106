"""One question about one fresh clip, as token ids; what a glance and the evaluation ask."""

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from training.clips import Cast, Clip, Examiner, draw_clip
from training.data import BOS, EOS
from training.video_data import Grid, clip_ids, word_ids
from training.video_words import vocabulary

_TRIES = 200


@dataclass(frozen=True, slots=True)
class Prompt:
    """A clip and a question about it."""

    codes: NDArray[np.uint16]
    """[frames, side * side]"""
    ids: list[int]
    """`<bos>`, clip and question."""
    answer: list[int]
    """With `<eos>`."""


def draw_prompt(task: str, grid: Grid, cast: Cast, seed: int, number: int) -> Prompt:
    """Sample `number` of a task.

    Raises:
        ConfigError: no clip so short was found about which it could be asked.
    """
    words = vocabulary()
    for again in range(_TRIES):
        rng = random.Random(f"{seed}/{task}/{grid.frames}x{grid.side}/{number}/{again}")
        clip: Clip = draw_clip(grid.frames, grid.side, cast, rng)
        asked = Examiner(clip, cast, rng).ask({task: 1.0})
        if asked is not None:
            ids = [BOS, *clip_ids(clip, words), *word_ids(asked.question, words)]
            return Prompt(clip.codes, ids, [*word_ids(asked.answer, words), EOS])
    raise ConfigError(f"no clip of {grid.frames} frames can be asked {task}")
