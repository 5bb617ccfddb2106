"""Stripes: units dealt out over several devices in turn, with a copy on the next one if asked."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STRIPE_UNITS = 64
"""Units that stay together on a device: long enough for a read, short enough to share the work."""


@dataclass(frozen=True, slots=True)
class Stripes:
    """Unit u belongs to device (u // size) % devices; with two copies the next one has it as well.

    A device numbers the units that it has, belonging to it or not, in their order.
    """

    devices: int = 1
    size: int = STRIPE_UNITS
    copies: int = 1

    def owner(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """The device that each unit belongs to."""
        owners: NDArray[np.int64] = units // self.size % self.devices
        return owners

    def holders(self, owner: int) -> list[int]:
        """The devices that have the units of one, itself first."""
        return [(owner + copy) % self.devices for copy in range(self.copies)]

    def local(self, units: NDArray[np.int64], copy: int = 0) -> NDArray[np.int64]:
        """The number of each unit within the device that has this copy of it."""
        round_, rest = np.divmod(units, self.size * self.devices)
        place: NDArray[np.int64] | int = 0
        if self.copies == 2:
            owner = rest // self.size
            place = (owner > 0 if copy == 0 else owner == self.devices - 1).astype(np.int64)
        numbers: NDArray[np.int64] = (round_ * self.copies + place) * self.size + rest % self.size
        return numbers

    def local_units(
        self, units: NDArray[np.int64], device: int, answering: Sequence[int] | None = None
    ) -> NDArray[np.int64]:
        """What `device` calls each unit; minus one for what it does not answer for.

        Args:
            answering: the device that answers for the units of each; None: itself.
        """
        if self.devices == 1:
            return units
        owner = self.owner(units)
        mine = (units >= 0) & (np.asarray(answering or range(self.devices))[owner] == device)
        local = np.where(owner == device, self.local(units), self.local(units, 1))
        found: NDArray[np.int64] = np.where(mine, local, -1)
        return found

    def num_local(self, units: int) -> int:
        """The most units that one device has when there are `units`."""
        return -(-units // (self.size * self.devices)) * self.size * self.copies
