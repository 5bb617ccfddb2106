"""FastSlots: which blocks lie in which slots of fast memory, and what is not yet saved."""

from collections.abc import Iterable

EMPTY = -1


class FastSlots:
    """A table of slots. A block may lie in several (every beam its own copy), all alike.

    A block is `unsaved` while its tokens are in fast memory only.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.limit = num_slots
        """Slots that may be in use at present; what is in use beyond has to leave."""
        self.unsaved: set[int] = set()
        self._free = list(range(num_slots - 1, -1, -1))
        self._block_in = [EMPTY] * num_slots
        self._slots_of: dict[int, list[int]] = {}

    @property
    def num_used(self) -> int:
        """Slots with something in them."""
        return self.num_slots - len(self._free)

    @property
    def num_free(self) -> int:
        """Slots that may be taken; negative while more are in use than the limit allows."""
        return self.limit - self.num_used

    def empty_slots(self) -> list[int]:
        """Slots with nothing in them."""
        return list(self._free)

    def slots_of(self, block: int) -> list[int]:
        """Where a block lies; empty when it is not in fast memory."""
        return self._slots_of.get(block, [])

    def __contains__(self, block: int) -> bool:
        return block in self._slots_of

    def resident(self) -> Iterable[int]:
        """Every block in fast memory, the one that came first first."""
        return self._slots_of.keys()

    def put(self, block: int) -> int:
        """Give a block one (more) free slot."""
        slot = self._free.pop()
        self._block_in[slot] = block
        self._slots_of.setdefault(block, []).append(slot)
        return slot

    def drop_copy(self, block: int) -> None:
        """Free one slot of a block."""
        slots = self._slots_of[block]
        slot = slots.pop()
        self._block_in[slot] = EMPTY
        self._free.append(slot)
        if not slots:
            del self._slots_of[block]

    def drop(self, block: int) -> None:
        """Free every slot of a block; it is forgotten here, saved or not."""
        for slot in self._slots_of.pop(block, []):
            self._block_in[slot] = EMPTY
            self._free.append(slot)
        self.unsaved.discard(block)

    def hand_over(self, old: int, new: int) -> None:
        """Rename one copy of `old`, whose holder got a block of its own, to `new`."""
        slots = self._slots_of[old]
        slot = slots.pop()
        if not slots:
            del self._slots_of[old]
        self._block_in[slot] = new
        self._slots_of.setdefault(new, []).append(slot)
