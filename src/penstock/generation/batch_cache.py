"""batch_cache(): the cache of a batch, so divided that it holds a row for each answer."""

from collections.abc import Callable

from penstock.generation.cache_choices import BatchChoices
from penstock.models.cache_adapter import TieredCache


def batch_cache(
    make: Callable[..., TieredCache], choices: BatchChoices, *, prompts: int, answers: int
) -> TieredCache:
    """Make the cache in which prompts are read once, and forked to their answers.

    Left to itself, the plan for the prompts alone would spend the budget on them: a longer window,
    more of the index, or all of them in memory. With that, all answers would be too large.

    Args:
        make: gets policy and memory, and plans for as many rows as there are answers.
    """
    given = {"policy": choices.policy, "memory": choices.memory}
    if prompts == answers:
        return make(**given)
    with make(**given) as whole:
        given["policy"] = whole.policy
        if choices.memory is not None:
            given["memory"] = whole.report().limit_bytes
        must_tier = not whole.plan.is_resident
    return make(**given, must_tier=must_tier)
