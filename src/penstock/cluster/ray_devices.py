"""Near-storage devices on a Ray cluster: an actor per disk, which Ray places, names and restarts.

Scores never pass through Ray, whose calls take milliseconds: a cache talks to each device over TCP,
as to those of `penstock device serve`.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from penstock.cluster.ray_session import connect, first_line
from penstock.core.errors import ConfigError, StorageError
from penstock.methods.hillinfer.near_storage.address import SCHEME
from penstock.methods.hillinfer.near_storage.device_host import DeviceHost
from penstock.storage.documents.key_sources import read_key

RESOURCE = "penstock_disk"
"""What a host offers once for each of its disks: ray start --resources '{"penstock_disk": 1}'."""
PREFIX = "ray:"
"""Of `--devices ray:4`."""
_NAME = "penstock-device-"
_START_S = 120.0
_ANSWER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class DeviceSetup:
    """What every device of a cluster is started with."""

    key_file: str
    """A path on every host; the key itself is never sent."""
    disks: tuple[str, ...] = ("auto",)
    """Folders of a host; each takes one device. "auto" takes any number."""
    memory_bytes: int | None = None
    first_port: int = 0
    """Device i listens on this port + i, also after Ray has restarted it; 0: on any."""


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """A device as Ray sees it."""

    number: int
    state: Literal["up", "waits", "lost"]
    """"waits": for a host with the resource, or to be restarted."""
    address: str = ""
    disk: str = ""
    """host:folder"""
    memory_bytes: int = 0
    """Promised to pools now."""
    why: str = ""


class DeviceActor:
    """A `DeviceHost` in an actor's process; it holds its disk until it ends."""

    def __init__(self, setup: DeviceSetup, number: int, host: str | None = None) -> None:
        """Listen.

        Args:
            host: the address to listen on; None: the host's, as Ray knows it.

        Raises:
            ConfigError: the key or the address makes no sense.
            StorageError: every disk has its device, or the port is taken.
        """
        if host is None:
            from ray.util import get_node_ip_address

            host = str(get_node_ip_address())
        self._name = host
        self._disk, self._held = _free_disk(setup.disks)
        port = setup.first_port + number if setup.first_port else 0
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        key = read_key(f"file:{setup.key_file}", environment={})
        self._host = DeviceHost(
            key, listen=place, disk=self._disk, memory_bytes=setup.memory_bytes
        ).start()

    def said(self) -> tuple[str, str, int]:
        """Address, host and disk, and bytes that pools hold."""
        used = self._host.ledger.used_bytes
        return self._host.address, f"{self._name}:{self._disk}", used

    def close(self) -> None:
        """Drop the pools and let the disk go."""
        self._host.close()
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _free_disk(disks: Sequence[str]) -> tuple[str, int | None]:
    """The first folder that no other device of this host holds, and what holds it.

    Raises:
        StorageError: there is none.
    """
    import fcntl

    for disk in disks:
        if disk == "auto":
            return disk, None
        try:
            held = os.open(disk, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # another host's
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            continue
        return disk, held
    raise StorageError(
        f"no disk of {', '.join(disks)} is free for a device: give each host {RESOURCE} once for "
        "each disk"
    )


def up(count: int, setup: DeviceSetup, *, address: str | None) -> list[str]:
    """Start the first `count` devices that are not there yet; they stay until `down`.

    Args:
        address: as for `connect`.

    Returns:
        Their addresses, host:port.

    Raises:
        ConfigError: there is no Ray or no such cluster, or it has too few disks.
        StorageError: a device does not start; those that this call has begun are ended.
    """
    ray = connect(address)
    there = _there(ray)
    begun = _begin(ray, [each for each in range(count) if each not in there], setup, stays=True)
    actors = there | begun
    try:
        return _addresses(ray, [actors[number] for number in range(count)])
    except StorageError:
        _end(ray, begun)
        raise


@contextmanager
def borrowed(devices: str, key_file: str) -> Iterator[str]:
    """The devices "tcp://host:port,..." of "ray:4": those that stay, else new ones.

    New ones have no name, take any folder of their hosts, and end behind the block.

    Raises:
        As for `up`.
        ConfigError: it is no number, or fewer devices stay.
    """
    number = devices.removeprefix(PREFIX)
    if not number.isdigit() or not int(number):
        raise ConfigError(f"--devices {devices!r}: give {PREFIX}N, or tcp://HOST:PORT,...")
    count, ray = int(number), connect(None)
    stay = _there(ray)
    if 0 < len(stay) < count:
        raise ConfigError(
            f"{len(stay)} devices are up on the Ray cluster; give {PREFIX}{len(stay)}"
        )
    setup = DeviceSetup(key_file=os.path.abspath(key_file))
    begun = {} if stay else _begin(ray, range(count), setup, stays=False)
    try:
        actors = [each for _, each in sorted((stay or begun).items())][:count]
        yield ",".join(f"{SCHEME}{each}" for each in _addresses(ray, actors))
    finally:
        for each in begun.values():
            ray.kill(each)
        ray.shutdown()


def _end(ray: Any, actors: Mapping[int, Any]) -> None:
    """End devices, and wait until their names are free.

    Raises:
        StorageError: one does not end.
    """
    for each in actors.values():
        ray.kill(each)
    end_s = time.monotonic() + _START_S
    while not actors.keys().isdisjoint(_there(ray)):
        if time.monotonic() > end_s:
            raise StorageError("Ray does not end the devices; look at ray status")
        time.sleep(0.1)


def _begin(ray: Any, numbers: Sequence[int], setup: DeviceSetup, *, stays: bool) -> dict[int, Any]:
    disks = ray.cluster_resources().get(RESOURCE, 0)
    if numbers and disks <= max(numbers):
        raise ConfigError(
            f"the Ray cluster has {disks:g} {RESOURCE}, and {max(numbers) + 1} devices want one "
            f"each: start hosts with ray start --resources '{{\"{RESOURCE}\": 1}}'"
        )
    options: dict[str, Any] = {
        "max_restarts": -1, "num_cpus": 0, "resources": {RESOURCE: 1},
        "scheduling_strategy": "SPREAD",
    }  # fmt: skip
    begun = {}
    for number in numbers:
        if stays:
            options |= {"name": f"{_NAME}{number}", "lifetime": "detached"}
        begun[number] = ray.remote(DeviceActor).options(**options).remote(setup, number)
    return begun


def _addresses(ray: Any, actors: list[Any]) -> list[str]:
    """Where they listen, when all do.

    Raises:
        StorageError: one does not.
    """
    try:
        said = ray.get([each.said.remote() for each in actors], timeout=_START_S)
    except ray.exceptions.RayError as error:
        raise StorageError(f"a device does not start: {_cause(error)}") from error
    return [each[0] for each in said]


def states(*, address: str | None) -> list[DeviceState]:
    """All devices that stay, by number.

    Raises:
        ConfigError: there is no Ray, or no such cluster.
    """
    ray = connect(address)
    asked = {number: each.said.remote() for number, each in _there(ray).items()}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S)
    return [_state(ray, number, call) for number, call in sorted(asked.items())]


