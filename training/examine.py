"""Exact match of whole answers in one forward pass each, the right answer given (teacher-forced).

An answer is right when every token of it, `<eos>` included, is the likeliest one behind the
right tokens before it. Greedy decoding would give the same tokens, up to rounding.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.evaluate.tasks import Sample, Words
from training.data import BOS, EOS, GENERATORS

Guess = Callable[[Tensor, int], Tensor]
"""Takes token ids [1, tokens] and how many of the last tokens are guessed; gives the likeliest
token for each of them. [count]"""


@dataclass(frozen=True, slots=True)
class Mark:
    """How an answer was."""

    exact: bool
    right_tokens: int
    tokens: int


def draw_sample(task: str, number: int, *, tokens: int, seed: int, words: Words) -> Sample:
    """Sample `number` of a task, the same that `penstock bench accuracy --seed` asks.

    Raises:
        ConfigError: `tokens` is too short for the task.
    """
    return GENERATORS[task](tokens, random.Random(f"{seed}/{task}/{tokens}/{number}"), words)


@torch.no_grad()
def mark(
    guess: Guess, sample: Sample, vocabulary: Mapping[str, int], device: torch.device | str
) -> Mark:
    """Let a model guess every token of a sample's answer."""
    prompt = [BOS, *(vocabulary[word] for word in sample.prompt.split())]
    answer = [*(vocabulary[word] for word in sample.answer.split()), EOS]
    ids = torch.tensor([prompt + answer], device=device)
    guessed = guess(ids, len(answer)).cpu()
    right = int((guessed == torch.tensor(answer)).sum())
    return Mark(right == len(answer), right, len(answer))
