"""covering(): the few combinations in which every two values of two parameters meet."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[int, int, int, int]
"""A parameter and the place of its value, and another's."""


def covering(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Some of the combinations of all parameters' values; each pair of values is in one at least.

    Most faults that depend on parameters need two of them at once. The combinations are taken
    greedily, the first of those that have the most pairs not met yet, so they are always the same.

    Args:
        values: of each of two parameters or more, none empty.

    Returns:
        Combinations for `pytest.mark.parametrize`, one value of each parameter.
    """
    places = [range(len(each)) for each in values]
    left = {
        (i, a, j, b)
        for i, j in combinations(range(len(values)), 2)
        for a, b in product(places[i], places[j])
    }
    everything = [(row, _pairs(row)) for row in product(*places)]
    taken = []
    while left:
        row, met = max(everything, key=lambda each: len(each[1] & left))
        left -= met
        taken.append(tuple(each[place] for each, place in zip(values, row, strict=True)))
    return taken


def _pairs(row: tuple[int, ...]) -> set[Pair]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}
