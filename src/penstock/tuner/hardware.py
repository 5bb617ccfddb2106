"""Hardware: machines that need not be present, each constant with its source."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from penstock.core.errors import ConfigError

_TABLE = Path(__file__).parent / "hardware.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A machine as a cost model; `hardware.toml` explains the fields."""

    name: str
    title: str
    memory_bytes: int
    memory_bandwidth: float
    """Peak, bytes per second."""
    flops: float
    """Dense 16-bit floating point, peak per second."""
    link_bandwidth: float
    """From host memory to the GPU's, bytes per second; 0: the memory is unified."""
    launch_s: float
    """Host time of one operation of an eager layer, seconds."""
    reuse_unit_s: float
    """Host time of one selected unit that a reuse buffer looks up, seconds."""
    source: Mapping[str, str]
    """Where each constant comes from, by its name."""


def known_hardware() -> Mapping[str, Hardware]:
    """The machines of `hardware.toml` by name."""
    content = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return MappingProxyType({name: Hardware(name=name, **entry) for name, entry in content.items()})


def hardware(name: str) -> Hardware:
    """One machine.

    Raises:
        ConfigError: no machine of that name.
    """
    known = known_hardware()
    if name not in known:
        raise ConfigError(f"hardware {name} is not known; choose from {', '.join(known)}")
    return known[name]
