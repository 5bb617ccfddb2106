"""KVStore: one private, nameless file per layer, on a disk, in memory, or on a simulated device."""

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, TypeAlias

from penstock.core.closing import DeferredInterrupts, close_all
from penstock.core.errors import ConfigError
from penstock.devices.presets import PRESETS
from penstock.devices.profile import DeviceProfile
from penstock.devices.throttle import Throttle
from penstock.storage.block_cipher import is_fast
from penstock.storage.file import KVFile
from penstock.storage.memory_file import MemoryFile
from penstock.storage.open_files import FileSet, open_files
from penstock.storage.sealed_file import SealedFile
from penstock.storage.throttled_file import ThrottledFile
from penstock.storage.unit_region import UnitRegion

Sealing: TypeAlias = bool | Literal["auto"]
"""Whether what lies on a disk is encrypted; "auto": where AES is fast."""


class KVStore:
    """The units of every layer. Nothing of it outlives the process, however that ends.

    A store that is dropped closes itself; keep it as long as its regions are in use.

    Attributes:
        is_direct: reads come from a device, never from the page cache or plain memory
        simulated: name of the device that it is slowed down to, or None
        padded_bytes: a unit's place on disk and in buffers
        throttle: the simulated device, or None; tells how often the real storage was too slow
    """

    def __init__(
        self, files: Sequence[KVFile], unit_bytes: int, description: str,
        close: Callable[[], None], sector_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """Take over `files`, one a layer; `create` is the usual way to make a store.

        Args:
            sector_bytes: as for `create`.
            close: called once, when the store closes or is dropped; closes the files.
        """
        self.unit_bytes = unit_bytes
        self.is_direct = all(file.is_direct for file in files)
        self.simulated = files[0].simulated
        self.throttle = files[0].throttle if isinstance(files[0], ThrottledFile) else None
        self._regions = [UnitRegion(file, unit_bytes, sector_bytes) for file in files]
        self.padded_bytes = self._regions[0].padded_bytes
        self._description = description
        self._close = weakref.finalize(self, close)

    @classmethod
    def create(
        cls, location: str = "auto", *, num_layers: int, unit_bytes: int, sealed: Sealing = "auto",
        sector_bytes: int | None = None,
    ) -> "KVStore":  # fmt: skip
        """Open a store.

        Args:
            location: a directory that is there; "auto", the system's directory for temporary
                files; "memory"; a simulated device in memory ("nvme", "ufs", "emmc") or on a
                disk ("emmc:/path"). A directory of such a name is written "./nvme".
            unit_bytes: payload of one unit.
            sealed: encrypt what lies on a disk, with a key that is never written; "auto": where
                AES is fast.
            sector_bytes: what units are padded to, whole sectors of the files; None: one.

        Raises:
            ConfigError: the location makes no sense.
            DocumentKeyError: sealed, and `cryptography` is not installed.
            StorageError: the directory cannot be used.
        """
        if num_layers < 1 or unit_bytes < 1:
            raise ConfigError(f"a store needs layers and bytes, not {num_layers} x {unit_bytes}")
        profile, place = parse_location(str(location))
        with DeferredInterrupts():  # nothing is open that nothing would close
            in_memory = place == "memory"
            opened = _in_memory(num_layers) if in_memory else open_files(place, num_layers)
            try:
                files, description = opened.files, opened.description
                if not in_memory:
                    why_open = _why_open(sealed)
                    files = files if why_open else [SealedFile(file) for file in files]
                    description += f", {why_open or 'encrypted'}"
                if profile is not None:
                    throttle = Throttle(profile)
                    files = [ThrottledFile(file, throttle) for file in files]
                    rate = f"{profile.bandwidth / 1e6:.0f} MB/s"
                    description = f"simulated {profile.title} ({rate}) over {description}"
                return cls(files, unit_bytes, description, opened.close, sector_bytes)
            except BaseException:
                opened.close()
                raise

    def region(self, layer: int) -> UnitRegion:
        """The units of one layer."""
        return self._regions[layer]

    def describe(self) -> str:
        """Where and how the bytes are kept, for people; says so when it is simulated."""
        return self._description

    def close(self) -> None:
        """End the reads under way and give everything back; a second call does nothing."""
        close_all(self._close)

    def __enter__(self) -> "KVStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _why_open(sealed: Sealing) -> str:
    """What to say of a store on a disk that is not encrypted; nothing of one that is."""
    if sealed == "auto":
        return "" if is_fast() else "not encrypted (AES is slow, or not installed)"
    return "" if sealed else "not encrypted"


def _in_memory(count: int) -> FileSet:
    files: list[KVFile] = [MemoryFile() for _ in range(count)]
    return FileSet(files, "host memory", lambda: close_all(*(file.close for file in files)))


def parse_location(location: str) -> tuple[DeviceProfile | None, str]:
    """Split a location into the device to simulate and the place: "memory", "auto" or a path."""
    if location in PRESETS:
        return PRESETS[location], "memory"
    name, colon, rest = location.partition(":")
    if colon and name in PRESETS:
        if not rest:
            raise ConfigError(f"{location!r} names no directory; write {name}:/path, or {name}")
        return PRESETS[name], rest
    if not location.strip():
        raise ConfigError("the store's location is empty; give a directory, auto or memory")
    return None, location
