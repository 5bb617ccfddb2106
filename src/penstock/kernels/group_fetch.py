"""GroupFetch: from a query to reads under way, in one call."""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.group_selection import GroupSelection
from penstock.kernels.native.compiled import address, kernel

_RESULTS = 8
_IOCB_NUMBERS = 8
_LISTS = 10
"""Lists in front of the requests: chosen, slots, rows, units, victims, units and rows of the reads,
and what they read."""
_ASCENDS_NOT = -1
_OUTSIDE = -2


class _Slots(ctypes.Structure):
    """`penstock_slots` of native/steps.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slot_of", "unit_in", "heads", "stored")),
        *((name, ctypes.c_int64) for name in (
            "max_units", "num_slots", "max_stored", "slots_per_row", "buffer", "slot_bytes",
            "buffer_slots", "run_units", "descriptor",
        )),
        ("resident_factor", ctypes.c_double),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """One layer's slots and where they are filled from; the arrays stay where they are."""

    slot_of: NDArray[np.int32]
    """Slot of each unit, as `SlotTable` has it. [batch, max_units]"""
    unit_in: NDArray[np.int32]
    """[batch, slots]"""
    heads: NDArray[np.int64]
    """Clock hands, see `FIFO`. [batch]"""
    stored: NDArray[np.int64]
    """Place of each unit in the file, see `UnitMap`. [batch, max_units]"""
    slots_per_row: int
    """Slots of the buffer from a row to the next, sinks and window included; 0: reads land side by
    side from the buffer's beginning on."""
    buffer: int
    """Address of the memory that reads land in, where a call names no other."""
    slot_bytes: int
    buffer_slots: int
    run_units: int
    """Most units in one read."""
    descriptor: int
    """Of the file."""
    resident_factor: float = 1.0
    """On the scores of the units in the slots, see `GroupSelection.best`."""


class Fetched(NamedTuple):
    """What one call did."""

    chosen: NDArray[np.int64]
    """Selected groups, ascending. [batch, wanted]"""
    slots: NDArray[np.int64]
    """Where each of them is, or will be. [batch, wanted]"""
    rows: NDArray[np.int64]
    """Batch rows of those that were missing. [missing]"""
    units: NDArray[np.int64]
    """[missing]"""
    victims: NDArray[np.int64]
    """Slots that they take. [missing]"""
    iocbs: NDArray[np.int64] | None
    """Requests, with pointers to them behind; None where the reads are still to be submitted: they
    are not in the file's order, or more than the buffer takes side by side. [reads, 8]"""
    address: int
    """Of the first request."""
    taken: int
    """How many of the requests the kernel has taken."""
    read_bytes: int
    submitted_ns: int
    """`time.perf_counter_ns` when the reads began to be submitted; 0 where none were."""


class GroupFetch:
    """`GroupSelection.best`, a fetch plan by a clock, and its reads through native AIO.

    The twin is a `RetrievalLayer` that takes the three steps after each other.
    """

    def __init__(self, selection: GroupSelection, to: SlotArrays) -> None:
        """Look at memory that is changed elsewhere but stays where it is.

        Args:
            selection: one that is compiled.
        """
        compiled, query_part = kernel("fetch_groups"), selection.compiled_index
        assert compiled is not None, "a compiled selection comes with this"
        assert query_part is not None, "a compiled selection is wanted"
        for array in (to.slot_of, to.unit_in, to.heads, to.stored):
            assert array.flags.c_contiguous, "arrays of one piece are wanted"
        assert to.slot_of.dtype == to.unit_in.dtype == np.int32
        assert to.heads.dtype == to.stored.dtype == np.int64
        rows = len(to.heads)
        assert len(to.slot_of) == len(to.unit_in) == len(to.stored) == rows, "a row each"
        assert to.stored.shape[1] <= to.slot_of.shape[1], "groups without a place in the table"
        self._most_groups = to.stored.shape[1]
        self._kernel, self._selection, self._to = compiled, selection, to
        self._num_slots = to.unit_in.shape[1]
        self._index = query_part
        self._slots = _Slots(
            address(to.slot_of), address(to.unit_in), address(to.heads), address(to.stored),
            to.slot_of.shape[1], to.unit_in.shape[1], to.stored.shape[1], to.slots_per_row,
            to.buffer, to.slot_bytes, to.buffer_slots, to.run_units, to.descriptor,
            to.resident_factor,
        )  # fmt: skip
        self._slots_address = ctypes.addressof(self._slots)

    def submit(
        self, query: Tensor, groups: tuple[int, int], wanted: int, context: int, room: int,
        key: int, buffer: int | None = None,
    ) -> Fetched:  # fmt: skip
        """Select, take slots for what is missing and hand its reads to the kernel.

        Args:
            query: contiguous, in the dtype of the selection's basis. [batch, heads, head_dim]
            groups: the first and the end of those that may be chosen.
            wanted: 1 .. end - first.
            context: of native AIO; `room`: most requests that it takes now.
            key: of the first request.
            buffer: address of memory for this call's reads, as large as the one it was made with.
        """
        self._slots.buffer = self._to.buffer if buffer is None else buffer
        batch, (first, end) = len(query), groups
        self._selection.require(query, first, end)
        assert batch <= len(self._to.heads), query.shape
        assert 0 < wanted <= end - first, groups
        assert end <= self._most_groups, groups
        size = batch * wanted
        # Torch's memory tells its address several times faster than numpy's.
        memory = torch.empty(_RESULTS + (_LISTS + _IOCB_NUMBERS + 1) * size, dtype=torch.int64)
        scratch = torch.empty(
            max(self._selection.scratch_bytes(end), self._num_slots), dtype=torch.uint8
        )
        start = memory.data_ptr()
        self._kernel(
            self._index, self._slots_address, query.data_ptr(), batch, first, end, wanted, context,
            room, key, scratch.data_ptr(), start,
        )  # fmt: skip
        out: NDArray[np.int64] = memory.numpy()
        missing, reads, taken, read_bytes, _, submitted_ns = out[:6].tolist()
        assert missing >= 0, "fewer unpinned slots than units to admit"
        assert reads != _OUTSIDE, "a row outside the buffer"
        lists = out[_RESULTS : _RESULTS + 5 * size].reshape(5, size)
        iocbs, behind = None, _RESULTS + _LISTS * size
        if reads != _ASCENDS_NOT:
            iocbs = out[behind : behind + _IOCB_NUMBERS * reads].reshape(reads, _IOCB_NUMBERS)
        chosen, slots = lists[:2].reshape(2, batch, wanted)
        return Fetched(
            chosen, slots, lists[2, :missing], lists[3, :missing], lists[4, :missing], iocbs,
            start + 8 * behind, taken, read_bytes, submitted_ns,
        )  # fmt: skip
