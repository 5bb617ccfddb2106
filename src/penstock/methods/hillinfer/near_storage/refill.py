"""Refiller: brings devices back that were given up, and up to date from those with the copies."""

import threading
import time
import weakref

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import StorageError
from penstock.methods.hillinfer.near_storage.holders import Holders
from penstock.methods.hillinfer.near_storage.tcp_device import PoolLostError, TcpDevice
from penstock.methods.hillinfer.near_storage.written_units import WrittenUnits
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import KVFile

FIRST_S, LONGEST_S = 2.0, 600.0
"""Seconds until a device that was given up is tried again, twice as many after each failure."""
BATCH_BYTES = 1 << 20
"""Copied at a time; then the link is left to the steps for as long as that took."""


class Refiller:
    """A thread that runs as long as a device is away.

    What the device missed is copied in batches while steps go on; what is written meanwhile is
    marked as missed again. The last batch is copied while nothing is written, and then the device
    may answer. One that has lost its pool begins a new one.

    Attributes:
        refilled: why devices had been given up that are back
    """

    def __init__(
        self, holders: Holders, files: list[list[KVFile]], written: WrittenUnits, stride: int,
        stop: threading.Event,
    ) -> None:  # fmt: skip
        """Wait for losses.

        Args:
            files: of every layer, one a device.
            stride: bytes from one unit to the next.
            stop: ends the thread for good.
        """
        self._holders, self._files, self._written = holders, files, written
        self._stride, self._stop = stride, stop
        self.refilled: list[str] = []
        self._thread: threading.Thread | None = None
        self._due: dict[int, tuple[float, float]] = {}
        """When a device is tried, and how long is waited if that fails."""
        holders.on_loss = self.start

    def start(self) -> None:
        """Run, if it does not; called with the holders' lock."""
        if self._thread is None and not self._stop.is_set():
            job = (weakref.ref(self), self._stop)
            self._thread = threading.Thread(
                target=_run, args=job, name="penstock refill", daemon=True
            )
            self._thread.start()

    def step(self) -> float | None:
        """Try whoever is due; returns the seconds until the next, None when nobody is away."""
        with self._holders.lock:
            away = dict(self._holders.away)
            if not away:
                self._thread = None
                return None
        now = time.monotonic()
        for i, why in away.items():
            due, wait = self._due.setdefault(i, (now + FIRST_S, FIRST_S))
            if now < due:
                continue
            try:
                self._refill(i)
                self.refilled.append(why)
            except StorageError:
                pass
            wait = min(2 * wait, LONGEST_S)  # kept: one that fails again is waited for longer
            self._due[i] = (time.monotonic() + wait, wait)
        return max(0.01, min(self._due[i][0] for i in away) - time.monotonic())

    def _refill(self, i: int) -> None:
        """Bring one device up to date. Raises StorageError where that fails."""
        device, buffer = self._holders.devices[i], AlignedBuffer(self._batch, self._stride)
        try:
            device.ensure_alive()
        except PoolLostError:
            assert isinstance(device, TcpDevice)
            self._holders.fall_behind(i)
            device.begin_anew()
            device.ensure_alive()
        if device.is_empty:
            self._written.miss_all(i)
            device.is_empty = False
        serves = self._holders.settings_of_others(i)
        if serves.rows != device.settings.rows:
            device.renew(serves)
        for layer in range(len(self._files)):
            while (took := self._copy(i, layer, buffer)) is not None:
                if self._stop.wait(took):
                    raise StorageError("the store is closed")
        with self._holders.gate:
            if serves.rows != self._holders.settings_of_others(i).rows:
                raise StorageError("the batch has changed meanwhile")
            for layer in range(len(self._files)):
                while self._copy(i, layer, buffer) is not None:
                    pass
            self._holders.brought_back(i)

    @property
    def _batch(self) -> int:
        return max(1, BATCH_BYTES // self._stride)

    def _copy(self, i: int, layer: int, buffer: AlignedBuffer) -> float | None:
        """Copy some of what a device lacks of a layer; returns the seconds, None if there was
        nothing."""
        begun, stripes, files = time.monotonic(), self._holders.stripes, self._files[layer]
        found = self._written.missed(layer, i, self._batch)
        for n, (copy, units) in enumerate(found):
            try:
                [other] = [j for j in stripes.holders((i - copy) % stripes.devices) if j != i]
                if other in self._holders.away:
                    raise StorageError("the one with its copies is lost, too")
                self._read(files[other], stripes.local(units, 1 - copy), buffer)
                _write(files[i], stripes.local(units, copy), buffer)
            except BaseException:
                for each in found[n:]:
                    self._written.miss(layer, *each)
                raise
        return time.monotonic() - begun if found else None

    def _read(self, file: KVFile, units: NDArray[np.int64], buffer: AlignedBuffer) -> None:
        begins = buffer.address + np.arange(len(units), dtype=np.int64) * self._stride
        lengths = np.full(len(units), self._stride, dtype=np.int64)
        file.submit_reads(units * self._stride, lengths, begins, buffer).wait()


def _write(file: KVFile, units: NDArray[np.int64], buffer: AlignedBuffer) -> None:
    """Write the first slots, a run of neighbours at a time."""
    borders = np.flatnonzero(np.diff(units) != 1) + 1
    for first, end in zip([0, *borders.tolist()], [*borders.tolist(), len(units)], strict=True):
        file.write_at(int(units[first]) * buffer.slot_bytes, buffer.array[first:end].reshape(-1))


def _run(refiller: "weakref.ref[Refiller]", stop: threading.Event) -> None:
    wait: float | None = 0.0
    while not stop.wait(wait):
        there = refiller()
        if there is None:
            return
        if (wait := there.step()) is None:
            return
        del there
