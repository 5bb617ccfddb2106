"""An archive is used as it was checked, and fills no disk."""

import hashlib
import io
import lzma
import os
import tarfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.errors import ModelLoadError
from penstock.models.fetch import fetch
from penstock.models.released import Released

SIZE = 24 << 20
CONTENT = {"config.json": b"{}", "weights": bytes(range(256)) * 40}


def pack(members: list[tuple[str, bytes]], behind: bytes = b"") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return lzma.compress(packed.getvalue() + behind, preset=1)


def whole() -> bytes:
    return pack([(f"m/{name}", content) for name, content in CONTENT.items()])


def released(packed: bytes) -> Released:
    return Released(
        name="m", file="m.tar.xz", bytes=len(packed), sha256=hashlib.sha256(packed).hexdigest(),
        files=2, unpacked_bytes=sum(map(len, CONTENT.values())), url="", train="train it",
    )  # fmt: skip


def assert_nothing_left(folder: Path, *kept: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)


@pytest.mark.parametrize("how", ["another file", "the same file"])
def test_a_file_that_is_swapped_behind_the_check(how: str, tmp_path: Path) -> None:
    """Its name leads to another one, or it is written over, as soon as it has been summed up."""
    good, evil = whole(), pack([("m/config.json", b"{}"), ("m/weights", b"evil" * 2560)])
    path = tmp_path / "m.tar.xz"
    path.write_bytes(good)

    def swap(what: str, done: int, total: int) -> None:
        if done < total or not what.startswith("checking"):
            return
        if how == "another file":
            path.rename(tmp_path / "former")
            path.write_bytes(evil)
        else:
            with path.open("r+b") as file:
                file.write(evil)
                file.truncate()

    if how == "another file":
        fetch(released(good), tmp_path / "out", source=str(path), on_bytes=swap)
        assert (tmp_path / "out" / "weights").read_bytes() == CONTENT["weights"]
        return
    with pytest.raises(ModelLoadError, match=r"m.tar.xz changed while it was unpacked"):
        fetch(released(good), tmp_path / "out", source=str(path), on_bytes=swap)
    assert_nothing_left(tmp_path, "m.tar.xz")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("m/config.json", b"{}"), ("m/weights", bytes(10_241))], "more than 2 files of 10,242"),
        ([("m/config.json", b""), ("m/a", b""), ("m/b", b"")], "more than 2 files of 10,242"),
        ([("m/config.json", b"{}"), ("m/config.json", b"[]")], "holds config.json twice"),
    ],
)
def test_more_than_it_should_hold(
    members: list[tuple[str, bytes]], words: str, tmp_path: Path
) -> None:
    packed = pack(members)
    (tmp_path / "m.tar.xz").write_bytes(packed)
    with pytest.raises(ModelLoadError, match=words):
        fetch(released(packed), tmp_path / "out", source=str(tmp_path / "m.tar.xz"))
    assert_nothing_left(tmp_path, "m.tar.xz")


def pax_bomb(size: int) -> bytes:
    """A head whose names take gigabytes, all of them the same letter."""
    head = tarfile.TarInfo("m/config.json")
    head.type, head.size = tarfile.XHDTYPE, size
    return lzma.compress(head.tobuf(tarfile.USTAR_FORMAT) + b"a" * size, preset=1)


def name_bomb(size: int) -> bytes:
    head = tarfile.TarInfo("m/config.json")
    head.type, head.size = tarfile.GNUTYPE_LONGNAME, size
    return lzma.compress(head.tobuf(tarfile.GNU_FORMAT) + b"a" * size, preset=1)


def sparse_bomb(size: int) -> bytes:
    """A file that is nothing but a hole."""
    head = tarfile.TarInfo("m/config.json")
    head.type = tarfile.GNUTYPE_SPARSE
    raw = bytearray(head.tobuf(tarfile.GNU_FORMAT))
    raw[483:495] = b"%011o\0" % size
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return lzma.compress(bytes(raw))


@pytest.mark.parametrize(
    "bomb",
    [
        lambda: pax_bomb(SIZE), lambda: name_bomb(SIZE), lambda: sparse_bomb(1 << 33),
        lambda: pack([("m/config.json", bytes(SIZE))]), lambda: pack([], behind=bytes(SIZE)),
        lambda: lzma.compress(bytes(SIZE), preset=1),
    ],
    ids=["pax", "name", "sparse", "member", "behind", "zeros"],
)  # fmt: skip
def test_bombs_take_neither_memory_nor_disk(bomb: Callable[[], bytes], tmp_path: Path) -> None:
    """Each is some kilobytes that become tens of megabytes, or more."""
    packed = bomb()
    (tmp_path / "m.tar.xz").write_bytes(packed)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError):
            fetch(released(packed), tmp_path / "out", source=str(tmp_path / "m.tar.xz"))
        assert tracemalloc.get_traced_memory()[1] < SIZE // 2
    finally:
        tracemalloc.stop()
    assert_nothing_left(tmp_path, "m.tar.xz")


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE,
                                  tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE])  # fmt: skip
def test_nothing_but_plain_files(kind: bytes, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("m/config.json")
        member.type, member.linkname = kind, "m/x"
        archive.addfile(member)
    content = lzma.compress(packed.getvalue())
    (tmp_path / "m.tar.xz").write_bytes(content)
    with pytest.raises(ModelLoadError, match="which is no file of a model"):
        fetch(released(content), tmp_path / "out", source=str(tmp_path / "m.tar.xz"))
    assert_nothing_left(tmp_path, "m.tar.xz")


def test_an_archive_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.tar.xz")
    with pytest.raises(ModelLoadError, match="it is a pipe, not a file"):
        fetch(released(b""), tmp_path / "out", source=str(tmp_path))
    with pytest.raises(ModelLoadError, match="it is a device, not a file"):
        fetch(released(b""), tmp_path / "out", source="/dev/zero")


def test_its_end_may_be_anywhere(tmp_path: Path) -> None:
    """Cut off at each of some places, with a sum that is right: an error, never half a model."""
    good = whole()
    for end in range(0, len(good), max(1, len(good) // 40)):
        packed = good[:end]
        (tmp_path / "m.tar.xz").write_bytes(packed)
        with pytest.raises(ModelLoadError, match="no archive of a model"):
            fetch(released(packed), tmp_path / "out", source=str(tmp_path / "m.tar.xz"))
        assert_nothing_left(tmp_path, "m.tar.xz")
    other = replace(released(good), name="another")
    (tmp_path / "m.tar.xz").write_bytes(good)
    with pytest.raises(ModelLoadError, match="which is no file of a model"):
        fetch(other, tmp_path / "out", source=str(tmp_path / "m.tar.xz"))
