"""Sessions: which rows live at the same time, so that memory and disk suffice."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from penstock.core.byte_size import format_bytes, parse_memory
from penstock.core.shape import KVShape
from penstock.evaluate.throughput_rows import FLOOR_TOKENS, Row
from penstock.storage.file_space import default_directory

MEMORY_SHARE = 0.85
DISK_SHARE = 0.9
_SPARE_BYTES = 1 << 30
"""Left for activations and everything else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What the machine has to spare, in bytes."""

    memory: int
    disk: int

    @classmethod
    def now(cls, store: str) -> "Room":
        """Free memory, and free space where caches go; a share of each is left alone."""
        place = default_directory() if store in ("auto", "memory") else store
        return cls(
            memory=int(psutil.virtual_memory().available * MEMORY_SHARE) - _SPARE_BYTES,
            disk=int(shutil.disk_usage(place).free * DISK_SHARE),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What one row takes while it lives, in bytes."""

    memory: int
    disk: int
    in_memory: bool = False
    """The simulated device's bytes lie in memory."""


@dataclass(kw_only=True)
class Session:
    """Rows that live and are measured at the same time, floors first."""

    rows: list[Row]
    in_memory: set[str] = field(default_factory=set)
    """Rows whose simulated device lies in memory."""
    too_fast: frozenset[str] = frozenset()
    """Simulated devices that are faster than the disk here."""


def need_of(
    row: Row, shape: KVShape, *, batch: int, max_tokens: int, memory: str, in_memory: bool
) -> Need:
    """What a row will take, roughly."""
    tokens = FLOOR_TOKENS if row.is_floor else max_tokens
    full = shape.full_cache_bytes(batch, tokens)
    held = full if row.is_floor or row.is_resident else parse_memory(memory, full, full)
    if row.is_resident and row.on_disk:
        held += full // 4  # its index
    disk = full if row.on_disk else 0
    return Need(
        memory=held + (disk if in_memory else 0), disk=0 if in_memory else disk,
        in_memory=in_memory,
    )  # fmt: skip


def pack(
    rows: Sequence[Row], shape: KVShape, room: Room, *, batch: int, max_tokens: int, memory: str,
    too_fast: frozenset[str],
) -> tuple[list[Session], dict[str, str]]:  # fmt: skip
    """Divide rows into sessions.

    Args:
        too_fast: simulated devices that are faster than the disk here; they are put into memory
            where that is large enough.

    Returns:
        The sessions, and the rows that fit nowhere with the reason.
    """
    floors = [row for row in rows if row.is_floor]
    sessions: list[Session] = []
    refused: dict[str, str] = {}
    left = room
    for row in rows:
        if row.is_floor:
            continue
        wants_memory = row.device in too_fast
        tried = (True, False) if wants_memory else (False,)
        needs = [
            need_of(row, shape, batch=batch, max_tokens=max_tokens, memory=memory, in_memory=m)
            for m in tried
        ]
        fitting = [n for n in needs if n.memory <= room.memory and n.disk <= room.disk]
        if not fitting:
            refused[row.name] = _refusal(needs[-1], room)
            continue
        need = fitting[0]
        if not sessions or need.memory > left.memory or need.disk > left.disk:
            sessions.append(Session(rows=list(floors), too_fast=too_fast))
            left = room
        sessions[-1].rows.append(row)
        if need.in_memory:
            sessions[-1].in_memory.add(row.name)
        left = Room(memory=left.memory - need.memory, disk=left.disk - need.disk)
    if not sessions and floors:
        sessions.append(Session(rows=list(floors), too_fast=too_fast))
    return sessions, refused


def _refusal(need: Need, room: Room) -> str:
    if need.memory > room.memory:
        return (
            f"does not fit: {format_bytes(need.memory)} of memory, {format_bytes(room.memory)} to "
            "spare"
        )
    return f"does not fit: {format_bytes(need.disk)} of disk, {format_bytes(room.disk)} to spare"
