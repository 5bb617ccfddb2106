"""SharedMemory: bulk that a cache and its near-storage device both see, and how it is divided."""

import mmap
import os
import tempfile
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import StorageError
from penstock.methods.hillinfer.near_storage.protocol import ProtocolError

_PAGE_BYTES = 4096
AREA_PARTS = (
    "query", "log_sums", "normalisers", "units", "promoted", "demoted", "positions", "scores",
)  # fmt: skip
"""What an area has, in this order."""
NUM_AREAS = 2
"""Score requests whose query and scores have a place at the same time."""
MOST_NEW = 64
"""Tokens of a row that a score request maps on the way; more take a message of their own."""
NUM_SECTIONS = 4
"""Reads under way at the same time; two more sections are for writes and for maps."""
MOST_SECTION_BYTES, LEAST_SECTION_BYTES = 4 << 20, 64 << 10
SECTION_SHARE = 32
"""A section is one part in so many of a layer, within those bounds."""


def section_bytes(tokens: int, unit_bytes: int) -> int:
    """Bytes of a section where a layer has so many tokens, all rows together; whole pages."""
    wanted = tokens * unit_bytes // SECTION_SHARE
    least = max(LEAST_SECTION_BYTES, 32 * unit_bytes)
    return -(-max(least, min(wanted, MOST_SECTION_BYTES)) // _PAGE_BYTES) * _PAGE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Where things are: `NUM_AREAS` areas for scores, `NUM_SECTIONS` + 2 sections for bytes.

    Area: query float32 [rows, query_heads, head_dim]; log-sums and log-normalisers float32
    [rows, query_heads] each; units int64 [rows * MOST_NEW]; promoted and demoted int64
    [rows * max_tokens] each, as row * max_tokens + position; positions int32 and scores float32
    [rows * max_tokens] each.
    """

    rows: int
    max_tokens: int
    query_heads: int
    head_dim: int
    section_bytes: int

    @property
    def _area_parts(self) -> tuple[int, ...]:
        tokens, heads = self.rows * self.max_tokens, self.rows * self.query_heads
        sizes = [4 * heads * self.head_dim, 4 * heads, 4 * heads, 8 * self.rows * MOST_NEW]
        sizes += [8 * tokens, 8 * tokens, 4 * tokens, 4 * tokens]
        return tuple(-(-size // 64) * 64 for size in sizes)

    @property
    def area_bytes(self) -> int:
        """Bytes of one area, in whole pages."""
        return -(-sum(self._area_parts) // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return NUM_AREAS * self.area_bytes + (NUM_SECTIONS + 2) * self.section_bytes

    def section(self, i: int) -> int:
        """Where section i begins; those behind NUM_SECTIONS are for writes and for maps."""
        return NUM_AREAS * self.area_bytes + i * self.section_bytes

    def place(self, i: int, name: str) -> tuple[int, int]:
        """Where a part of area i begins, and its bytes.

        Raises:
            ProtocolError: there is no such area.
        """
        if not 0 <= i < NUM_AREAS:
            raise ProtocolError(f"area {i} of {NUM_AREAS}")
        at = AREA_PARTS.index(name)
        tokens, heads = self.rows * self.max_tokens, self.rows * self.query_heads
        exact = (4 * heads * self.head_dim, 4 * heads, 4 * heads, 8 * self.rows * MOST_NEW,
                 8 * tokens, 8 * tokens, 4 * tokens, 4 * tokens)  # fmt: skip
        return i * self.area_bytes + sum(self._area_parts[:at]), exact[at]

    def area(self, memory: NDArray[np.uint8], i: int) -> "Area":
        """Area i as arrays over `memory`, uint8 [num_bytes]."""
        assert 0 <= i < NUM_AREAS, i
        at, views = i * self.area_bytes, []
        for size in self._area_parts:
            views.append(memory[at : at + size])
            at += size
        heads = (self.rows, self.query_heads)
        tokens = self.rows * self.max_tokens
        return Area(
            query=views[0][: 4 * heads[0] * heads[1] * self.head_dim].view(np.float32).reshape(
                *heads, self.head_dim
            ),
            log_sums=views[1][: 4 * heads[0] * heads[1]].view(np.float32).reshape(heads),
            normalisers=views[2][: 4 * heads[0] * heads[1]].view(np.float32).reshape(heads),
            units=views[3][: 8 * self.rows * MOST_NEW].view(np.int64),
            promoted=views[4][: 8 * tokens].view(np.int64),
            demoted=views[5][: 8 * tokens].view(np.int64),
            positions=views[6][: 4 * tokens].view(np.int32),
            scores=views[7][: 4 * tokens].view(np.float32),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Area:
    """One area's arrays; see `Division`."""

    query: NDArray[np.float32]
    log_sums: NDArray[np.float32]
    normalisers: NDArray[np.float32]
    units: NDArray[np.int64]
    promoted: NDArray[np.int64]
    demoted: NDArray[np.int64]
    positions: NDArray[np.int32]
    scores: NDArray[np.float32]


def create(num_bytes: int) -> int:
    """A descriptor of `num_bytes` of memory without a name, zeroed, gone with its last user.

    Raises:
        StorageError: there are too many open files, or too little memory.
    """
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
        else:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - only its descriptor is kept
            descriptor = os.dup(file.fileno())
            file.close()
        try:
            os.ftruncate(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise StorageError(f"cannot share {num_bytes} bytes of memory: {error}") from error
    return descriptor


def unshared(num_bytes: int) -> NDArray[np.uint8]:
    """As much memory of this process alone, beginning where a page does, for direct I/O.

    Raises:
        StorageError: there is too little memory.
    """
    return attach(-1, num_bytes)


def attach(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map the memory behind a descriptor, -1: none; the mapping lives as long as the array.

    Raises:
        StorageError: there is too little memory.
    """
    try:
        return np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8)
    except OSError as error:
        raise StorageError(f"cannot share {num_bytes} bytes of memory: {error}") from error
