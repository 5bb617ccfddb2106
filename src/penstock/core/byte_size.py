"""Byte sizes as people write them: "512MiB", "1.5GB", "1/13", "5%", "auto"."""

import re
from fractions import Fraction
from numbers import Integral

from penstock.core.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_LEAST_BARE = 1 << 16
"""A smaller number without a unit is probably one of MiB or GiB."""
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*$")
_FRACTION = re.compile(r"^\s*([0-9]+)\s*/\s*([0-9]+)\s*$")
_PERCENT = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*$")


def parse_bytes(text: str) -> int:
    """Turn "512MiB" into bytes; a bare number is bytes, KB is 1000 and K or KiB is 1024.

    Raises:
        ConfigError: the text is not a size, or a bare number so small that a unit was forgotten.
    """
    match = _SIZE.match(text)
    if match is None or match.group(2).lower() not in _UNITS:
        raise ConfigError(f"cannot read {text!r} as a size; write for example 512MiB or 2GB")
    number = float(match.group(1))
    if not match.group(2) and 0 < number < _LEAST_BARE:
        unit = "GiB" if number <= 64 else "MiB"
        share = f", 1/2 or {100 * number:g}% for a share of the whole" if number < 1 else ""
        raise ConfigError(
            f"{text.strip()} without a unit would be {text.strip()} bytes; write "
            f"{text.strip()}{unit}{share}"
        )
    return int(number * _UNITS[match.group(2).lower()])


def parse_memory(memory: int | float | str, full_bytes: int, free_bytes: int) -> int:
    """Turn a `memory=` setting into bytes.

    Args:
        memory: bytes, "512MiB", a fraction of the full cache ("1/13", "5%", a float up to 1), or
            "auto": half of the free memory, at most the full cache.
        full_bytes: size of the full cache, in bytes.
        free_bytes: free memory on the device of the cache, in bytes.

    Raises:
        ConfigError: the setting is none of these, or not positive.
    """
    if isinstance(memory, bool):
        raise ConfigError("memory must be a size such as 512MiB, 1/13 or auto")
    if isinstance(memory, int | Integral):
        size = int(memory)
    elif isinstance(memory, float):
        if not 0 < memory <= 1:
            raise ConfigError(f"memory={memory} is not a fraction of the full cache in (0, 1]")
        size = int(full_bytes * memory)
    elif memory.strip().lower() == "auto":
        size = min(full_bytes, free_bytes // 2)
    elif (fraction := _FRACTION.match(memory)) is not None:
        if int(fraction.group(2)) == 0:
            raise ConfigError(f"memory={memory!r} divides by zero")
        size = int(full_bytes * Fraction(int(fraction.group(1)), int(fraction.group(2))))
    elif (percent := _PERCENT.match(memory)) is not None:
        size = int(full_bytes * float(percent.group(1)) / 100)
    else:
        try:
            size = parse_bytes(memory)
        except ConfigError as error:
            raise ConfigError(f"memory={memory}: {error}") from error
    if size <= 0:
        raise ConfigError(f"memory={memory!r} is not a positive size")
    return size


def is_share(memory: int | float | str) -> bool:
    """Whether a `memory=` setting is a share of the full cache, or "auto", and no size."""
    if not isinstance(memory, str):
        return isinstance(memory, float)
    is_auto = memory.strip().lower() == "auto"
    return is_auto or bool(_FRACTION.match(memory) or _PERCENT.match(memory))


def enough_bytes(num_bytes: int) -> str:
    """Write a size that a reader is to give: to the byte, since a rounded one may be too little."""
    return f"{num_bytes} ({format_bytes(num_bytes)})"


def enough_size(num_bytes: int) -> str:
    """A short size that is enough, as one writes it: 1.21MiB."""
    unit = next((each for each in ("gib", "mib") if num_bytes >= _UNITS[each]), "kib")
    hundredths = -(-100 * num_bytes // _UNITS[unit])
    if hundredths >= 10_000:
        hundredths += -hundredths % 100
    return f"{hundredths / 100:g}{unit[0].upper()}iB"


def format_bytes(num_bytes: float) -> str:
    """Write a size for people, in binary units: 7.53 MiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    # three digits of 999.5 and more would be written 1e+03
    digits = ".0f" if unit == "B" or abs(size) >= 999.5 else ".3g"
    return f"{size:{digits}} {unit}"
