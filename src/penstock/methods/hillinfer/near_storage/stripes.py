"""Stripes: units dealt out over several devices in turn."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STRIPE_UNITS = 64
"""Units that stay together on a device: long enough for a read, short enough to share the work."""


@dataclass(frozen=True, slots=True)
class Stripes:
    """Unit u is with device (u // size) % devices, among its units in their order."""

    devices: int = 1
    size: int = STRIPE_UNITS

    def owner(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """The device of each unit."""
        owners: NDArray[np.int64] = units // self.size % self.devices
        return owners

    def local(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each unit within its device."""
        round_, rest = np.divmod(units, self.size * self.devices)
        numbers: NDArray[np.int64] = round_ * self.size + rest % self.size
        return numbers

    def local_units(self, units: NDArray[np.int64], device: int) -> NDArray[np.int64]:
        """What `device` calls each unit; minus one for what it, or every device, lacks."""
        if self.devices == 1:
            return units
        mine = (units >= 0) & (self.owner(units) == device)
        local: NDArray[np.int64] = np.where(mine, self.local(units), -1)
        return local

    def num_local(self, units: int) -> int:
        """The most units that one device has when there are `units`."""
        return -(-units // (self.size * self.devices)) * self.size
