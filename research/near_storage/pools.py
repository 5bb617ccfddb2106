"""Hot and cold pools played over a recorded decode: what moves between them, by placement."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.tiers.slot_table import ABSENT, SlotTable
from penstock.methods.hillinfer.hot_cold import DECAY_STEPS, HotCold, Placement
from research.near_storage.trace import best, best_count


@dataclass(frozen=True, kw_only=True)
class PoolRule:
    """Who is brought into the hot pool, and who leaves it."""

    placement: Placement
    follows_score: bool
    """The whole hot pool is the best tokens of the step; else only what is selected comes in."""
    decay_steps: int = DECAY_STEPS

    @property
    def pins(self) -> bool:
        """New tokens stay."""
        return self.placement in ("pin", "both")


RULES = {
    "naive": PoolRule(placement="naive", follows_score=True),
    "pin": PoolRule(placement="pin", follows_score=True),
    "selected": PoolRule(placement="naive", follows_score=False),
    "table": PoolRule(placement="table", follows_score=False),
    "both": PoolRule(placement="both", follows_score=False),
}
"""The paper's steps from naive placement to both ideas; "selected" takes the table apart: only what
is selected comes in, and the lowest score goes."""


class Moved(NamedTuple):
    """What one step moved between the pools, in tokens."""

    promoted: int
    passed_through: int
    """Selected tokens that were read and did not stay in the hot pool."""
    demoted: int
    demoted_first: int
    """Demoted tokens that have never been in the cold pool."""
    hot_selected: int
    """Selected tokens that were in the hot pool before the step."""
    selected: int


class Pools:
    """One layer's pools over a decode; starts with the newest tokens of the prompt in the hot one.

    The token of a step is born in the hot pool: that is no promotion.
    """

    def __init__(
        self, rule: PoolRule, *, hot_share: float, alpha: float, prompt: int, total: int
    ) -> None:  # fmt: skip
        """Fill the hot pool.

        Args:
            hot_share: tokens of the hot pool, in those of the past.
            alpha: share of the past that a step selects, and that is pinned.
            prompt: tokens of the prompt.
            total: tokens at the end.
        """
        self.rule, self._hot_share, self._alpha = rule, hot_share, alpha
        slots = best_count(hot_share, total) + 1
        self.table = SlotTable(1, slots, total)
        self.policy = HotCold(
            1, total, placement=rule.placement, decay_steps=rule.decay_steps
        )  # fmt: skip
        self._was_cold = np.ones(total, dtype=np.bool_)
        held = best_count(hot_share, prompt)
        units = np.arange(prompt - held, prompt)
        self.table.admit(np.zeros(held, dtype=np.int64), units, np.arange(held))
        self._was_cold[prompt - held :] = False
        self._length = prompt

    @property
    def hot(self) -> NDArray[np.bool_]:
        """Which tokens are in the hot pool. [tokens]"""
        found: NDArray[np.bool_] = self.table.slot_of[0] >= 0
        return found

    def step(self, importance: NDArray[np.float32], selected: NDArray[np.int64]) -> Moved:
        """One decode step.

        Args:
            importance: of every token of the past. [length]
            selected: the most important `alpha` of them. [selected]
        """
        length = len(importance)
        born = np.arange(self._length, length)
        self._length = length
        hot_selected = int(self.hot[selected].sum() + np.isin(selected, born).sum())
        capacity = best_count(self._hot_share, length)
        pinned = best_count(self._alpha, length)
        wanted = self._wanted(importance, selected, born, capacity, pinned)
        found = self.table.look_up(wanted[None])
        self.policy.observe(self.table.unit_in, importance[None], length, pinned, capacity)
        _, shed = self.policy.surplus(found.pinned, found.counts)
        out = self.table.unit_in[0, shed]
        self.table.slot_of[0, out] = self.table.unit_in[0, shed] = ABSENT
        slots = self.policy.victims(found.pinned, found.counts)
        out = np.concatenate((out, self.table.unit_in[0, slots]))
        out = out[out >= 0]
        coming = wanted[found.columns]
        passed_through = int((~self.hot[np.setdiff1d(selected, wanted)]).sum())
        turned_away = np.setdiff1d(born, wanted)
        first = int((~self._was_cold[out]).sum()) + len(turned_away)
        self._was_cold[out] = True
        self._was_cold[turned_away] = True
        self.table.admit(found.rows, coming, slots)
        self.policy.note_selected(selected[None])
        return Moved(
            int((~np.isin(coming, born)).sum()), passed_through,
            len(out) + len(turned_away), first, hot_selected, len(selected),
        )  # fmt: skip

    def _wanted(
        self, importance: NDArray[np.float32], selected: NDArray[np.int64],
        born: NDArray[np.int64], capacity: int, pinned: int,
    ) -> NDArray[np.int64]:  # fmt: skip
        """Tokens that must be in the hot pool after the step, none twice."""
        length = len(importance)
        if not self.rule.follows_score:
            inside = selected[selected < length - len(born)]
            return np.concatenate((inside, born))
        if not self.rule.pins:
            return best(importance, capacity)
        pinned = min(pinned, capacity)
        new = np.arange(length - pinned, length)
        if capacity == pinned:
            return new
        return np.concatenate((best(importance[: length - pinned], capacity - pinned), new))


class Clairvoyant:
    """The fewest promotions that any choice of victims could have had: who is selected again last
    goes first (Belady).

    Selected tokens come in as with `RULES["both"]`, and those of the future are known.
    """

    def __init__(
        self, chosen: list[NDArray[np.int64]], *, hot_share: float, prompt: int, total: int
    ) -> None:  # fmt: skip
        """Look ahead.

        Args:
            chosen: what every step selects. [selected] each
        """
        self._hot_share, self._chosen = hot_share, chosen
        self._next = np.full((len(chosen) + 1, total), len(chosen) + 1, dtype=np.int32)
        for number in range(len(chosen) - 1, -1, -1):
            self._next[number] = self._next[number + 1]
            self._next[number, chosen[number]] = number
        held = best_count(hot_share, prompt)
        self.hot = np.zeros(total, dtype=np.bool_)
        self.hot[prompt - held : prompt] = True
        self._length = prompt

    def step(self, number: int, length: int) -> int:
        """One decode step; returns the tokens that were promoted."""
        selected = self._chosen[number]
        needed = np.union1d(selected, np.arange(self._length, length))
        self.hot[self._length : length] = True
        self._length = length
        missing = int((~self.hot[selected]).sum())
        self.hot[selected] = True
        over = int(self.hot.sum()) - max(best_count(self._hot_share, length), len(needed))
        if over > 0:
            held = self.hot.nonzero()[0]
            ahead = self._next[number + 1, held]
            ahead[np.isin(held, needed)] = -1
            self.hot[held[ahead.argpartition(len(held) - over)[-over:]]] = False
        return missing
