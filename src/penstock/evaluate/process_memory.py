"""What the process really holds: anonymous memory, its peak, and page cache of our files."""

import ctypes
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from penstock.models.cache_adapter import TieredCache

_ROLLUP = Path("/proc/self/smaps_rollup")
_STATUS = Path("/proc/self/status")
HOW = (
    "anonymous memory of the process (smaps_rollup) after the document was put in and some tokens "
    "were decoded, less the same before the cache was made and after the plain model had decoded; "
    "page cache of the cache's files by mincore"
)


def anonymous_bytes() -> int:
    """Private memory that is no file's, in bytes; resident memory where the system cannot say."""
    return _kilobytes(_ROLLUP, "Anonymous") or int(psutil.Process().memory_info().rss)


def settle() -> None:
    """Give freed memory back to the system, so that the next figure is of what is in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class PeakMemory:
    """Most memory of the process, or of the GPU, since `start`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0

    def start(self) -> None:
        """Begin anew."""
        settle()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._base = torch.cuda.memory_allocated()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            self._base = -1
            return
        self._base = _kilobytes(_STATUS, "VmRSS")

    def growth_bytes(self) -> int | None:
        """Peak since `start` less what was held then; None where the system does not count."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated()) - self._base
        peak = _kilobytes(_STATUS, "VmHWM")
        return peak - self._base if peak and self._base > 0 else None


def cached_file_bytes(cache: TieredCache) -> int | None:
    """Bytes of the cache's own files that lie in the page cache; None where it is unknown."""
    store = cache.tiers._store
    if store is None:
        return 0
    total = 0
    for layer in range(cache._settings.shape.num_layers):
        file: Any = store.region(layer).file
        file = getattr(file, "inner", file)
        descriptor = getattr(file, "_descriptor", None)
        if descriptor is None:
            return None
        pages = _pages_in_cache(descriptor)
        if pages is None:
            return None
        total += pages * mmap.PAGESIZE
    return total


def _pages_in_cache(descriptor: int) -> int | None:
    size = os.fstat(descriptor).st_size
    if size == 0:
        return 0
    try:
        view = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    try:
        address = int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
        return resident_pages(address, size)
    finally:
        view.close()


def resident_pages(address: int, num_bytes: int) -> int | None:
    """Pages of a mapping that are in memory; None where the system cannot say.

    Args:
        address: a page's first byte.
    """
    answer = np.zeros(-(-num_bytes // mmap.PAGESIZE), dtype=np.uint8)
    try:
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(num_bytes),
            answer.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
    except (AttributeError, OSError, TypeError):  # other systems have no mincore
        return None
    return None if failed else int((answer & 1).sum())


def _kilobytes(path: Path, name: str) -> int:
    """A line "Name: 123 kB" of a file in /proc, in bytes; 0 when it is not there."""
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def command_line(process: psutil.Process) -> str:
    """What a process was started as, or calls itself; "" where it has ended by now."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return ""
