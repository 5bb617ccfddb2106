"""Where clusters are in a file, which spans of it to read, and what is newer in memory."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import Int64Array


class Located(NamedTuple):
    """Where the entries of some clusters are."""

    counts: Int64Array
    """Entries of each cluster. [clusters]"""
    lows: Int64Array
    """First byte of each range to read, a multiple of a sector. A range has entries of one cluster
    that lie behind each other; the ranges are in the order of the clusters. [ranges]"""
    highs: Int64Array
    """[ranges]"""
    stored: Int64Array
    """Entries of each range that are in the file and not in a write buffer. [ranges]"""
    lengths: Int64Array
    """Entries of each range. [ranges]"""
    firsts: Int64Array
    """Byte of the file at which the first entry of each range begins. [ranges]"""
    steps: Int64Array
    """Bytes from one entry of a range to the next, negative where they go down. [ranges]"""
    held: Int64Array
    """Byte of the file of each sector that is newer in memory, ends of ranges all. [held]"""
    buffered_bytes: npt.NDArray[np.void]
    """What they hold. void of a sector [held]"""

    def addresses(self, shift: Int64Array | int = 0) -> Int64Array:
        """Byte at which each entry begins, cluster by cluster. int64 [entries]

        Args:
            shift: bytes by which the entries of each range are elsewhere. [ranges]
        """
        begins = self.lengths.cumsum() - self.lengths
        origins = self.firsts + shift - begins * self.steps
        steps = self.steps.repeat(self.lengths)
        steps *= np.arange(len(steps))
        steps += origins.repeat(self.lengths)
        return steps


class Spans(NamedTuple):
    """Ranges of bytes merged where they touch, ascending."""

    lows: Int64Array
    """[spans]"""
    highs: Int64Array
    """[spans]"""
    span_of: Int64Array
    """Which span each range is in. [ranges]"""


def merge(lows: Int64Array, highs: Int64Array, gap_bytes: int = 0) -> Spans:
    """Merge the ranges [lows[i], highs[i]) that touch, overlap, or leave `gap_bytes` or less.

    Args:
        lows, highs: int64 [ranges], in any order
    """
    if not len(lows):
        return Spans(lows, highs, lows)
    order = lows.argsort(kind="stable")
    low = lows[order]
    reach = np.maximum.accumulate(highs[order])
    begins = np.ones(len(low), dtype=np.bool_)
    begins[1:] = low[1:] > reach[:-1] + gap_bytes
    first = begins.nonzero()[0]
    span_of = np.empty(len(low), dtype=np.int64)
    span_of[order] = begins.cumsum() - 1
    last = np.append(first[1:], len(low)) - 1
    return Spans(low[first], reach[last], span_of)


class Patches(NamedTuple):
    """Sectors of a buffer that are newer in memory than in the file."""

    to: Int64Array
    """Their place in the buffer, in sectors. [sectors]"""
    data: npt.NDArray[np.void]
    """void of a sector [sectors]"""


def put_buffered(
    found: Located, spans: Spans, live: npt.NDArray[np.bool_], shift: Int64Array,
    buffer: AlignedBuffer,
) -> tuple[Int64Array, Int64Array, Patches | None]:  # fmt: skip
    """Copy sectors that are newer in memory to where no read will put older bytes over them.

    Args:
        live: spans to be read. bool [spans]
        shift: from the file to the buffer. [spans]

    Returns:
        lows, highs: the spans without a first or last sector that comes from memory anyway.
        late: the sectors for which the read must be waited for.
    """
    lows, highs, held = spans.lows, spans.highs, found.held
    if not len(held):
        return lows, highs, None
    sector = found.buffered_bytes.itemsize
    span_of = lows.searchsorted(held, "right") - 1
    is_first = held == lows[span_of]
    is_last = (held == highs[span_of] - sector) & ~is_first
    lows, highs = lows.copy(), highs.copy()
    lows[span_of[is_first]] += sector
    highs[span_of[is_last]] -= sector
    to = (held + shift[span_of]) // sector
    is_late = live[span_of] & ~(is_first | is_last)
    if not is_late.any():
        sectors_of(buffer, sector)[to] = found.buffered_bytes
        return lows, highs, None
    early = ~is_late
    sectors_of(buffer, sector)[to[early]] = found.buffered_bytes[early]
    return lows, highs, Patches(to[is_late], found.buffered_bytes[is_late])


def sectors_of(buffer: AlignedBuffer, sector_bytes: int) -> npt.NDArray[np.void]:
    """A buffer's whole sectors: void of `sector_bytes` [sectors], the same memory."""
    num_bytes = buffer.num_bytes // sector_bytes * sector_bytes
    sectors: npt.NDArray[np.void] = buffer.array.reshape(-1)[:num_bytes].view(f"V{sector_bytes}")
    return sectors
