"""Addresses of devices on other hosts: tcp://host:port."""

from penstock.core.errors import ConfigError

SCHEME = "tcp://"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of host:port or [host]:port.

    Raises:
        ConfigError: it is neither.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address; give HOST:PORT")
    return host.strip("[]"), int(port)


def split_devices(devices: str) -> list[str]:
    """The host:port of each of "tcp://host:port,tcp://...".

    Raises:
        ConfigError: one is none.
    """
    found = [each.strip() for each in devices.split(",")]
    for each in found:
        if not each.startswith(SCHEME):
            raise ConfigError(f"devices={each!r} must be a number or tcp://HOST:PORT,...")
        split_address(each.removeprefix(SCHEME))
    return [each.removeprefix(SCHEME) for each in found]
