"""NearStore: a KVStore whose files near-storage devices own, and their scorer."""

import threading
from functools import partial

from typing_extensions import override

from penstock.core.closing import close_all
from penstock.devices.presets import PRESETS
from penstock.methods.hillinfer.near_storage.address import split_devices
from penstock.methods.hillinfer.near_storage.device_client import NearDevice
from penstock.methods.hillinfer.near_storage.device_memory import describe_memory
from penstock.methods.hillinfer.near_storage.holders import Holders
from penstock.methods.hillinfer.near_storage.refill import Refiller
from penstock.methods.hillinfer.near_storage.remote_file import RemoteFile
from penstock.methods.hillinfer.near_storage.scorer import RemoteScorer
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings, ScoreSettings
from penstock.methods.hillinfer.near_storage.striped_file import StripedFile
from penstock.methods.hillinfer.near_storage.stripes import Stripes
from penstock.methods.hillinfer.near_storage.tcp_device import TcpDevice
from penstock.methods.hillinfer.near_storage.tls import Trust
from penstock.methods.hillinfer.near_storage.written_units import WrittenUnits
from penstock.storage.file import KVFile
from penstock.storage.store import KVStore, parse_location


class NearStore(KVStore):
    """The units of every layer with one or several devices; `scorer` scores what is cold there."""

    def __init__(self, devices: list[NearDevice], copies: int = 1) -> None:
        """Take over started devices of the same settings.

        Args:
            copies: devices that have each unit, 1 or 2; 2 wants two devices at least.
        """
        stripes, settings = Stripes(len(devices), copies=copies), devices[0].settings
        self.holders, stop = Holders(devices, stripes), threading.Event()
        units = settings.units * len(devices) // copies if copies > 1 else 0
        written = WrittenUnits(settings.layers, units, stripes)
        files: list[KVFile] = []
        remote: list[list[KVFile]] = []
        for layer in range(settings.layers):
            each = [RemoteFile(device, layer, has_copies=copies > 1) for device in devices]
            remote.append(list(each))
            stride = each[0].unit_stride
            if len(devices) == 1:
                files.append(each[0])
            else:
                note = partial(written.note, layer) if copies > 1 else _unwatched
                files.append(StripedFile(remote[-1], self.holders, stride, note))
        self.refiller = (
            Refiller(self.holders, remote, written, stride, stop) if copies > 1 else None
        )
        """Brings lost devices back, where there are copies."""
        how = (
            "a near-storage device" if len(devices) == 1 else f"{len(devices)} near-storage devices"
        )
        where = devices[0].description
        if settings.simulate:
            profile = PRESETS[settings.simulate]
            megabytes = f"{profile.bandwidth / 1e6:.0f} MB/s"
            where = f"simulated {profile.title} ({megabytes}) over {where}"
        super().__init__(
            files, settings.unit_bytes, f"{where}, not encrypted, behind {how}",
            lambda: _close_all(devices, stop),
        )  # fmt: skip
        self.devices = devices
        self.scorer = RemoteScorer(self.holders)

    @classmethod
    def open(
        cls, location: str, settings: ScoreSettings, *, layers: int, unit_bytes: int,
        devices: int | str = 1, copies: int = 1, key: bytes = b"", timeout_s: float,
        device_memory: int = 0, trust: Trust | None = None,
    ) -> "NearStore":  # fmt: skip
        """Start the devices.

        Args:
            location: as for `KVStore.create`; a simulated device is simulated by each process.
            devices: how many processes on this machine; or tcp://host:port,... of running hosts,
                whose disks are used instead of `location`.
            copies: devices that have each unit, 1 or 2.
            key: that the hosts have as well.
            timeout_s: most seconds to wait for an answer.
            device_memory: most bytes that a device may hold; 0: no bound.
            trust: whose certificates the hosts must show; None: nothing is encrypted on the way.

        Raises:
            ConfigError: the location makes no sense, or this system has no Unix sockets.
            StorageError: the directory cannot be used, or a process does not start.
        """
        profile, place = parse_location(location)
        simulate = "" if profile is None else profile.name
        count = len(split_devices(devices)) if isinstance(devices, str) else devices
        whole = DeviceSettings.of(
            settings, layers=layers, unit_bytes=unit_bytes, simulate=simulate,
            stripes=Stripes(count, copies=copies), device_memory=device_memory,
        )  # fmt: skip
        started: list[NearDevice] = []
        try:
            if isinstance(devices, str):
                started.extend(
                    TcpDevice(whole, address, key, timeout_s=timeout_s, trust=trust)
                    for address in split_devices(devices)
                )
                return cls(started, copies)
            started.extend(NearDevice(whole, place, timeout_s=timeout_s) for _ in range(devices))
            return cls(started, copies)
        except BaseException:
            _close_all(started, threading.Event())
            raise

    def serve(self, rows: int) -> None:
        """Serve a batch of so many rows; starts the devices anew for another one than before: the
        files stay, and nothing is mapped."""
        with self.holders.gate:
            others = [i for i, device in enumerate(self.devices) if device.settings.rows != rows]
            try:
                for i in others:
                    settings = self.devices[i].settings.for_rows(rows, self.holders.stripes)
                    self.holders.change(i, partial(self.devices[i].renew, settings))
                self.holders.answering()
            finally:
                if others:
                    self.scorer.forget()

    @override
    def describe(self) -> str:
        held = ""
        if there := [each for each in self.devices if each.memory_bytes]:
            held = " with " + describe_memory(
                max(device.memory_bytes for device in there),
                min(device.coded_layers for device in there), there[0].settings.layers,
            )  # fmt: skip
            held += " each" if len(self.devices) > 1 else ""
        back = [] if self.refiller is None else self.refiller.refilled
        filled = f"; lost, and filled again ({len(back)}): {back[-1]}" if back else ""
        return super().describe() + held + self.holders.describe() + filled


def _close_all(devices: list[NearDevice], stop: threading.Event) -> None:
    close_all(stop.set, *(device.close for device in devices))


def _unwatched(first: int, count: int, missed: list[int]) -> None:
    """Nobody asks later what was written."""
