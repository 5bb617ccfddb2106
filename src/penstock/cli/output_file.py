"""Files that a command leaves: looked at before the work, and written behind it."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from penstock.core.atomic_write import FileKind, require_own
from penstock.core.errors import ConfigError, StorageError

ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace files that Penstock did not write.")
]


def check_writable(path: Path, option: str, kind: FileKind, *, force: bool = False) -> None:
    """Refuse a file that could not be written later, or that is somebody else's.

    Everything is left as it was.

    Args:
        path: of the file; a pipe or a device may be written to.
        option: that named it, for the message.
        kind: of what will be written; a file of another kind is not replaced.
        force: replace it all the same.

    Raises:
        ConfigError: it cannot be, its folder is not there, `path` is a folder, or it is of
            another kind.
    """
    target = path.absolute()
    try:
        if target.is_dir():
            raise ConfigError(f"{option} {path} is a folder; give a file")
        if not target.parent.is_dir():
            raise ConfigError(f"{option} {path}: the folder {target.parent} does not exist")
        target = Path(os.path.realpath(target))
        if target.is_file():
            target.open("ab").close()
        elif not target.exists():
            target.open("xb").close()
            target.unlink()
        if target.is_file():  # it is replaced by a file beside it
            tempfile.TemporaryFile(dir=target.parent).close()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{option} {path} cannot be written: {reason}; give another file"
        ) from error
    if not force:
        require_own(path, kind, option, advice=", or --force to replace it")


def written(write: Callable[[Path], None], path: Path, what: str) -> None:
    """Write a file.

    Args:
        write: writes to a path.
        what: the file holds, for the message.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        write(path)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write {what} to {path}: {error.strerror or error}") from error
