"""DeviceMemory: what a near-storage device holds in memory of its own, within a bound."""

from dataclasses import dataclass

from penstock.core.byte_size import enough_bytes, format_bytes
from penstock.core.errors import BudgetError
from penstock.kernels.key_codes import KeyCodes
from penstock.kernels.native.compiled import kernel
from penstock.methods.hillinfer.near_storage.cold_keys import ColdKeys
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings

READ_BYTES = 1 << 20
"""Of each of the two buffers into which units are read back to make their codes."""
TWIN_UNITS, TWIN_COPIES = 2048, 4
"""Without compiled kernels numpy has so many copies in float32 of the keys of so many units, or of
as many as come at a time."""
SMALLEST_SECTOR, LARGEST_SECTOR = 512, 4096
MAP_COPIES = 3
"""Of the units of one `Map`: as they came, sorted, and those without codes."""
CONNECTIONS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """How a device's memory is divided. Its interpreter and the kernels are beside it.

    Attributes:
        coded_layers: the first so many layers have all their codes in memory; those of the others
            are made from the keys on the disk whenever they are scored
        bounded: nothing may grow
        num_bytes: codes, tables, and what one request takes
    """

    coded_layers: int
    bounded: bool
    num_bytes: int

    @classmethod
    def within(
        cls, settings: DeviceSettings, limit: int | None, *, over_tcp: bool = False
    ) -> "DeviceMemory":
        """The most codes that fit.

        Args:
            limit: bytes; None: no bound.
            over_tcp: the device has a copy of the bulk, and frames, that otherwise are the cache's.

        Raises:
            BudgetError: the rest does not fit, all codes streamed.
        """
        s, tokens = settings, settings.rows * settings.max_tokens
        least = s.layers * ColdKeys.table_bytes(s) + ColdKeys.scratch_bytes(s)
        least += 2 * read_units(s, LARGEST_SECTOR) * padded_bytes(s, LARGEST_SECTOR)
        least += MAP_COPIES * min(s.section_bytes, 8 * tokens)
        if kernel("put_key_codes") is None:
            count = max(read_units(s, SMALLEST_SECTOR), s.section_bytes // s.unit_bytes)
            least += TWIN_COPIES * 4 * s.kv_heads * s.head_dim * min(TWIN_UNITS, count)
        if over_tcp:
            division = s.division
            frame = max(division.section_bytes, division.area_bytes)
            least += division.num_bytes + CONNECTIONS * frame
        codes = s.units + KeyCodes.num_bytes(s.units, s.kv_heads, s.head_dim, s.bits)
        if limit is None:
            return cls(coded_layers=s.layers, bounded=False, num_bytes=least + s.layers * codes)
        least += KeyCodes.num_bytes(min(s.block_tokens, tokens), s.kv_heads, s.head_dim, s.bits)
        if least > limit:
            raise BudgetError(
                f"a near-storage device needs {format_bytes(least)} even with all codes read from "
                f"its disk, beyond its budget of {format_bytes(limit)}; give "
                f"device_memory={enough_bytes(least)} or more, or fewer tokens",
                needed_bytes=least,
            )
        coded = min(s.layers, (limit - least) // codes)
        return cls(coded_layers=coded, bounded=True, num_bytes=least + coded * codes)


def describe_memory(num_bytes: int, coded_layers: int, layers: int) -> str:
    """For people: what a device holds, and what it streams."""
    held = f"{format_bytes(num_bytes)} of memory"
    if coded_layers == layers:
        return held
    return f"{held} (codes of {layers - coded_layers} of {layers} layers are read from its disk)"


def padded_bytes(settings: DeviceSettings, sector_bytes: int) -> int:
    """Bytes from one unit to the next on a disk with such sectors."""
    return -(-settings.unit_bytes // sector_bytes) * sector_bytes


def read_units(settings: DeviceSettings, sector_bytes: int) -> int:
    """Units that are read back at a time."""
    most = min(settings.rows * settings.max_tokens, settings.units)
    return max(1, min(READ_BYTES // padded_bytes(settings, sector_bytes), most))
