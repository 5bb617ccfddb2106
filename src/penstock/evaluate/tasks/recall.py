"""The recall tasks by name: fresh samples of an exact length for the bundled model.

Every task hides something in a generated document and asks for it; the answer can be checked
word for word. The bundled model, recall-2, answers all of them with full attention (walks of 8K
tokens not always), so that whatever is lost at a smaller memory budget was lost by the policy.

`DEFAULT_TASKS` are asked if no task is named: what recall-7m, which was bundled before, answers
too. `RECALL_2_TASKS` only recall-2 has learnt: the most frequent word of a document, the longest
of some lists, and walks with values in answers of up to 8K tokens. Counting, frequent words in
their order and sums no model of ours has learnt (`aggregation.py` says why): training evaluates
them, and they are not here.

Long answers in which later tokens need earlier ones are pointer_chasing and two_walkers (200 to
1000 tokens) and long_walk (half the prompt); copy asks for long answers too.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import needles, paths
from penstock.evaluate.tasks.aggregation import longest_list, most_frequent
from penstock.evaluate.tasks.grid import check_depth
from penstock.evaluate.tasks.long_output import long_walk
from penstock.evaluate.tasks.sample import Sample
from penstock.evaluate.tasks.words import Tokenizer, Words

Task = Callable[..., Sample]
"""Takes the prompt's tokens, the random numbers, the words; and `depth=` if in `DEPTH_TASKS`."""

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
    "most_frequent": most_frequent,
    "longest_list": longest_list,
    "long_walk": long_walk,
})  # fmt: skip

RECALL_2_TASKS = ("most_frequent", "longest_list", "long_walk")
"""Tasks that recall-2, the bundled model, has learnt and recall-7m has not."""

DEFAULT_TASKS = tuple(task for task in TASKS if task not in RECALL_2_TASKS)
"""What is asked of models with the bundled one's words if nothing is named."""

DEPTH_TASKS = frozenset({"single_noise", "single_essay", "multi_key_few", "multi_key_full"})
"""Tasks that ask for one needle, whose place can be chosen."""


def make_sample(
    task: str,
    tokens: int,
    rng: random.Random,
    vocabulary: Words | Tokenizer | Mapping[str, int],
    *,
    depth: float | None = None,
) -> Sample:
    """Make a fresh sample of a task.

    Args:
        task: one of `TASKS`.
        tokens: length of the prompt in tokens, `<bos>` and the question included. The prompt is
            never longer; it is shorter by less than one sentence where the task's sentences
            have fixed lengths.
        rng: where all randomness comes from: the same state gives the same sample.
        vocabulary: the bundled model's tokenizer, its vocabulary, or the words taken from it.
        depth: share of the document's tokens in front of the needle that is asked for, 0 to 1;
            None: a random place. Nothing else changes with it.

    Raises:
        ConfigError: there is no such task, `tokens` is too short for it, the vocabulary is
            not the bundled model's, or the task has no single needle or `depth` is no share.
    """
    if task not in TASKS:
        raise ConfigError(f"no task is called {task!r}; there are {', '.join(TASKS)}")
    words = Words.of(vocabulary)
    if depth is None:
        return TASKS[task](tokens, rng, words)
    check_depth(depth)
    if task not in DEPTH_TASKS:
        raise ConfigError(f"{task} has no depth; {', '.join(sorted(DEPTH_TASKS))} have")
    return TASKS[task](tokens, rng, words, depth=depth)
