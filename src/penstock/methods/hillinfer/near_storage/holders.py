"""Holders: which devices still answer for which stripes, where stripes have copies."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from penstock.core.errors import StorageError
from penstock.methods.hillinfer.near_storage.channel import LateError, ScorerError
from penstock.methods.hillinfer.near_storage.device_client import NearDevice
from penstock.methods.hillinfer.near_storage.stripes import Stripes

AGAIN_S = 30.0
"""A device that fails again so soon after it was brought back is left away."""


class Holders:
    """The devices of a store, and those that are given up while the others have copies.

    A device that ended is brought back at once, if that is possible. One that did not answer in
    time is not: that would cost a deadline more. One that missed a write is not asked again, since
    its copy is old; the others come back when a stripe has nobody else.

    Without copies every device is brought back when it is needed, or the step fails.
    """

    def __init__(self, devices: Sequence[NearDevice], stripes: Stripes) -> None:
        self.devices, self.stripes = devices, stripes
        self.away: dict[int, str] = {}
        """Devices that are given up, and why."""
        self._behind: set[int] = set()
        self._brought_back: dict[int, float] = {}
        self._lock = threading.RLock()

    @property
    def has_copies(self) -> bool:
        """Whether a device may be missing."""
        return self.stripes.copies > 1

    def answering(self) -> tuple[int, ...]:
        """The device that answers for the units of each.

        Raises:
            ScorerError: nobody does.
        """
        found = []
        for owner in range(len(self.devices)):
            there = [i for i in self.stripes.holders(owner) if i not in self.away]
            if not there:
                raise ScorerError(
                    "a near-storage device and the one with its copies are lost: "
                    + "; ".join(self.away.values())
                )
            found.append(there[0])
        return tuple(found)

    def there(self, holders: Sequence[int]) -> list[int]:
        """Those of some devices that can be asked."""
        for i in holders:
            if self.has_copies and not self.devices[i].is_alive():
                self.lose(i)
        return [i for i in holders if i not in self.away]

    def look(self) -> tuple[int, ...]:
        """Look at every device, and say which answer. Raises as `answering`."""
        self.there(range(len(self.devices)))
        return self.answering()

    def ensure_alive(self) -> None:
        """Bring back what is needed.

        Raises:
            StorageError: units have no device any more.
        """
        if not self.has_copies:
            for device in self.devices:
                device.ensure_alive()
            return
        with self._lock:
            self.there(range(len(self.devices)))
            for owner in range(len(self.devices)):
                holders = self.stripes.holders(owner)
                for i in holders:
                    if all(each in self.away for each in holders) and i not in self._behind:
                        with contextlib.suppress(StorageError):  # `answering` says so
                            self.devices[i].ensure_alive()
                            del self.away[i]
            self.answering()

    def lose(self, i: int, *, missed: bool = False) -> None:
        """A device failed: bring it back, or go on without it.

        Args:
            missed: it lacks something that was written.
        """
        with self._lock:
            device, now = self.devices[i], time.monotonic()
            why = str(device.failure or "it did not start again").partition("; it is ")[0]
            if missed:
                self._behind.add(i)
            elif i in self.away or device.is_alive():
                return
            elif (
                not isinstance(device.failure, LateError)
                and now - self._brought_back.get(i, -AGAIN_S) >= AGAIN_S
            ):
                self._brought_back[i] = now
                with contextlib.suppress(StorageError):
                    device.ensure_alive()
                    return
            self.away.setdefault(i, why)

    def change(self, i: int, act: Callable[[], object]) -> None:
        """Do at one device what its copies must not miss.

        Raises:
            StorageError: it failed there, and there are no copies, or the device still answers.
        """
        if self.has_copies and i not in self.there([i]):
            self.lose(i, missed=True)
            return
        try:
            act()
        except StorageError:
            if not self.has_copies or self.devices[i].is_alive():
                raise
            self.lose(i, missed=True)

    def describe(self) -> str:
        """For people: copies, and who is lost."""
        if not self.has_copies:
            return ""
        words = f", {self.stripes.copies} copies"
        lost = "".join(f"; lost, its copies answer: {why}" for why in self.away.values())
        return words + lost
