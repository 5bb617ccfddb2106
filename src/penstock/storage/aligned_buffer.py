"""AlignedBuffer: host memory that direct I/O can land in, in huge pages where the OS has them."""

import contextlib
import functools
import mmap
import sys
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # a scorer process has no use for torch, and should start at once
    from torch import Tensor

_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_TOUCHED_BYTES = 16 << 20
"""Memory of at least so much is written to by all threads before CUDA pins it on one: 32 times
64 MiB took 0.15 s for 0.75 (16 cores)."""


class AlignedBuffer:
    """Slots of bytes in one zeroed, aligned, private mapping, allocated once and recycled.

    The mapping is private and anonymous: only such memory gets huge pages, and physically
    contiguous pages are worth more than the choice of I/O interface. It is returned to the system
    when the buffer and every array and tensor made from it are gone.

    Attributes:
        array: np.uint8 [num_slots, slot_bytes]
        address: of the first byte; a multiple of 4096, of 2 MiB from that size on
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool = False) -> None:
        """Map `num_slots` slots of `slot_bytes` bytes.

        Args:
            pinned: register the memory with CUDA so that copies to the GPU run on their own;
                ignored where there is no CUDA.
        """
        assert num_slots >= 0, num_slots
        assert slot_bytes > 0, slot_bytes
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_bytes = num_slots * slot_bytes
        pages, root = _map_zeroed(max(self.num_bytes, 1))
        start = -_address(root) % (_HUGE_PAGE_BYTES if root.size > _HUGE_PAGE_BYTES else 1)
        self.array: npt.NDArray[np.uint8] = root[start : start + self.num_bytes].reshape(
            num_slots, slot_bytes
        )
        self.address = _address(root) + start
        self._pages, self._start = pages, start
        _ask_for_huge_pages(pages, start, self.num_bytes)
        self.is_pinned = pinned and self.num_bytes > 0 and pages.pin(self.address, self.num_bytes)

    def in_slots_of(self, slot_bytes: int) -> "AlignedBuffer":
        """The same memory in slots of another size; what is left behind the last is not in it."""
        other: AlignedBuffer = object.__new__(AlignedBuffer)
        other.num_slots, other.slot_bytes = self.num_bytes // slot_bytes, slot_bytes
        other.num_bytes = other.num_slots * slot_bytes
        other.array = self.array.reshape(-1)[: other.num_bytes].reshape(-1, slot_bytes)
        other.address, other.is_pinned = self.address, self.is_pinned
        other._pages, other._start = self._pages, self._start
        return other

    def give_back(self, slots: list[int]) -> None:
        """Give the pages that lie in these slots alone back to the system; they read as zeros then.

        Does nothing where the system knows no such advice, and for pinned memory.
        """
        for slot in slots:
            self.give_back_range(slot, 1)

    def give_back_range(self, first: int, count: int) -> int:
        """As `give_back`, of so many slots from `first` on.

        Returns:
            Bytes that were given back.
        """
        if self.is_pinned or not hasattr(mmap, "MADV_DONTNEED"):
            return 0
        start = self._start + first * self.slot_bytes
        begin = -(-start // _PAGE_BYTES) * _PAGE_BYTES
        end = (start + count * self.slot_bytes) // _PAGE_BYTES * _PAGE_BYTES
        if begin >= end:
            return 0
        self._pages.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        return end - begin

    @functools.cached_property
    def tensor(self) -> "Tensor":
        """torch.uint8 [num_slots, slot_bytes], the same memory."""
        import torch

        return torch.from_numpy(self.array)


class _Pages(mmap.mmap):
    """A mapping that CUDA lets go of before the system does.

    An array's weak reference would not do: its callback was seen to come behind the unmapping
    where the garbage collector took both, and the next mapping at these addresses could not be
    registered.
    """

    _registered: int | None = None

    def pin(self, address: int, num_bytes: int) -> bool:
        """Register this part of it with CUDA, if there is one; returns whether that was done."""
        import torch

        if not torch.cuda.is_available():
            return False
        if num_bytes >= _TOUCHED_BYTES:
            torch.from_numpy(np.frombuffer(self, dtype=np.uint8)).zero_()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
        self._registered = address
        return True

    def __del__(self) -> None:
        if self._registered is None or sys.is_finalizing():
            return
        import torch

        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(self._registered)


def _map_zeroed(num_bytes: int) -> tuple[_Pages, npt.NDArray[np.uint8]]:
    """A fresh mapping of at least `num_bytes`, with room to align it to a huge page."""
    if num_bytes >= _HUGE_PAGE_BYTES:
        num_bytes += _HUGE_PAGE_BYTES
    if hasattr(mmap, "MAP_PRIVATE"):  # the default is shared memory, which gets no huge pages
        pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        pages = _Pages(-1, num_bytes)
    return pages, np.frombuffer(pages, dtype=np.uint8)


def _ask_for_huge_pages(pages: _Pages, start: int, num_bytes: int) -> None:
    """Ask for those that lie in the buffer whole.

    One that reaches beyond its end would take up to 2 MiB that no ledger knows, in each layer.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    whole = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        if whole:
            pages.madvise(mmap.MADV_HUGEPAGE, start, whole)


def _address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
