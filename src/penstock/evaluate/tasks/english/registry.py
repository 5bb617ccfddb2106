"""The English tasks by name: fresh samples of a given length for any tokenizer.

RULER's retrieval family, variable tracking and aggregation (eleven of its thirteen tasks; the
two of question answering need data sets), and two tasks with long answers.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english import aggregation, long_answers, needles, tracking
from penstock.evaluate.tasks.english.filler import Haystack, prose
from penstock.evaluate.tasks.english.needles import NEEDLE_KINDS
from penstock.evaluate.tasks.english.prompt_fit import Draft, Prompter, TextTokenizer, finish
from penstock.evaluate.tasks.grid import check_depth
from penstock.evaluate.tasks.sample import Sample

EnglishTask = Callable[[random.Random, int, Prompter, Haystack], Draft]


def _needle(
    task: str, rng: random.Random, tokens: int, prompter: Prompter, haystack: Haystack
) -> Draft:
    return needles.draft(task, rng, haystack=haystack)


ENGLISH_TASKS: Mapping[str, EnglishTask] = MappingProxyType({
    **{name: partial(_needle, name) for name in NEEDLE_KINDS},
    "variable_tracking": lambda rng, tokens, prompter, haystack: tracking.variable_tracking(rng),
    "common_words": lambda rng, tokens, prompter, haystack: aggregation.common_words(
        rng, tokens, prompter
    ),
    "frequent_words": lambda rng, tokens, prompter, haystack: aggregation.frequent_words(
        rng, tokens
    ),
    "pointer_chasing": lambda rng, tokens, prompter, haystack: long_answers.pointer_chasing(
        rng, tokens, prompter
    ),
    "state_tracking": long_answers.state_tracking,
})  # fmt: skip

ENGLISH_DEPTH_TASKS = frozenset(
    name for name, kind in NEEDLE_KINDS.items() if kind.values == kind.asked == 1
)
"""Tasks that ask for one needle, whose place can be chosen; `single_2` is the vanilla needle in
a haystack."""


def make_english_sample(
    task: str,
    tokens: int,
    rng: random.Random,
    tokenizer: TextTokenizer,
    *,
    depth: float | None = None,
    chat: bool = False,
    haystack: Haystack = prose,
) -> Sample:
    """Make a fresh sample of an English task.

    Args:
        task: one of `ENGLISH_TASKS`.
        tokens: most tokens of the prompt, special tokens, question and chat template included;
            it has less by at most one unit of filler (a sentence, a needle, a word).
        rng: where all randomness comes from: the same state and tokenizer give the same sample.
        tokenizer: of the model that will be asked.
        depth: share of the document in front of the needle that is asked for, 0 to 1; None: a
            random place. Nothing else changes with it.
        chat: wrap the question into the tokenizer's chat template; the sample then carries
            its `token_ids`.
        haystack: makes the prose of the tasks that have some, e.g. a `TextHaystack` of a real
            text; made-up prose without it.

    Raises:
        ConfigError: there is no such task, `tokens` is too short for it (or too long: the keys
            run out), the task has no single needle, `depth` is no share, or there is no chat
            template.
    """
    if task not in ENGLISH_TASKS:
        raise ConfigError(f"no task is called {task!r}; there are {', '.join(ENGLISH_TASKS)}")
    prompter = Prompter(tokenizer, chat=chat)
    if depth is None:
        return finish(ENGLISH_TASKS[task](rng, tokens, prompter, haystack), tokens, prompter)
    check_depth(depth)
    if task not in ENGLISH_DEPTH_TASKS:
        raise ConfigError(f"{task} has no depth; {', '.join(sorted(ENGLISH_DEPTH_TASKS))} have")
    return finish(needles.draft(task, rng, depth=depth, haystack=haystack), tokens, prompter)
