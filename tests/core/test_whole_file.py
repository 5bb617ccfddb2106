"""Files are replaced whole, and only those that Penstock wrote."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.atomic_write import FileKind, json_kind, require_own, write_atomically
from penstock.core.errors import ConfigError

KIND = json_kind("list of penstock", "penstock-list-")


@pytest.mark.parametrize(
    "content",
    ['{"format": "penstock-list-1", "a": 1}', '\n { "a": 0,\n"format" : "penstock-list-9"}', ""],
)
def test_its_own_may_be_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content)
    require_own(tmp_path / "file", KIND, "--out")


@pytest.mark.parametrize(
    "content",
    [
        b'{"format": "penstock-result-1"}', b'{"model_type": "llama"}', b"\0\1\2", b"\n",
        b'["format", "penstock-list-1"]', b'"format": "penstock-list-1"', "Notes".encode("utf-16"),
        b'{"notes": "' + b"x" * (1 << 17) + b'", "format": "penstock-list-1"}',
    ],
)  # fmt: skip
def test_nothing_else_is(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^--out .*file is there already and is no list of pens"):
        require_own(tmp_path / "file", KIND, "--out")
    assert (tmp_path / "file").read_bytes() == content


def test_what_cannot_be_read_is_not_its_own(tmp_path: Path) -> None:
    def fail(_: object) -> bool:
        raise RuntimeError("of a library")

    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="or give up"):
        require_own(tmp_path / "file", FileKind("thing", fail), "--x", advice=", or give up")


def test_what_is_no_file_may_be_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path / "pipe", Path("/dev/null")):
        require_own(path, KIND, "--out")
    write_atomically("x", Path("/dev/null"))
    with pytest.raises(OSError, match="no process reads from the pipe"):
        write_atomically("x", tmp_path / "pipe")
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print(len(open(sys.argv[1]).read()))",
         str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True,
    ) as reader:  # fmt: skip
        write_when_read(tmp_path / "pipe")
        assert reader.communicate(timeout=60)[0] == "200000\n"


def write_when_read(pipe: Path) -> None:
    """More than a pipe holds, as soon as somebody reads."""
    while True:
        try:
            write_atomically("x" * 200_000, pipe)
        except OSError:
            continue
        return


def test_a_file_keeps_its_mode_and_links_lead_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o600)
    (tmp_path / "link").symlink_to("file")
    write_atomically(b"new", tmp_path / "link")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "link").is_symlink()
    name = tmp_path / ("n" * 250)
    write_atomically("a name as long as names can be", name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "n" * 250]


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("old")

    def fail(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr("penstock.core.atomic_write.os.replace", fail)
    with pytest.raises(OSError, match="full"):
        write_atomically("new", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"
