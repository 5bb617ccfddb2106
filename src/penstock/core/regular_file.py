"""Reading files that a person names: a pipe or a device of that name holds nothing up."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
TEXT_BYTES_MAX = 1 << 30
"""Of a text that is read whole; no model has positions for more."""
JSON_BYTES_MAX = 64 << 20
"""Of a JSON file of ours, several times over."""


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading, at once and only if it is one.

    Raises:
        OSError: there is none, it may not be read, or it is a folder, a pipe, a socket or a
            device; `strerror` says which.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    except ValueError as error:  # a name with a zero in it, or half a character
        raise OSError(errno.EINVAL, "no file has such a name", str(path)) from error
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _refused(errno.EINVAL, "a socket", path) from error
        raise
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
            raise _refused(number, _KINDS.get(kind, "something else"), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """All of a file.

    Raises:
        OSError: as for `open_regular`, or it has more than `most_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(min(os.fstat(file.fileno()).st_size, most_bytes) + 1)
        if len(content) <= most_bytes:
            content += file.read(most_bytes + 1 - len(content))
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def read_regular_text(path: str | Path, most_bytes: int = JSON_BYTES_MAX) -> str:
    """All of a UTF-8 file.

    Raises:
        OSError: as for `read_regular`.
        UnicodeDecodeError: it is no text.
    """
    return read_regular(path, most_bytes).decode("utf-8")


def _refused(number: int, what: str, path: str | Path) -> OSError:
    return OSError(number, f"it is {what}, not a file", str(path))
