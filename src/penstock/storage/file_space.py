"""Nameless private files and the room they take: open, probe, allocate, write."""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import tempfile
from typing import NamedTuple

from penstock.core.errors import StorageError
from penstock.storage.file import ByteArray, write_error

_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_OFFSET_ALIGN = 156  # stx_dio_offset_align, u32
_AT_EMPTY_PATH = 0x1000
_ESCAPED = re.compile(r"\\([0-7]{3})")
"""How the list of mounts writes a space, a tab, a line's end and a backslash."""
_WRITE_BYTES = 8 << 20
"""Longest single write, so that Ctrl-C never waits long."""


class OpenedFile(NamedTuple):
    """A file without a name."""

    descriptor: int
    skips_cache: bool
    """Opened for direct I/O; true on tmpfs too, where it means nothing."""


def open_nameless(directory: str, *, direct: bool) -> OpenedFile:
    """Open a file of mode 0600 that the system removes with its last user, however that ends.

    Raises:
        StorageError: the directory does not take files.
    """
    no_cache = getattr(os, "O_DIRECT", 0) if direct else 0
    try:
        try:
            return OpenedFile(_open_nameless(directory, no_cache), no_cache != 0)
        except OSError as error:
            if not no_cache or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return OpenedFile(_open_nameless(directory, 0), False)
    except OSError as error:
        raise StorageError(f"cannot create a file in {directory}: {error.strerror}") from error


def _open_nameless(directory: str, flags: int) -> int:
    flags |= os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
    path = os.path.join(directory, f".penstock-{secrets.token_hex(8)}")
    flags |= os.O_CREAT | os.O_EXCL | getattr(os, "O_TEMPORARY", 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise  # another's
    except OSError:  # Linux makes the file before it finds that it cannot be read directly
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    if not hasattr(os, "O_TEMPORARY"):  # Windows: gone when closed; elsewhere: gone now
        os.unlink(path)
    return descriptor


def direct_sector_bytes(descriptor: int) -> int:
    """What direct I/O on this file must be aligned to; 0 when the file has no direct I/O.

    Kernels that cannot say (before 6.1) get 4096, which every disk takes.
    """
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError, TypeError):
        return 4096
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return 4096
    mask = int.from_bytes(answer.raw[:4], "little")
    if not mask & _STATX_DIOALIGN:
        return 4096
    align = int.from_bytes(answer.raw[_STATX_OFFSET_ALIGN : _STATX_OFFSET_ALIGN + 4], "little")
    return align and max(align, 512)


def allocate(descriptor: int, present_bytes: int, num_bytes: int) -> None:
    """Grow a file from `present_bytes` to `num_bytes` with real blocks where the system can.

    Raises:
        StoreFullError: no room; the file is cut back to `present_bytes`.
        StorageError: anything else.
    """
    try:
        try:
            if not hasattr(os, "posix_fallocate"):
                raise OSError(errno.EOPNOTSUPP, "no posix_fallocate")
            os.posix_fallocate(descriptor, present_bytes, num_bytes - present_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            os.ftruncate(descriptor, present_bytes)
        raise write_error(error, f"reserve {num_bytes} bytes for the KV cache") from error


def write_all(descriptor: int, offset: int, data: ByteArray) -> None:
    """Write all of `data` [num_bytes] at `offset`, in as many calls as it takes.

    Raises:
        StoreFullError: no room.
        StorageError: anything else.
    """
    view = data.data
    try:
        while len(view):
            written = os.pwrite(descriptor, view[:_WRITE_BYTES], offset)
            view, offset = view[written:], offset + written
    except OSError as error:
        raise write_error(error, "write the KV cache") from error


def file_system(path: str) -> str:
    """The file system type that `path` lies on ("ext4"), or "" when the system does not say."""
    real, best, kind = os.path.realpath(path), "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                _, point, name, *_ = line.split(" ")
                point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), point)
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, name
    except OSError:
        return ""
    return kind


def queue_depth(descriptor: int) -> int:
    """Requests that the device's queue takes before a submission blocks; 128 when unknown."""
    device = os.fstat(descriptor).st_dev
    try:
        folder = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        for candidate in (folder, os.path.dirname(folder)):  # a partition's queue is its disk's
            path = os.path.join(candidate, "queue", "nr_requests")
            if os.path.exists(path):
                with open(path, encoding="ascii") as text:
                    return max(8, min(256, int(text.read())))
    except (AttributeError, OSError, ValueError):
        pass
    return 128


def default_directory() -> str:
    """The system's directory for temporary files."""
    return tempfile.gettempdir()
