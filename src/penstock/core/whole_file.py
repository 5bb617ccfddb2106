"""A text file that is written whole or not at all."""

import os
from pathlib import Path


def write_whole(text: str, path: Path) -> None:
    """Write a UTF-8 file, or leave the one that is there as it is.

    What is no file (a pipe, a terminal) is written to.

    Raises:
        OSError: it cannot be written.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
