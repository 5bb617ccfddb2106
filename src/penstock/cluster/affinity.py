"""Which replica a key belongs to, and which one takes a request when that one is busy.

Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018): a request
walks a ring of hashed replicas from its key's place, to the first whose load is below a bound.
"""

import math
from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from penstock.core.errors import ConfigError

POINTS = 128
"""Of each replica on the ring: shares differ by about 1 / sqrt(POINTS)."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes."""

    replica: str
    home: str
    """The replica that the key belongs to."""

    @property
    def is_spill(self) -> bool:
        """Whether it goes to another replica than its home."""
        return self.replica != self.home


class Ring:
    """Replicas on a circle; one that comes or goes moves the keys of its own arcs alone."""

    def __init__(self, replicas: Iterable[str], *, points: int = POINTS) -> None:
        """Place them.

        Args:
            points: of each on the circle.

        Raises:
            ConfigError: there is no replica, or `points` is less than 1.
        """
        names = sorted(set(replicas))
        if not names or points < 1:
            raise ConfigError("a ring needs a replica, and a point of each")
        placed = sorted((_hash(f"{name}#{each}"), name) for name in names for each in range(points))
        self._places = [place for place, _ in placed]
        self._names = [name for _, name in placed]
        self._count = len(names)

    def walk(self, key: str) -> list[str]:
        """All replicas, in the order in which a key meets them; the first is its home."""
        first = bisect(self._places, _hash(key))
        met: dict[str, None] = {}
        for step in range(len(self._names)):
            met[self._names[(first + step) % len(self._names)]] = None
            if len(met) == self._count:
                break
        return list(met)


def route(
    walk: list[str], loads: Mapping[str, int], *, least: int, factor: float = 1.25
) -> Route:  # fmt: skip
    """Where a request of a key goes.

    The bound is `factor` times the mean load with this request, and `least` at least: below that
    a replica answers at once, and spilling over would win nothing. Where all loads are at the bound
    the least loaded replica takes the request, the first of the walk among equals.

    Args:
        walk: of `Ring.walk`.
        loads: requests under way by replica; what is missing has none.
        least: requests that a replica runs together.

    Raises:
        ConfigError: there is no replica, or a bound is out of its range.
    """
    if not walk:
        raise ConfigError("there is no replica to take a request")
    if least < 1 or factor < 1:
        raise ConfigError(f"{least=} and {factor=} must be at least 1")
    current = [loads.get(each, 0) for each in walk]
    bound = max(least, math.ceil(factor * (sum(current) + 1) / len(walk)))
    below = (name for name, load in zip(walk, current, strict=True) if load < bound)
    fallback = walk[current.index(min(current))]
    return Route(next(below, fallback), walk[0])


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())
