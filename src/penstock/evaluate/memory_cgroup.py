"""MemoryCgroup: the kernel's own memory limit around this process, where it may be set."""

import contextlib
import os
import tempfile
from pathlib import Path

from penstock.core.errors import ConfigError

ROOT = Path("/sys/fs/cgroup")


class MemoryCgroup:
    """A group below the one that this process is in; version 1 or 2 of the kernel's interface.

    Pages that the process had before `join` stay booked in the former group (always in version 2,
    and in version 1 unless asked otherwise), so join early.
    """

    def __init__(self, parent: Path) -> None:
        """Make the group in `parent`.

        Raises:
            ConfigError: no memory controller there, or it may not be changed.
        """
        self._parent = parent
        self._v2 = not (parent / "memory.limit_in_bytes").exists()
        if self._v2 and not (parent / "memory.stat").exists():
            raise ConfigError("there is no memory controller in this control group")
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"penstock-{os.getpid()}-", dir=parent))
        except OSError as error:
            raise ConfigError(f"cannot make a control group ({error.strerror})") from error
        if self._v2 and not (self.path / "memory.max").exists():
            self.close()
            raise ConfigError("the memory controller is not passed on to new control groups")

    @classmethod
    def below_own(cls, root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> "MemoryCgroup":
        """Make one below the group that this process is in.

        Raises:
            ConfigError: as in the constructor.
        """
        try:
            lines = own.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError("this system has no control groups") from error
        paths = {tuple(line.split(":", 2)[1].split(",")): line.split(":", 2)[2] for line in lines}
        for controllers, path in paths.items():
            if "memory" in controllers:
                return cls(root / "memory" / path.lstrip("/"))
        return cls(root / paths.get(("",), "/").lstrip("/"))

    def join(self) -> None:
        """Put this process into the group.

        Raises:
            ConfigError: not allowed.
        """
        self._write(self.path, "cgroup.procs", os.getpid())

    def limit(self, num_bytes: int) -> None:
        """Let the kernel kill us beyond this.

        Raises:
            ConfigError: not allowed.
        """
        self._write(self.path, "memory.max" if self._v2 else "memory.limit_in_bytes", num_bytes)

    @property
    def usage_bytes(self) -> int:
        """Memory of the group now, page cache included."""
        return self._read("memory.current" if self._v2 else "memory.usage_in_bytes")

    @property
    def peak_bytes(self) -> int:
        """Most memory that the group ever had; 0 where the kernel does not say."""
        return self._read("memory.peak" if self._v2 else "memory.max_usage_in_bytes")

    def page_cache_bytes(self) -> int:
        """Page cache booked to the group."""
        return self._stat("file" if self._v2 else "cache")

    def close(self) -> None:
        """Go back to the former group and remove this one, as far as that is possible."""
        with contextlib.suppress(ConfigError):
            self._write(self._parent, "cgroup.procs", os.getpid())
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _write(self, folder: Path, name: str, value: int) -> None:
        try:
            (folder / name).write_text(str(value), encoding="ascii")
        except OSError as error:
            raise ConfigError(f"cannot set {name} ({error.strerror})") from error

    def _read(self, name: str) -> int:
        try:
            return int((self.path / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    def _stat(self, name: str) -> int:
        try:
            lines = (self.path / "memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            return 0
        return next((int(x.split()[1]) for x in lines if x.split()[0] == name), 0)
