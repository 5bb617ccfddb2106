"""The recall tasks by name: fresh samples of an exact length for the bundled model.

Every task hides something in a generated document and asks for it; the answer can be checked
word for word. The bundled model answers all of them with full attention (copy not always), so
that whatever is lost at a smaller memory budget was lost by the policy.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from penstock.bench.tasks import needles, paths
from penstock.bench.tasks.sample import Sample
from penstock.bench.tasks.words import Tokenizer, Words
from penstock.core.errors import ConfigError

Task = Callable[[int, random.Random, Words], Sample]

TASKS: Mapping[str, Task] = MappingProxyType({
    "single_noise": partial(needles.single, repeated=True),
    "single_essay": partial(needles.single, repeated=False),
    "multi_key_few": needles.multi_key_few,
    "multi_key_full": needles.multi_key_full,
    "multi_value": needles.multi_value,
    "multi_query": needles.multi_query,
    "variable_tracking": paths.variable_tracking,
    "pointer_chasing": paths.pointer_chasing,
    "two_walkers": paths.two_walkers,
    "copy": paths.copy,
})  # fmt: skip


def make_sample(
    task: str,
    tokens: int,
    rng: random.Random,
    vocabulary: Words | Tokenizer | Mapping[str, int],
) -> Sample:
    """Make a fresh sample of a task.

    Args:
        task: one of `TASKS`.
        tokens: length of the prompt in tokens, `<bos>` and the question included. The prompt is
            never longer; it is shorter by less than one sentence where the task's sentences
            have fixed lengths.
        rng: where all randomness comes from: the same state gives the same sample.
        vocabulary: the bundled model's tokenizer, its vocabulary, or the words taken from it.

    Raises:
        ConfigError: there is no such task, `tokens` is too short for it, or the vocabulary is
            not the bundled model's.
    """
    if task not in TASKS:
        raise ConfigError(f"no task is called {task!r}; there are {', '.join(TASKS)}")
    return TASKS[task](tokens, rng, Words.of(vocabulary))
