"""Where a needle may lie: depths of a document, and the grid of lengths and depths."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One cell of a needle-in-a-haystack grid.

    Attributes:
        tokens: length of the prompt in tokens.
        depth: share of the document in front of the needle, 0 to 1.
    """

    tokens: int
    depth: float


def grid(lengths: Sequence[int], depths: Sequence[float]) -> list[GridPoint]:
    """Every length with every depth; length by length, in the given order.

    Args:
        lengths: prompt lengths in tokens.
        depths: shares of the document in front of the needle.

    Raises:
        ConfigError: no length, no depth, or one that is out of range.
    """
    if not lengths or not depths:
        raise ConfigError("a grid needs at least one length and one depth")
    if min(lengths) < 1:
        raise ConfigError(f"a prompt of {min(lengths)} tokens cannot be; lengths start at 1")
    for depth in depths:
        check_depth(depth)
    return [GridPoint(tokens, depth) for tokens in lengths for depth in depths]


def even_depths(count: int) -> tuple[float, ...]:
    """`count` depths from 0 to 1 at equal distances; one alone is the middle.

    Raises:
        ConfigError: `count` is not positive.
    """
    if count < 1:
        raise ConfigError(f"there must be at least one depth, not {count}")
    if count == 1:
        return (0.5,)
    return tuple(step / (count - 1) for step in range(count))


def check_depth(depth: float) -> None:
    """Refuse what is not a share.

    Raises:
        ConfigError: `depth` is not between 0 and 1.
    """
    if not 0 <= depth <= 1:
        raise ConfigError(f"depth={depth:g} is outside 0 (start) to 1 (end)")


def places_at(depths: Sequence[float], lengths: Sequence[int]) -> list[int]:
    """How many pieces to leave in front, so that about a share of the whole lies there.

    Args:
        depths: the shares, 0 to 1. [depths]
        lengths: of the pieces, in any unit. [pieces]

    Returns:
        For each depth the nearest place, 0 to the number of pieces. [depths]
    """
    ahead = [0, *accumulate(lengths)]
    places = []
    for depth in depths:
        wanted = depth * ahead[-1]
        behind = min(bisect_left(ahead, wanted), len(lengths))
        before = max(behind - 1, 0)
        nearer_before = wanted - ahead[before] < ahead[behind] - wanted
        places.append(before if nearer_before else behind)
    return places
