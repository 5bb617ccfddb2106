"""unpack(): a released model's archive, within the limits that its table sets, or not at all."""

import contextlib
import hashlib
import lzma
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from penstock.core.errors import PenstockError
from penstock.models.released import Released

_PIECE = 1 << 20
_MEMORY_MAX = 256 << 20
"""Of the unpacking itself, in bytes; ours takes nine MiB."""
_HEADS_BYTES = 2048
"""A member's head and padding in the archive, and twice that."""
_END_BYTES = 1 << 16
"""What may lie behind the last member."""


class ArchiveError(PenstockError):
    """An archive is not the released one, or holds what no model's does."""


def unpack(released: Released, file: IO[bytes], target: Path, name: str) -> None:
    """Unpack an open archive beside the target and rename: nothing half done is in its place.

    What is unpacked is summed up once more: a file that is written to meanwhile is refused.

    Args:
        released: what it is to be, and how much it may hold.
        file: the archive, at its beginning.
        target: the folder that it becomes.
        name: of the archive, for messages.

    Raises:
        ArchiveError: it is no archive, holds more or other things than it should, or has changed.
        OSError: it cannot be written.
    """
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.unpacking-"))
    summed = _Summed(file)
    limit = released.unpacked_bytes + released.files * _HEADS_BYTES + _END_BYTES
    try:
        try:
            unpacked: Any = _Unpacked(summed, limit)
            with tarfile.open(fileobj=unpacked, mode="r|") as members:
                _write_members(released, members, staging)
            while unpacked.read(_PIECE):  # to its end, which has sums of its own
                pass
        except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
            raise ArchiveError(f"{name} is no archive of a model: {error}") from error
        while summed.read(_PIECE):
            pass
        if summed.digest.hexdigest() != released.sha256:
            raise ArchiveError(f"{name} changed while it was unpacked; fetch it again")
        if not (staging / "config.json").is_file():
            raise ArchiveError(f"{name} holds no model: it has no config.json")
        staging.chmod(0o755)
        os.rename(staging, target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_members(released: Released, members: tarfile.TarFile, folder: Path) -> None:
    left, names = released.unpacked_bytes, set()
    for member in members:
        name = _plain_name(released, member)
        left -= member.size
        names.add(name)
        if left < 0 or len(names) > released.files:
            raise ArchiveError(
                f"{released.file} holds more than {released.files} files of "
                f"{released.unpacked_bytes:,} bytes; nothing of it was kept"
            )
        content = members.extractfile(member)
        assert content is not None
        with content, _new_file(folder / name, released) as file:
            shutil.copyfileobj(content, file, _PIECE)
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def _new_file(path: Path, released: Released) -> Iterator[IO[bytes]]:
    try:
        file = path.open("xb")
    except FileExistsError:
        raise ArchiveError(
            f"{released.file} holds {path.name} twice; nothing of it was kept"
        ) from None
    with file:
        yield file


def _plain_name(released: Released, member: tarfile.TarInfo) -> str:
    """The name of a file of the model; the archive holds such files alone, in one folder."""
    parts = PurePosixPath(member.name).parts
    plain = member.isreg() and not member.issparse()
    if not plain or len(parts) != 2 or parts[0] != released.name or parts[1] == "..":
        raise ArchiveError(
            f"{released.file} holds {member.name!r}, which is no file of a model; nothing of it "
            "was kept"
        )
    return parts[1]


class _Summed:
    """A file that is read once, with the sum of all that was read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        piece = self._file.read(size)
        self.digest.update(piece)
        return piece


class _Unpacked:
    """The content of an .xz file, up to a limit, in bounded memory."""

    def __init__(self, packed: _Summed, limit: int) -> None:
        self._packed, self._left = packed, limit
        self._inner = lzma.LZMADecompressor(memlimit=_MEMORY_MAX)

    def read(self, size: int) -> bytes:
        """Up to so many bytes; none at the end.

        Raises:
            EOFError: the file ends too early.
            LZMAError: it is no such file.
            ValueError: there is more than the limit.
        """
        while not self._inner.eof:
            packed = self._packed.read(_PIECE) if self._inner.needs_input else b""
            if self._inner.needs_input and not packed:
                raise EOFError("it ends too early")
            content = self._inner.decompress(packed, max_length=size)
            self._left -= len(content)
            if self._left < 0:
                raise ValueError("it holds more than the model has")
            if content:
                return content
        return b""


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
