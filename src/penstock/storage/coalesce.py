"""Merge reads and writes of neighbouring units into fewer, larger ones."""

from typing import NamedTuple

import numpy as np

from penstock.kernels.native.compiled import address, kernel
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import Int64Array


class Runs(NamedTuple):
    """Transfers in the order of their place in the file, all int64 [num_runs].

    Run i moves units [first_units[i], first_units[i] + num_units[i]) from or to the buffer slots
    [first_slots[i], first_slots[i] + num_units[i]).
    """

    first_units: Int64Array
    first_slots: Int64Array
    num_units: Int64Array


def coalesce(unit_ids: Int64Array, slots: Int64Array, max_units: int) -> Runs:
    """Merge (unit, slot) pairs that are consecutive in both, sorted by unit.

    Args:
        unit_ids: int64 [num_units], in any order
        slots: int64 [num_units], the buffer slot of each unit
        max_units: most units in one run
    """
    compiled = kernel("coalesce")
    if compiled is None:
        return coalesce_twin(unit_ids, slots, max_units)
    count = len(unit_ids)
    if count and np.any(unit_ids[1:] < unit_ids[:-1]):
        order = unit_ids.argsort(kind="stable")
        unit_ids, slots = unit_ids[order], slots[order]
    unit_ids, slots = np.ascontiguousarray(unit_ids), np.ascontiguousarray(slots)
    runs = np.empty((3, count), dtype=np.int64)
    num_runs = np.zeros(1, dtype=np.int64)
    first, step = address(runs), 8 * count
    compiled(
        address(unit_ids), address(slots), count, max_units, first, first + step, first + 2 * step,
        address(num_runs),
    )  # fmt: skip
    return Runs(*runs[:, : int(num_runs[0])])


def plan_reads(
    unit_ids: Int64Array, slots: Int64Array, max_units: int, buffer: AlignedBuffer
) -> tuple[Int64Array, Int64Array, Int64Array] | None:
    """What `coalesce` merges, in bytes, for a read into a buffer with a slot for each unit; one
    call.

    Args:
        unit_ids, slots, max_units: as in `coalesce`.

    Returns:
        Offsets, lengths and addresses, int64 [num_reads]; None where it takes more: units that do
        not ascend, slots outside the buffer, no compiled kernel.
    """
    compiled, count = kernel("plan_reads"), len(unit_ids)
    contiguous = unit_ids.flags.c_contiguous and slots.flags.c_contiguous
    if compiled is None or not contiguous or len(slots) != count:
        return None
    reads = np.empty(3 * count + 1, dtype=np.int64)
    first = address(reads)
    compiled(
        address(unit_ids), address(slots), count, max_units, buffer.slot_bytes, buffer.num_slots,
        buffer.address, first, first + 24 * count,
    )  # fmt: skip
    num_reads = int(reads[-1])
    if num_reads < 0:
        return None
    return (
        reads[:num_reads],
        reads[count : count + num_reads],
        reads[2 * count : 2 * count + num_reads],
    )


def coalesce_twin(unit_ids: Int64Array, slots: Int64Array, max_units: int) -> Runs:
    """The meaning of `coalesce` in numpy."""
    order = unit_ids.argsort(kind="stable")
    units, slots = unit_ids[order], slots[order]
    count = len(units)
    starts_run = np.empty(count, dtype=np.bool_)
    starts_run[:1] = True
    lead = slots - units  # constant along a run, though not only there
    np.not_equal(lead[1:], lead[:-1], out=starts_run[1:])
    starts_run[1:] |= units[1:] != units[:-1] + 1
    starts = starts_run.nonzero()[0]
    if len(starts) == count:
        return Runs(units, slots, np.ones(count, dtype=np.int64))
    lengths = np.diff(starts, append=count)
    if lengths.max() > max_units:
        starts, lengths = _split(starts, lengths, max_units)
    return Runs(units[starts], slots[starts], lengths)


def _split(
    starts: Int64Array, lengths: Int64Array, max_units: int
) -> tuple[Int64Array, Int64Array]:
    """Cut runs longer than `max_units` into pieces of at most that."""
    pieces = -(-lengths // max_units)
    run_of = np.repeat(np.arange(len(starts)), pieces)
    piece = np.arange(len(run_of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = piece * max_units
    return starts[run_of] + begins, np.minimum(lengths[run_of] - begins, max_units)
