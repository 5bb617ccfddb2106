"""Open a store's files in a directory, by the fastest honest way that the file system allows."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.core.closing import close_all
from penstock.core.errors import ConfigError, PenstockError, StorageError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.direct_file import DirectFile
from penstock.storage.file import KVFile
from penstock.storage.file_space import (
    default_directory,
    direct_sector_bytes,
    file_system,
    open_nameless,
    queue_depth,
)
from penstock.storage.native_aio import AioQueue
from penstock.storage.threaded_file import NUM_READERS, ThreadedFile

_PROBE_BYTES = 4096
_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that accept O_DIRECT and have no device behind them."""


class FileSet(NamedTuple):
    """The files of one store, one a layer, and how to close them all."""

    files: list[KVFile]
    description: str
    close: Callable[[], None]
    """Ends the reads under way, then closes every file."""


class _Access(NamedTuple):
    """How a file turned out to be readable."""

    queue: AioQueue | None
    """None: native AIO does not work here."""
    skips_cache: bool
    is_direct: bool


def open_files(place: str, count: int) -> FileSet:
    """Open `count` nameless files in the directory `place`, or where "auto" leads.

    Direct I/O through native AIO where a probe shows that both work; else a pool of threads.
    "auto" is the system's directory for temporary files; when that is memory in disguise, one that
    is on a disk is preferred.

    Raises:
        ConfigError: the path is a file, or there is nothing.
        StorageError: the directory cannot be written to.
    """
    return wrap_descriptors(open_descriptors(place, count))


def find_directory(place: str) -> str:
    """Where files of a place lie: a directory, or what "auto" leads to.

    Raises:
        ConfigError: the path is a file, or there is nothing of that name: a mistyped disk must not
            become a folder on another one.
    """
    if place != "auto":
        return _directory(place)
    first = default_directory()
    if not _is_on_disk(first) and _is_on_disk("/var/tmp"):
        return "/var/tmp"
    return first


def _directory(place: str) -> str:
    path = Path(place).expanduser()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; the KV cache needs a directory")
    if not path.is_dir():
        raise ConfigError(
            f"there is no directory {path} for the KV cache; make it first (mkdir -p), or give "
            "another"
        )
    return str(path)


def _is_on_disk(directory: str) -> bool:
    """Whether a file in `directory` can be read past the page cache."""
    if file_system(directory) in _IN_MEMORY:
        return False
    try:
        opened = open_nameless(directory, direct=True)
    except StorageError:
        return False
    try:
        return opened.skips_cache and direct_sector_bytes(opened.descriptor) > 0
    finally:
        os.close(opened.descriptor)


class Descriptors(NamedTuple):
    """Nameless files that another process may take over while this one keeps them alive."""

    directory: str
    numbers: list[int]
    direct: bool
    """Opened for direct I/O."""


def open_descriptors(place: str, count: int) -> Descriptors:
    """Open `count` nameless files as `open_files` does, for a caller that wraps them.

    Raises:
        ConfigError: the path is a file, or there is nothing.
        StorageError: the directory cannot be written to.
    """
    directory = find_directory(place)
    direct = _is_on_disk(directory)
    numbers: list[int] = []
    try:
        numbers.extend(open_nameless(directory, direct=direct).descriptor for _ in range(count))
    except BaseException:  # keeps those opened when a later one fails
        for number in numbers:
            os.close(number)
        raise
    return Descriptors(directory, numbers, direct)


def wrap_descriptors(opened: Descriptors) -> FileSet:
    """Make files of descriptors, whatever is in them; closes them if that fails.

    Raises:
        StorageError: the directory takes no file to try direct I/O with.
    """
    directory, descriptors = opened.directory, opened.numbers
    try:
        if not opened.direct:
            access = _Access(None, skips_cache=False, is_direct=False)
            return _threaded_files(directory, descriptors, 512, access)
        sector_bytes = direct_sector_bytes(descriptors[0])
        access = _probe(directory, sector_bytes)
        if access.queue is not None:
            return _direct_files(directory, descriptors, access.queue, sector_bytes)
        return _threaded_files(directory, descriptors, sector_bytes, access)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _direct_files(
    directory: str, descriptors: list[int], queue: AioQueue, sector_bytes: int
) -> FileSet:
    files: list[KVFile] = [DirectFile(d, queue, sector_bytes) for d in descriptors]

    def close() -> None:
        close_all(queue.close, *(file.close for file in files))

    return FileSet(files, f"{_where(directory)}, direct I/O", close)


def _threaded_files(
    directory: str, descriptors: list[int], sector_bytes: int, access: _Access
) -> FileSet:
    readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="penstock-read")
    files: list[KVFile] = [
        ThreadedFile(
            descriptor,
            readers,
            sector_bytes=sector_bytes,
            skips_cache=access.skips_cache,
            is_direct=access.is_direct,
        )
        for descriptor in descriptors
    ]

    def close() -> None:
        stop = partial(readers.shutdown, wait=True, cancel_futures=True)
        close_all(stop, *(file.close for file in files))

    if file_system(directory) in _IN_MEMORY:
        how = "which is memory, not a disk"
    elif access.is_direct:
        how = "direct I/O by threads"
    else:
        how = "buffered I/O by threads (no direct I/O here)"
    return FileSet(files, f"{_where(directory)}, {how}", close)


def _where(directory: str) -> str:
    kind = file_system(directory)
    return f"{directory} ({kind})" if kind else directory


def _probe(directory: str, sector_bytes: int) -> _Access:
    """Write a little to a file of its own and read it back through native AIO."""
    descriptor = open_nameless(directory, direct=True).descriptor
    try:
        queue = AioQueue(queue_depth(descriptor))
    except PenstockError:
        os.close(descriptor)
        return _Access(None, skips_cache=True, is_direct=True)
    num_bytes = max(_PROBE_BYTES, sector_bytes)
    buffer = AlignedBuffer(2, num_bytes)
    buffer.array[0] = np.arange(num_bytes) % 251
    file = DirectFile(descriptor, queue, sector_bytes)
    try:
        file.write_at(0, buffer.array[0])
        zero, length = np.zeros(1, dtype=np.int64), np.array([num_bytes], dtype=np.int64)
        before = _device_read_bytes()
        file.submit_reads(zero, length, zero + buffer.address + num_bytes, buffer.array).wait()
        is_direct = before is None or _device_read_bytes() != before
        if is_direct and np.array_equal(buffer.array[0], buffer.array[1]):
            return _Access(queue, skips_cache=True, is_direct=True)
        queue.close()
        return _Access(None, skips_cache=True, is_direct=is_direct)
    except (PenstockError, OSError):
        queue.close()
        return _Access(None, skips_cache=True, is_direct=False)
    except BaseException:
        queue.close()
        raise
    finally:
        file.close()


def _device_read_bytes() -> int | None:
    """Bytes that storage devices have delivered to this process; None when it is not counted."""
    try:
        with open("/proc/self/io", encoding="ascii") as counters:
            for line in counters:
                name, _, value = line.partition(": ")
                if name == "read_bytes":
                    return int(value)
    except (OSError, ValueError):
        pass
    return None
