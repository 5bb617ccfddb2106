"""pinned_memory(): large host memory that a GPU reads and writes in place, pinned to the byte.

torch's own `pin_memory=True` rounds up to a power of two, which for a layer's KV is up to twice
what a plan says. Pinning takes seconds for tens of GiB, so what a cache has done with is kept for
the next one, as torch does.
"""

import threading
import weakref

import torch
from torch import Tensor

from penstock.storage.aligned_buffer import AlignedBuffer

_PAGE_BYTES = 4096
_STEPS = 32
"""Sizes between two powers of two, so that caches of nearly the same size share their memory."""
_free: list[AlignedBuffer] = []
_taking = threading.Lock()


def pinned_bytes(num_bytes: int) -> int:
    """What is pinned for so many bytes: up to the next of 32 sizes between two powers of two."""
    step = max(_PAGE_BYTES, (1 << num_bytes.bit_length()) // (2 * _STEPS))
    return -(-num_bytes // step) * step


def pinned_memory(num_bytes: int) -> Tensor:
    """Take pinned host memory; it may hold anything.

    It is kept when the tensor and everything that is made from it are gone: for the next call that
    it fits and that needs half of it at least. A call for which nothing is kept gives back to the
    system what is.

    Args:
        num_bytes: at least 1.

    Returns:
        uint8 [num_bytes]

    Raises:
        OSError: there is no such address space.
        RuntimeError: CUDA pins no more.
    """
    size = pinned_bytes(num_bytes)
    with _taking:
        kept = [buffer for buffer in _free if size <= buffer.num_bytes <= 2 * size]
        if kept:
            buffer = min(kept, key=lambda one: one.num_bytes)
            _free.remove(buffer)
            torch.cuda.synchronize()  # what was queued before it came back may still write
        else:
            _free.clear()
            buffer = AlignedBuffer(1, size, pinned=True)
    array = buffer.array[0, :num_bytes].view()
    # torch holds this very array for as long as a tensor over its bytes lives.
    weakref.finalize(array, _free.append, buffer).atexit = False
    return torch.from_numpy(array)
