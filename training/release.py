"""Pack a model's folder for `penstock fetch`: `python -m training.release FOLDER`.

The archive depends on the files alone (names in order, no times, no owners), and on the release
of liblzma that packs it. Prints its entry for `src/penstock/models/released.toml`.
"""

import argparse
import hashlib
import io
import json
import lzma
import os
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import BinaryIO

from penstock.core.atomic_write import FileKind, require_own
from penstock.core.errors import ConfigError, PenstockError, StorageError
from penstock.evaluate.progress import Progress
from penstock.models.released import Released

_SAY_S = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack one folder."""
    parser = argparse.ArgumentParser(prog="python -m training.release", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a model, without folders in it")
    parser.add_argument("--name", help="of the model (default: the run's)")
    parser.add_argument("--out", type=Path, help="file (default: NAME.tar.xz beside the folder)")
    parser.add_argument("--url", default="", help="where the archive will be")
    parser.add_argument("--train", help="the command that makes the model anew")
    args = parser.parse_args(arguments)
    folder: Path = args.model.resolve()
    name = args.name or (folder.parent.name if folder.name == "model" else folder.name)
    path = args.out or folder.parent / f"{name}.tar.xz"
    train = args.train or f"python -m training.train training/configs/{name}.toml"
    try:
        pack(folder, path, name)
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    print(f"{path}\n")
    print(entry(_released(name, path, digest, folder, args.url, train)))
    return 0


def pack(folder: Path, path: Path, name: str) -> None:
    """Write the archive beside its place and rename it.

    Args:
        folder: of the model.
        path: of the archive.
        name: of the model, and of the one folder in the archive.

    Raises:
        ConfigError: the folder holds no model, or something that is no plain file.
        StorageError: the archive cannot be written.
    """
    require_own(path, FileKind(f"archive of {name}", partial(_holds, name)), "--out")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no model: it has no config.json")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    for file in files:
        if file.is_symlink() or not file.is_file():
            raise ConfigError(f"{file} is no plain file; a model's folder holds nothing else")
    beside = path.with_name(f"{path.name}.partial")
    progress = _Spoken(sum(file.stat().st_size for file in files))
    try:
        with (
            lzma.open(beside, "wb", preset=6) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
        ):
            for file in files:
                content = _Told(file.read_bytes(), f"packing {file.name}", progress)
                archive.addfile(_member(f"{name}/{file.name}", content.size), content)
        os.replace(beside, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def _released(
    name: str, path: Path, sha256: str, folder: Path, url: str, train: str
) -> Released:  # fmt: skip
    sizes = [file.stat().st_size for file in folder.iterdir()]
    return Released(
        name=name, file=path.name, bytes=path.stat().st_size, sha256=sha256, files=len(sizes),
        unpacked_bytes=sum(sizes), url=url, train=train,
    )  # fmt: skip


def entry(released: Released) -> str:
    """The lines of the table of released models."""
    values = {key: value for key, value in asdict(released).items() if key != "name"}
    lines = (f"{key} = {json.dumps(value)}" for key, value in values.items())
    return "\n".join([f'["{released.name}"]', *lines])


def _holds(name: str, file: BinaryIO) -> bool:
    with tarfile.open(fileobj=file, mode="r:xz") as archive:
        first = archive.next()
        return first is not None and first.name.startswith(f"{name}/")


class _Spoken(Progress):
    """Progress that is said every few seconds."""

    _said_s = 0.0

    def step_in(self, what: str, count: int) -> None:
        """Work was done on something."""
        self.step(count)
        if time.perf_counter() - self._said_s > _SAY_S:
            self.say(what)
            self._said_s = time.perf_counter()


class _Told(io.BytesIO):
    """A file's content that tells how much of it was read."""

    def __init__(self, content: bytes, what: str, progress: _Spoken) -> None:
        super().__init__(content)
        self.size = len(content)
        self._what, self._progress = what, progress

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes."""
        piece = super().read(size)
        self._progress.step_in(self._what, len(piece))
        return piece


def _member(name: str, size: int) -> tarfile.TarInfo:
    """Without time and owner."""
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o644, 0
    return member


if __name__ == "__main__":
    sys.exit(main())
