"""Make a saved sequence of llama.cpp longer by repeating its cells, for synthetic prefill.

The layout is that of the release that is pinned in environments.py, for one stream and one position
per cell; anything else is refused. Without flash attention values are transposed.
"""

import struct
from pathlib import Path
from typing import BinaryIO

_MAGIC = 0x67677371
_VERSION = 3


class StateFormatError(Exception):
    """The file is not laid out as this module knows it."""


def widen(short: Path, long: Path, tokens: int) -> None:
    """Write `long` with `tokens` cells: those of `short` over and over, positions counted on.

    Raises:
        StateFormatError: the file is of another version or kind.
    """
    with short.open("rb") as source, long.open("wb") as target:
        header = _take(source, "<III")
        if header[:2] != (_MAGIC, _VERSION):
            raise StateFormatError(f"magic and version are {header[:2]}")
        streams_at = source.seek(4 * header[2], 1)
        streams, cells = _take(source, "<II")
        if streams != 1 or not cells:
            raise StateFormatError(f"{streams} streams and {cells} cells at {streams_at}")
        target.write(struct.pack("<IIIII", _MAGIC, _VERSION, 0, streams, tokens))
        marks = [_read_cell(source, index) for index in range(cells)]
        for index in range(tokens):
            target.write(struct.pack("<i", index) + marks[index % cells])
        transposed, layers = _take(source, "<II")
        target.write(struct.pack("<II", transposed, layers))
        for _ in range(layers if transposed else 2 * layers):
            kind, row_bytes = _take(source, "<iQ")
            target.write(struct.pack("<iQ", kind, row_bytes))
            _repeat(source, target, cells, tokens, row_bytes)
        for _ in range(layers if transposed else 0):
            kind, element_bytes, channels = _take(source, "<iII")
            target.write(struct.pack("<iII", kind, element_bytes, channels))
            for _ in range(channels):
                _repeat(source, target, cells, tokens, element_bytes)
        if rest := source.read():
            raise StateFormatError(f"{len(rest)} bytes are left over")


def _repeat(source: BinaryIO, target: BinaryIO, cells: int, tokens: int, cell_bytes: int) -> None:
    """Copy what `cells` cells have, over and over, for `tokens` of them."""
    data = source.read(cells * cell_bytes)
    if len(data) != cells * cell_bytes:
        raise StateFormatError("the file is too short")
    for start in range(0, tokens, cells):
        target.write(data[: min(cells, tokens - start) * cell_bytes])


def _read_cell(source: BinaryIO, index: int) -> bytes:
    """What stands behind a cell's position: the number of its sequences, and these."""
    position, sequences = _take(source, "<iI")
    if position != index or sequences > 1:
        raise StateFormatError(f"cell {index} has position {position}, {sequences} sequences")
    return struct.pack("<I", sequences) + source.read(4 * sequences)


def _take(source: BinaryIO, form: str) -> tuple[int, ...]:
    data = source.read(struct.calcsize(form))
    if len(data) != struct.calcsize(form):
        raise StateFormatError("the file is too short")
    return struct.unpack(form, data)
