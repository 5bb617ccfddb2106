"""SlowTier: where blocks lie that are not in fast memory; moves are done in their order."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class Move(ABC):
    """Blocks on their way between the tiers."""

    @abstractmethod
    def wait(self) -> None:
        """Let nothing that is computed from now on come before the move's end.

        Raises:
            FetchError: a read failed.
            StorageError: a write failed.
        """


class SlowTier(ABC):
    """Every block that was saved, by its number.

    Moves take place one after the other, in the order in which they were asked for, behind the
    caller: a load behind a save gets what was saved, and a slot whose block is
    being saved may be loaded into at once.

    Attributes:
        description: for people; says so when a device is simulated.
        simulated: name of the simulated device, or None.
        slots: fast memory. uint8 [num_slots, slot_bytes], the first `block_bytes` of a slot in use
    """

    description: str
    simulated: str | None = None
    slots: Tensor

    @abstractmethod
    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> Move:
        """Start bringing `blocks[i]` into slot `slots[i]`.

        What the caller has computed so far may still read the slots' former content.
        """

    @abstractmethod
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> Move:
        """Start writing slot `slots[i]` as `blocks[i]`, as computed so far."""

    def give_back(self, slots: Sequence[int]) -> Move | None:
        """Give the memory of empty slots back to the system; they may be used again behind it.

        Returns:
            None where that cannot be done.
        """
        del slots
        return None

    def reserve(self, num_blocks: int) -> None:
        """Have blocks below this number, saved or not, whatever is in them (for benchmarks)."""
        raise NotImplementedError(f"{type(self).__name__} loads only what was saved")

    def check(self) -> None:
        """Raise the error of a move that failed and that no caller waited for.

        Raises:
            StorageError: a read or a write failed.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """End what is under way and give everything back; a second call does nothing."""
