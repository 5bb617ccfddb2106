"""Hot and cold pools: new tokens and those selected often stay, others go (HillInfer, BKP)."""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from penstock.engine.tiers.replacement import ReplacementPolicy

Placement = Literal["naive", "pin", "table", "both"]
"""Which of the paper's two ideas choose who goes: none, pinning, the hit table, or both."""
DECAY_STEPS = 32
"""Steps after which hits count half."""
_MOST_HITS = np.iinfo(np.uint16).max
_FIRST, _NEW, _NEVER = -1, 1 << 20, np.iinfo(np.int32).max


class PoolState(NamedTuple):
    """What the slots hold, and what this step knows of the tokens."""

    unit_in: NDArray[np.int32]
    """Token in each slot, minus one for none. [batch, slots]"""
    scores: NDArray[np.float32] | None
    """Last importance of every token; those behind the end count as most important.
    [batch, tokens]"""
    length: int
    """Tokens of the past."""
    pinned_tokens: int
    """The newest so many are not given up while others can go."""
    capacity: int
    """Slots that may be occupied."""


class HotCold(ReplacementPolicy):
    """Slots of single tokens: the hot pool, whose victims are the tokens demoted to the cold one.

    Who goes first: a token with fewer hits (steps that selected it, halved now and then), among
    equals the lower last score, then the older. The newest tokens go last, and those that this step
    needs never. Empty slots come before all of them as long as `capacity` allows.

    Source: HillInfer, section 4.2 (bidirectional cache pools: temporal-aware pinning,
    frequency-aware tracking, promotion and demotion; a hit table of 2 bytes a token).

    Differences: the paper says "decaying" and not how; here hits are halved every `decay_steps`
    steps. It does not say who goes among tokens with equal hits.
    """

    def __init__(
        self, batch: int, max_tokens: int, *, placement: Placement = "both",
        decay_steps: int = DECAY_STEPS,
    ) -> None:  # fmt: skip
        """Begin with no hits.

        Args:
            max_tokens: positions that a row can have.
            placement: switches the two ideas off, to compare with; without the table the lowest
                score goes first.
            decay_steps: 0 for hits that never fade.
        """
        self.placement: Placement = placement
        self.decay_steps = decay_steps
        self.hits = np.zeros((batch, max_tokens), dtype=np.uint16)
        """Steps that selected each token, faded. [batch, max_tokens]"""
        self.steps = 0
        """Steps noted since the start."""
        self.state: PoolState | None = None

    @staticmethod
    def num_bytes(batch: int, max_tokens: int) -> int:
        """Bytes of the hit table, for the ledger."""
        return 2 * batch * max_tokens

    @staticmethod
    def scratch_bytes(batch: int, num_slots: int) -> int:
        """Temporaries of one choice, for the ledger."""
        return 6 * 8 * batch * num_slots

    def observe(
        self, unit_in: NDArray[np.int32], scores: NDArray[np.float32] | None, length: int,
        pinned_tokens: int, capacity: int,
    ) -> None:  # fmt: skip
        """What holds before `victims` or `surplus` is asked; arrays are read then, not before.

        Args:
            unit_in: token in each slot, minus one for none. [batch, slots]
            scores: last importance of every token, None where there is none. [batch, tokens]
            length: tokens of the past.
            pinned_tokens: the newest so many are pinned.
            capacity: slots that may be occupied, 1 to all of them. What a step needs is admitted
                even where it is more.
        """
        self.state = PoolState(unit_in, scores, length, pinned_tokens, capacity)

    def note_selected(
        self, unit_ids: NDArray[np.int64], valid: NDArray[np.bool_] | None = None
    ) -> None:
        """Count one step's selection.

        Args:
            unit_ids: tokens, none twice in a row. [batch, wanted]
            valid: False for places that hold none. [batch, wanted]
        """
        rows = np.arange(len(unit_ids))[:, None]
        hits = self.hits[rows, unit_ids]
        more = (hits < _MOST_HITS) if valid is None else valid & (hits < _MOST_HITS)
        if valid is None:
            self.hits[rows, unit_ids] = hits + more
        else:
            wide = np.broadcast_to(rows, unit_ids.shape)
            self.hits[wide[more], unit_ids[more]] += 1
        self.steps += 1
        if self.decay_steps and self.steps % self.decay_steps == 0:
            self.hits >>= 1

    @override
    def victims(self, pinned: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """An occupied slot's token is demoted."""
        state = self._now()
        ranks = self._ranks(pinned)
        empty = state.unit_in < 0
        if empty.any():
            occupied = empty.shape[1] - empty.sum(axis=1)
            room = np.maximum(self._allowed(pinned, counts) - occupied, 0)
            usable = empty.cumsum(axis=1) <= room[:, None]
            ranks[empty] = np.where(usable, _FIRST, _NEVER)[empty]
        return self._lowest(ranks, counts)

    def surplus(
        self, pinned: NDArray[np.bool_], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # fmt: skip
        """Slots to empty before `victims` is asked, where capacity has fallen below what is held.

        Args:
            pinned: slots that this step needs. [batch, slots]
            counts: slots that `victims` will be asked for. [batch]

        Returns:
            Rows and slots. [surplus] each
        """
        held = self._now().unit_in >= 0
        more = np.maximum(held.sum(axis=1) - self._allowed(pinned, counts), 0)
        rows = np.repeat(np.arange(len(more)), more)
        if not len(rows):
            return rows, rows
        ranks = self._ranks(pinned)
        ranks[~held] = _NEVER
        return rows, self._lowest(ranks, more)

    def _now(self) -> PoolState:
        assert self.state is not None, "observe() comes first"
        return self.state

    def _allowed(self, pinned: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of each row that may be occupied at the end. [batch]"""
        allowed: NDArray[np.int64] = np.maximum(self._now().capacity, pinned.sum(axis=1) + counts)
        return allowed

    def _ranks(self, pinned: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Hits, and who goes last or never; meaningless for empty slots. [batch, slots]"""
        state = self._now()
        held = state.unit_in
        if self.placement in ("table", "both"):
            ranks = _gathered(self.hits, held).astype(np.int32)
        else:
            ranks = np.zeros(held.shape, dtype=np.int32)
        if self.placement in ("pin", "both"):
            ranks += (held >= state.length - state.pinned_tokens) * np.int32(_NEW)
        np.putmask(ranks, pinned, _NEVER)
        return ranks

    def _lowest(self, ranks: NDArray[np.int32], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The `counts[b]` slots of row b that go first, row after row. [sum(counts)]"""
        out = [np.zeros(0, dtype=np.int64)]
        for row, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            assert count <= ranks.shape[1], "more units to admit than slots"
            last = np.partition(ranks[row], count - 1)[count - 1]
            assert last < _NEVER, "fewer unpinned slots than units to admit"
            chosen = (ranks[row] < last).nonzero()[0]
            equal = (ranks[row] == last).nonzero()[0]
            wanted = count - len(chosen)
            if wanted < len(equal) and last != _FIRST:
                equal = equal[self._keys(row, equal).argpartition(wanted - 1)]
            out += [chosen, equal[:wanted]]
        return np.concatenate(out)

    def _keys(self, row: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """In the order of the last score, then of age. [slots]"""
        state = self._now()
        tokens = state.unit_in[row, slots]
        keys: NDArray[np.int64] = tokens.astype(np.int64)
        if state.scores is not None:
            bits = state.scores[row].take(tokens, mode="clip").view(np.int32)
            bits ^= (bits >> 31) & np.int32(_NEVER)  # in the order of the floats
            bits[tokens >= state.scores.shape[1]] = _NEVER
            keys |= bits.astype(np.int64) << 32
        return keys

    def forget_from(self, token: int) -> None:
        """The tokens from this one on are gone."""
        self.hits[:, token:] = 0

    def clear(self) -> None:
        """Forget everything."""
        self.hits.fill(0)
        self.steps, self.state = 0, None

    @override
    def copy_rows(self, rows: NDArray[np.int64]) -> "HotCold":
        copy = HotCold(0, 0, placement=self.placement, decay_steps=self.decay_steps)
        copy.hits, copy.steps = self.hits[rows].copy(), self.steps
        return copy


def _gathered(table: NDArray[Any], held: NDArray[np.int32]) -> NDArray[Any]:
    """`table[b, held[b, slot]]`, anything where a slot is empty or out of it. [batch, slots]"""
    if len(table) == 1:
        found: NDArray[Any] = table[0].take(held, mode="clip")
        return found
    return np.take_along_axis(table, held.clip(0, table.shape[1] - 1), axis=1)
