"""How every figure looks, and writing it as SVG and PNG."""

import io
import os
from pathlib import Path
from typing import Any, BinaryIO

from matplotlib.figure import Figure

from penstock.core.atomic_write import FileKind, require_own, write_atomically
from penstock.core.errors import ConfigError, StorageError
from penstock.evaluate.result import Result

STYLE: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110, "savefig.dpi": 160,
    "svg.fonttype": "none", "svg.hashsalt": "penstock", "axes.axisbelow": True,
}  # fmt: skip
"""Settings of matplotlib, for `matplotlib.rc_context`."""
KINDS = (".png", ".svg", ".pdf")
"""Endings of the files that can be written."""
_MAKER = "Penstock"
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": _MAKER}, "svg": {"Creator": _MAKER, "Date": None},
    "pdf": {"Creator": _MAKER, "CreationDate": None},
}  # fmt: skip
_MAGIC = (b"\x89PNG\r\n", b"<?xml", b"%PDF-")
_END_BYTES = 1 << 16
INK, GRID, FAINT = "#30343b", "#e4e6ea", "#8a8f98"
SERIES = ("#0b6e99", "#c96a2b", "#4b8b3b", "#7a4fa3")
"""Colours of what is compared, our own first."""


def short_setting(text: str) -> str:
    """A setting without its options, for a label: POLICY@BUDGET."""
    return text.partition(":")[0]


def model_of(result: Result) -> str:
    """The measured model's name for a title; older results do not have it."""
    name = result.settings.get("model")
    return f" on {name}" if isinstance(name, str) else ""


def save(figure: Figure, name: str, folder: Path, *, force: bool = False) -> None:
    """Write a figure as SVG and PNG.

    Args:
        force: replace files that are no pictures of ours.

    Raises:
        ConfigError: a file of that name is no picture of ours.
        StorageError: it cannot be written.
    """
    for kind in ("svg", "png"):
        path = folder / f"{name}.{kind}"
        if not force:
            require_own(path, PICTURE, "the figure", advice=", or --force to replace it")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_picture(figure, path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def check_kind(path: Path) -> None:
    """Refuse a file whose ending is no picture's.

    Raises:
        ConfigError: names the endings that will do.
    """
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"cannot draw into {path}: its name has to end in {', '.join(KINDS)}")


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF by its ending.

    Raises:
        OSError: it cannot be written.
    """
    kind = path.suffix.lower().removeprefix(".")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, metadata=_METADATA[kind])
    write_atomically(drawn.getvalue(), path)


def _is_picture(file: BinaryIO) -> bool:
    """Whether a picture says that we drew it: at its beginning, or where a PDF does, at its end."""
    head = file.read(_END_BYTES)
    file.seek(max(file.seek(0, os.SEEK_END) - _END_BYTES, 0))
    return head.startswith(_MAGIC) and _MAKER.encode() in head + file.read()


PICTURE = FileKind("picture of penstock", _is_picture)


def short_tokens(tokens: int) -> str:
    """A length as it is spoken of: "16K" for 16,384, "1,000" for what is not in thousands."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"
