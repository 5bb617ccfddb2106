"""What is read for a key stream: a prompt, and the output that is forced or generated behind it."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError, PromptError
from penstock.evaluate.tasks import GeneratedTasks, Words
from penstock.evaluate.tasks.long_output import long_walk
from penstock.generation.prompts import encode, read_text_file
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel
from penstock.models.plain_model import plain_cache
from research.clusters.ring_walk import ring_walk

RING_WALK, LONG_WALK = "ring_walk", "long_walk"
Counter = Callable[[int], None]


def read_on(
    loaded: LoadedModel, path: str | Path, *, prompt_tokens: int, output_tokens: int
) -> list[int]:  # fmt: skip
    """The first tokens of a text file: a prompt, and the text's own continuation.

    Raises:
        PromptError: the file cannot be read, or is too short.
    """
    ids = encode(loaded, read_text_file(path, "text"))
    wanted = prompt_tokens + output_tokens
    if len(ids) < wanted:
        raise PromptError(
            f"the text has {len(ids):,} tokens, and --prompt and --max-new-tokens ask for "
            f"{wanted:,}; give a longer one, or ask for fewer"
        )
    return ids[:wanted]


def digest_of_text(path: str | Path | None) -> str | None:
    """What tells texts apart whose paths no result shows; None where no file is read.

    Raises:
        PromptError: the file cannot be read.
    """
    if path is None:
        return None
    return hashlib.sha256(read_text_file(path, "text").encode()).hexdigest()[:16]


def answer_of(
    loaded: LoadedModel, task: str, *, prompt_tokens: int, output_tokens: int, seed: int
) -> tuple[list[int], int]:  # fmt: skip
    """A task's prompt with its right answer behind it, both as tokens.

    Args:
        task: `ring_walk`, `long_walk`, or one of `penstock bench accuracy`.
        prompt_tokens: most tokens of the prompt.
        output_tokens: most tokens of the answer; those of tasks that end may be fewer.

    Returns:
        Prompt and answer, and how many of them are the prompt.

    Raises:
        ConfigError: no such task, or not for this model.
    """
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.name} has no tokenizer, so that it cannot be given a task")
    rng = random.Random(f"{seed}/{task}/{prompt_tokens}")
    if task in (RING_WALK, LONG_WALK):
        words = Words.of(loaded.tokenizer)
        if task == RING_WALK:
            prompt, answer = ring_walk(prompt_tokens, output_tokens, rng, words)
        else:
            sample = long_walk(prompt_tokens, rng, words)
            prompt, answer = sample.prompt, sample.answer
    else:
        [sample] = GeneratedTasks(loaded.tokenizer).draw(
            task, 0, 1, tokens=prompt_tokens, seed=seed
        )
        prompt, answer = sample.prompt, sample.answer
    before = encode(loaded, prompt)
    whole = encode(loaded, f"{prompt} {answer}")
    if whole[: len(before)] != before:
        raise ConfigError(f"the answer of {task} cannot be told from its prompt in tokens")
    return whole[: len(before) + output_tokens], len(before)


def generated(
    loaded: LoadedModel, prompt: list[int], output_tokens: int, *, on_token: Counter
) -> list[int]:  # fmt: skip
    """A prompt and what the model says behind it: the likeliest tokens, past its end if need be.

    Args:
        on_token: called with the tokens said so far.
    """
    model: Any = loaded.model
    cache: Any = plain_cache(loaded.model, "dynamic", len(prompt) + output_tokens)
    ids, fed = list(prompt), torch.tensor([prompt])
    with torch.no_grad():
        for done in range(output_tokens):
            out = model(fed, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
            fed = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            ids.append(int(fed))
            on_token(done + 1)
    return ids
