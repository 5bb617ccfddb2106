"""Holders: which devices still answer for which stripes, where stripes have copies."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from penstock.core.errors import StorageError
from penstock.methods.hillinfer.near_storage.channel import LateError, ScorerError
from penstock.methods.hillinfer.near_storage.device_client import NearDevice
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings
from penstock.methods.hillinfer.near_storage.stripes import Stripes

AGAIN_S = 30.0
"""A device that fails again so soon after it was brought back is left away."""


class Holders:
    """The devices of a store, and those that are given up while the others have copies.

    A device that ended is brought back at once, if that is possible. One that did not answer in
    time is not: that would cost a deadline more. Both come back when a stripe has nobody else, but
    for one that missed a write, whose copy is old: a `Refiller` brings it up to date.

    Without copies every device is brought back when it is needed, or the step fails.

    Attributes:
        away: devices that are given up, and why
        returned: how often a device came back, and must be told everything
        on_loss: called when one is given up
        lock: for all of this
        gate: held while something is written, which a device that comes back must not miss
    """

    def __init__(self, devices: Sequence[NearDevice], stripes: Stripes) -> None:
        self.devices, self.stripes = devices, stripes
        self.away: dict[int, str] = {}
        self.returned = 0
        self.on_loss: Callable[[], None] = lambda: None
        self._behind: set[int] = set()
        self._brought_back: dict[int, float] = {}
        self.lock, self.gate = threading.RLock(), threading.Lock()

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
                    + "; ".join(list(self.away.values()))
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
        """Look at every device, and say which answer; units without any get a last chance.

        Raises as `answering`.
        """
        with self.lock:
            self.there(range(len(self.devices)))
            self._bring_back_last(since_s=AGAIN_S)
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
        with self.lock:
            self.there(range(len(self.devices)))
            self._bring_back_last()
            self.answering()

    def _bring_back_last(self, since_s: float = 0.0) -> None:
        """Bring back who alone has units, unless it was since so long ago."""
        for owner in range(len(self.devices)):
            holders = self.stripes.holders(owner)
            for i in holders:
                if any(each not in self.away for each in holders) or i in self._behind:
                    continue
                now = time.monotonic()
                if now - self._brought_back.get(i, -AGAIN_S) >= since_s:
                    self._brought_back[i] = now
                    with contextlib.suppress(StorageError):  # `answering` says so
                        self.devices[i].ensure_alive()
                        self.brought_back(i)

    def brought_back(self, i: int) -> None:
        """A device has everything, and answers from now on."""
        with self.lock:
            self.away.pop(i, None)
            self._behind.discard(i)
            self.returned += 1

    def fall_behind(self, i: int) -> None:
        """A device lacks something, and may not answer before it was brought up to date."""
        with self.lock:
            self._behind.add(i)

    def settings_of_others(self, i: int) -> DeviceSettings:
        """What those serve that a device is brought up to date from."""
        others = [each for j, each in enumerate(self.devices) if j != i and j not in self.away]
        return (others or self.devices)[0].settings

    def lose(self, i: int, *, missed: bool = False) -> None:
        """A device failed: bring it back, or go on without it.

        Args:
            missed: it lacks something that was written.
        """
        with self.lock:
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
            if self.has_copies:
                self.on_loss()

    def change(self, i: int, act: Callable[[], object]) -> bool:
        """Do at one device what its copies must not miss; returns whether it was done.

        Raises:
            StorageError: it failed there, and there are no copies, or the device still answers.
        """
        if self.has_copies and i not in self.there([i]):
            self.lose(i, missed=True)
            return False
        try:
            act()
        except StorageError:
            if not self.has_copies or self.devices[i].is_alive():
                raise
            self.lose(i, missed=True)
            return False
        return True

    def describe(self) -> str:
        """For people: copies, and who is lost."""
        if not self.has_copies:
            return ""
        words = f", {self.stripes.copies} copies"
        lost = "".join(f"; lost, its copies answer: {why}" for why in list(self.away.values()))
        return words + lost
