"""Files that are written whole or not at all, and never in place of another's."""

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.core.errors import ConfigError
from penstock.core.regular_file import open_regular

_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that Penstock writes, and how one is known again."""

    what: str
    """As in "is no ...": "config of penstock tune"."""
    is_one: Callable[[BinaryIO], bool]
    """Whether an open file is of this kind; whatever it raises means that it is not."""


def json_kind(what: str, family: str) -> FileKind:
    """JSON files, or lines of JSON, whose first object has a `format` that begins with `family`.

    The format stands in the file's first 64 KiB.
    """
    wanted = re.compile(rb'"format"\s*:\s*' + json.dumps(family).encode()[:-1])

    def is_one(file: BinaryIO) -> bool:
        head = file.read(_HEAD_BYTES).lstrip()
        return head.startswith(b"{") and wanted.search(head) is not None

    return FileKind(what, is_one)


def require_own(path: Path, kind: FileKind, argument: str, *, advice: str = "") -> None:
    """Refuse to replace a file that is not of a kind; an empty one, a pipe or a device may be.

    Args:
        argument: that named the file, for the message.
        advice: what else can be done than giving another name.

    Raises:
        ConfigError: something else is there, or its kind cannot be found out.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        with open_regular(path) as file:
            if kind.is_one(file):
                return
    except Exception:  # each format has errors of its own for what it is not
        pass
    raise ConfigError(
        f"{argument} {path} is there already and is no {kind.what}; give another name{advice}"
    )


def write_atomically(content: str | bytes, path: Path) -> None:
    """Write a file, a text in UTF-8, or leave the one that is there as it is.

    What is no file (a pipe, a terminal) is written to.

    Raises:
        OSError: it cannot be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        _write_into(target, data)
        return
    # Not made of its name, which may be as long as names can be.
    partial = target.with_name(f".penstock-{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_bytes(data)
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_into(target: Path, data: bytes) -> None:
    """Write into a pipe or a device; a pipe without a reader is an error, not a wait."""
    try:
        descriptor = os.open(target, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no process reads from the pipe", str(target)) from error
        raise
    try:
        if hasattr(os, "set_blocking"):
            os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
