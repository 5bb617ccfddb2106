"""Nameless files leave no name behind, and odd names among the mounts disturb nobody."""

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import StorageError
from penstock.storage import file_space
from penstock.storage.documents import real_disk

fcntl = pytest.importorskip("fcntl")


def test_a_file_that_cannot_be_read_directly_leaves_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Linux, where such a system makes the file before it refuses to open it."""
    direct, nameless = 0o40000, getattr(os, "O_TMPFILE", 0)
    real: Any = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if nameless and flags & nameless == nameless:
            raise OSError(errno.EOPNOTSUPP, "no nameless files")
        descriptor = real(path, flags & ~direct, *rest, **more)
        if flags & direct:
            os.close(descriptor)
            raise OSError(errno.EINVAL, "no direct I/O")
        return int(descriptor)

    monkeypatch.setattr(os, "O_DIRECT", direct, raising=False)
    monkeypatch.setattr(os, "open", refuse)
    opened = file_space.open_nameless(str(tmp_path), direct=True)
    os.close(opened.descriptor)
    assert not opened.skips_cache
    assert not list(tmp_path.iterdir())


def test_somebody_elses_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.setattr("secrets.token_hex", lambda _: "name")
    (tmp_path / ".penstock-name").write_text("theirs")
    with pytest.raises(StorageError, match="cannot create a file"):
        file_space.open_nameless(str(tmp_path), direct=False)
    assert (tmp_path / ".penstock-name").read_text() == "theirs"


def test_mounts_with_spaces_in_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "/dev/a / ext4 rw 0 0\nnone /mnt/my\\040memory tmpfs rw 0 0\n"
    monkeypatch.setattr(file_space, "open", lambda *_, **__: io.StringIO(mounts), raising=False)
    monkeypatch.setattr(os.path, "realpath", str)
    assert file_space.file_system("/mnt/my memory/kv") == "tmpfs"
    assert file_space.file_system("/mnt/my") == "ext4"


def test_mounts_with_names_in_no_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = b"/dev/a / ext4 rw 0 0\n/dev/b /media/Caf\xe9 vfat rw 0 0\n/dev/c /home xfs rw 0 0\n"

    def opened(path: str, **options: Any) -> Any:
        assert path == "/proc/self/mounts"
        return io.TextIOWrapper(io.BytesIO(mounts), **options)

    monkeypatch.setattr(file_space, "open", opened, raising=False)
    monkeypatch.setattr(os.path, "realpath", str)
    assert file_space.file_system("/home/u") == "xfs"
    assert file_space.file_system(os.fsdecode(b"/media/Caf\xe9/a")) == "vfat"
    assert file_space.file_system("/var") == "ext4"


def test_volumes_without_a_full_sync_are_synced_as_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    asked: list[int] = []
    answer = errno.ENOTSUP

    def control(_: int, what: int) -> int:
        asked.append(what)
        raise OSError(answer, "full sync")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", synced.append)
    real_disk._sync(7)
    assert (asked, synced) == ([51], [7])
    answer = errno.EIO
    with pytest.raises(OSError, match="full sync"):
        real_disk._sync(7)
    assert synced == [7], "a disk that failed is not asked again"