def _state(ray: Any, number: int, call: Any) -> DeviceState:
    try:
        place, disk, used = ray.get(call, timeout=0)
    except ray.exceptions.GetTimeoutError:
        why = f"no answer within {_ANSWER_S:g} s"
        return DeviceState(number=number, state="waits", why=why)
    except ray.exceptions.ActorUnavailableError as error:
        return DeviceState(number=number, state="waits", why=first_line(error))
    except ray.exceptions.RayError as error:
        return DeviceState(number=number, state="lost", why=first_line(error))
    return DeviceState(number=number, state="up", address=place, disk=disk, memory_bytes=used)


def down(*, address: str | None) -> int:
    """End all devices that stay; their pools are gone.

    Returns:
        How many there were.

    Raises:
        ConfigError: there is no Ray, or no such cluster.
        StorageError: one does not end.
    """
    ray = connect(address)
    actors = _there(ray)
    _end(ray, actors)
    return len(actors)


def _cause(error: BaseException) -> str:
    """The last line: of an error in an actor's process, that one's own."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else f"{type(error).__name__} after {_START_S:g} s"


def _there(ray: Any) -> dict[int, Any]:
    """The devices that stay, by number."""
    found = {}
    for name in ray.util.list_named_actors():
        if name.startswith(_NAME):
            with suppress(ValueError):  # it has ended just now
                found[int(name.removeprefix(_NAME))] = ray.get_actor(name)
    return found
