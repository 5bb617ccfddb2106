"""A device host in a process of its own, and the same behind a `Relay`.

Run as a program: key file, listening address, disk, one-way delay in seconds.
"""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.methods.hillinfer.near_storage.device_host import DeviceHost
from research.near_storage.relay import Relay


class HostProcess:
    """A started one.

    Attributes:
        address: host:port that it listens on
    """

    def __init__(
        self, key_file: Path, disk: Path, *, listen: str = "127.0.0.1:0", delay_s: float = 0.0,
        before: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Start.

        Args:
            before: a command that runs the rest, such as one that enters a namespace.
        """
        program = [sys.executable, "-m", "research.near_storage.host_process"]
        told = [str(key_file), listen, str(disk), str(delay_s)]
        self.process = subprocess.Popen(
            [*before, *program, *told], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        if not self.address:
            raise OSError("a device host did not start")

    @property
    def port(self) -> int:
        """Of the address."""
        return int(self.address.rpartition(":")[2])

    def end(self) -> None:
        """Kill it, stopped or not."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def main(key_file: str, listen: str, disk: str, delay_s: str) -> None:
    """Serve until killed."""
    key, delay = Path(key_file).read_bytes(), float(delay_s)
    if not delay:
        host = DeviceHost(key, listen=listen, disk=disk)
        print(host.address, flush=True)
    else:
        host = DeviceHost(key, disk=disk)
        name, _, port = listen.rpartition(":")
        behind = Relay(("127.0.0.1", int(host.address.rpartition(":")[2])), (name, int(port)))
        behind.delay_s = delay
        print(behind.address, flush=True)
    host.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
