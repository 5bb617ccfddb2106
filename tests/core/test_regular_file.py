"""Whatever a person names as a file is read at once, or refused in words."""

import errno
import os
import socket
from pathlib import Path

import pytest

from penstock.core.regular_file import open_regular, read_regular, read_regular_text


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Things that are no files, by name."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("text")
    return {path.name: path for path in tmp_path.iterdir()} | {
        "zero": Path("/dev/zero"), "null": Path("/dev/null"), "below": tmp_path / "file" / "x",
        "nul": Path("a\0b"), "half": Path("\ud800"), "long": tmp_path / ("n" * 300),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pipe", "it is a pipe, not a file"), ("link", "it is a pipe, not a file"),
        ("folder", "it is a folder, not a file"), ("zero", "it is a device, not a file"),
        ("null", "it is a device, not a file"), ("nul", "no file has such a name"),
        ("half", "no file has such a name"), ("below", os.strerror(errno.ENOTDIR)),
        ("loop", os.strerror(errno.ELOOP)), ("long", os.strerror(errno.ENAMETOOLONG)),
    ],
)  # fmt: skip
def test_what_is_no_file(name: str, words: str, places: dict[str, Path]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=words) as caught:
        open_regular(places[name])
    assert caught.value.strerror == words
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # such a name has to be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        with pytest.raises(OSError, match="a socket, not a file"):
            open_regular("socket")


def test_no_more_is_read_than_may_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcd")
    assert read_regular(path, 4) == b"abcd"
    with pytest.raises(OSError, match="more than 3 bytes") as caught:
        read_regular(path, 3)
    assert caught.value.errno == errno.EFBIG
    with path.open("wb") as file:
        file.truncate(1 << 40)  # it takes no room, and would take all memory
    with pytest.raises(OSError, match="more than 1,000,000 bytes"):
        read_regular(path, 1_000_000)


def test_files_that_say_that_they_are_empty_are_read(tmp_path: Path) -> None:
    """Those of /proc have no size."""
    assert read_regular("/proc/self/status", 1 << 20).startswith(b"Name:")
    (tmp_path / "text").write_text("Grüße", encoding="utf-8")
    assert read_regular_text(tmp_path / "text") == "Grüße"
