"""A library's documents, what is told of them, their usage, and what is garbage."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError, DocumentBusyError, StorageError
from penstock.storage import store
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument
from penstock.storage.documents.document_library import Library
from penstock.storage.documents.quota import LibrarySettings

SHAPE = Shape(layers=1, unit_bytes=100)
ABOUT: dict[str, Any] = {
    "title": "A title",
    "tokens": 9,
    "model": "m",
    "policy": "kvswap",
    "created": 100.5,
}
COUNT = """
import sys
from pathlib import Path
from penstock.storage.documents.document_library import Library
library = Library(Path(sys.argv[1]))
for _ in range(50):
    library.add_written("a", 3)
    library.touch("a")
"""


class Clock:
    """Tells what it is told."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "library", clock=Clock(1000.0))


def make(
    library: Library, name: str, *, units: int = 1, key: bytes | None = None, **about: Any
) -> Path:
    folder = library.folder(name)
    with DocumentWriter.create(folder, SHAPE, key=key) as writer:
        writer.append(0, np.full((units, SHAPE.padded_bytes), 7, np.uint8))
        writer.commit(identity={}, about=about, blobs={})
    return folder


def leave_unfinished(library: Library, name: str) -> Path:
    """As a writer that was killed leaves it."""
    folder = library.folder(name)
    subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)], env=environment(), timeout=60, check=False
    )
    return folder


KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.storage.documents import DocumentWriter, Shape
writer = DocumentWriter.create(Path(sys.argv[1]), Shape(layers=1, unit_bytes=100))
os.kill(os.getpid(), signal.SIGKILL)
"""


def environment() -> dict[str, str]:
    root = str(Path(store.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", "")}


def names(library: Library) -> list[str]:
    return [entry.name for entry in library.entries()]


# The folder ---------------------------------------------------------------------------------------


def test_root(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*a for the library; make it"):
        Library(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    old = os.umask(0)
    try:
        library = Library(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    assert library.root.stat().st_mode & 0o777 == 0o700
    assert library.entries() == []
    (tmp_path / "link").symlink_to(library.root)
    linked = Library(tmp_path / "link")
    make(linked, "doc")
    assert names(library) == names(linked) == ["doc"]


def test_root_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    for place in (tmp_path / "file", tmp_path / "file" / "library", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="not a folder"):
            Library(place)
    with pytest.raises(StorageError, match="library"):
        Library(Path("/proc/nowhere"))
    gone = Library(tmp_path / "gone")
    gone.root.rmdir()
    for call in (gone.entries, gone.collect_garbage, lambda: gone.set_limits(LibrarySettings())):
        with pytest.raises(StorageError):
            call()


def test_folder_refuses_links_files_and_escapes(library: Library, tmp_path: Path) -> None:
    elsewhere = Library(tmp_path / "elsewhere")
    target = make(elsewhere, "doc")
    (library.root / "link").symlink_to(target)
    (library.root / "dangling").symlink_to(tmp_path / "none")
    (library.root / "file").write_text("")
    for name in ("link", "dangling", "file"):
        for call in (library.folder, library.remove, library.touch, library.is_open):
            with pytest.raises(ConfigError, match=r"link|not a folder"):
                call(name)
    for name in ("..", "../elsewhere/doc", str(target), ""):
        for call in (library.folder, library.remove, library.touch):
            with pytest.raises(ConfigError, match="name"):
                call(name)
    assert library.entries() == []
    assert names(elsewhere) == ["doc"]
    assert not (target / "usage.json").exists()


# What is told -------------------------------------------------------------------------------------


def test_entries(library: Library) -> None:
    make(library, "b", units=3, **ABOUT)
    make(library, "a")
    library.touch("b")
    library.touch("b")
    library.add_written("b", 5)
    library.add_written("b", 6)
    bare, full = library.entries()
    assert (bare.name, bare.state, bare.encrypted) == ("a", "ready", False)
    assert (bare.title, bare.tokens, bare.model, bare.policy) == (None, None, None, None)
    assert (bare.last_asked, bare.asks, bare.written_bytes) == (None, 0, 0)
    assert bare.created == pytest.approx((library.root / "a" / "manifest.json").stat().st_mtime)
    assert (full.name, full.state, full.generation) == ("b", "ready", bare.generation)
    assert (full.title, full.tokens, full.model, full.policy) == ("A title", 9, "m", "kvswap")
    assert (full.created, full.last_asked, full.asks) == (100.5, 1000.0, 2)
    assert full.written_bytes == 11
    assert full.size_bytes >= bare.size_bytes + 2 * SHAPE.padded_bytes > 3 * SHAPE.padded_bytes


def test_about_of_other_types(library: Library) -> None:
    make(library, "a", title=3, tokens=True, model=["m"], policy=None, created="yesterday")
    make(library, "b", tokens=-1, created=-5)
    for entry in library.entries():
        assert entry.state == "ready"
        assert (entry.title, entry.tokens, entry.model, entry.policy) == (None, None, None, None)
        assert entry.created is not None
        assert entry.created > 1e9


def test_encrypted(library: Library) -> None:
    key = bytes(range(32))
    make(library, "a", key=key, **ABOUT)
    closed, opened, wrong = (
        library.entries(each)[0] for each in (None, key, bytes(32))
    )  # fmt: skip
    assert (closed.state, closed.encrypted, closed.title) == ("ready", True, None)
    assert (opened.state, opened.encrypted, opened.title) == ("ready", True, "A title")
    assert opened.created == 100.5
    assert wrong == closed


def test_unreadable_and_unfinished(library: Library) -> None:
    (make(library, "damaged") / "manifest.json").write_bytes(b"\0\xff{")
    leave_unfinished(library, "left")
    (library.root / "foreign").mkdir()
    (library.root / "foreign" / "notes.txt").write_text("mine")
    damaged, left = library.entries()
    assert damaged.state.startswith("unreadable: ")
    assert damaged.size_bytes > 0
    assert (left.name, left.state) == ("left", "unfinished")


# Usage --------------------------------------------------------------------------------------------


def test_touch_with_a_clock_that_goes_back(library: Library) -> None:
    make(library, "a")
    assert isinstance(library.clock, Clock)
    seen = []
    for now in (5000.0, 4000.0, 6000.0, 1e9, 7000.0):
        library.clock.now = now
        library.touch("a")
        seen.append(library.entries()[0].last_asked)
    assert seen == [5000.0, 5000.0, 6000.0, 1e9, 7000.0]
    assert library.entries()[0].asks == 5


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, b'{"asks": -1, "last_asked": NaN}',
        b'{"asks": true, "last_asked": "now", "written_bytes": 1.5}', b"1" * 10_000, b" " * 2**21,
        b'{"asks": 1' + b"0" * 400 + b', "last_asked": 1e999}',
    ],
    ids=range(11),
)  # fmt: skip
def test_damaged_usage(library: Library, content: bytes) -> None:
    usage = make(library, "a") / "usage.json"
    usage.write_bytes(content)
    entry = library.entries()[0]
    assert (entry.state, entry.last_asked, entry.asks, entry.written_bytes) == ("ready", None, 0, 0)
    library.touch("a")
    library.add_written("a", 2)
    entry = library.entries()[0]
    assert (entry.last_asked, entry.asks, entry.written_bytes) == (1000.0, 1, 2)
    assert usage.stat().st_mode & 0o777 == 0o600


def test_usage_that_is_no_file(library: Library, tmp_path: Path) -> None:
    usage = make(library, "a") / "usage.json"
    target = tmp_path / "target"
    target.write_text(json.dumps({"asks": 5}))
    usage.symlink_to(target)
    assert library.entries()[0].asks == 0
    library.touch("a")
    assert json.loads(target.read_text()) == {"asks": 5}
    assert library.entries()[0].asks == 1
    usage.unlink()
    os.mkfifo(usage)
    assert library.entries()[0].asks == 0
    usage.unlink()
    usage.mkdir()
    library.touch("a")  # cannot be noted, and does not fail
    assert library.entries()[0].asks == 0
    assert not list(usage.parent.glob("*.partial"))


def test_touch_never_fails(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.touch("none")
    assert not (library.root / "none").exists()
    make(library, "a")
    monkeypatch.setattr(os, "replace", lambda *paths: os.rename("/none", "/none"))
    library.touch("a")
    with pytest.raises(StorageError):
        library.add_written("a", 1)
    assert not list((library.root / "a").glob("*.partial"))


def test_two_processes_and_two_threads_lose_no_counts(library: Library) -> None:
    make(library, "a")
    command = [sys.executable, "-c", COUNT, str(library.root)]
    others = [subprocess.Popen(command, env=environment()) for _ in range(2)]

    def count() -> None:
        for _ in range(50):
            library.add_written("a", 3)
            library.touch("a")

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [other.wait(60) for other in others] == [0, 0]
    entry = library.entries()[0]
    assert (entry.asks, entry.written_bytes) == (200, 600)
    assert library.write_budget.total_bytes == 600


# Removal ------------------------------------------------------------------------------------------


def test_remove(library: Library) -> None:
    folder = make(library, "a")
    library.touch("a")
    with StoredDocument.open(folder):
        assert library.is_open("a")
        with pytest.raises(DocumentBusyError):
            library.remove("a")
    assert not library.is_open("a")
    assert not library.is_open("none")
    (folder / "usage.json.0123456789abcdef.partial").write_text("of a killed process")
    library.remove("a")
    assert not folder.exists()
    assert library.entries() == []


def test_unknown_name_lists_the_nearest(library: Library) -> None:
    with pytest.raises(ConfigError, match="none yet"):
        library.remove("report")
    for name in ("report-1", "report-2", "report-3", "report-4", "report-5", "report-6", "novel"):
        make(library, name)
    with pytest.raises(
        ConfigError, match=r"it has report-1, (report-\d, ){3}report-\d and 2 more"
    ) as caught:
        library.remove("report-11")
    assert "novel" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"it has novel, report-1, .* and 2 more"):
        library.remove("zzz")
    (library.root / "foreign").mkdir()
    with pytest.raises(ConfigError, match="no stored document"):
        library.remove("foreign")
    assert len(library.entries()) == 7


# Garbage ------------------------------------------------------------------------------------------


def test_garbage(library: Library, tmp_path: Path) -> None:
    root = library.root
    make(library, "good")
    (make(library, "damaged") / "manifest.json").write_bytes(b"junk")
    leave_unfinished(library, "left")
    strays = [root / "good" / "usage.json.0123456789abcdef.partial",
              root / "writes.json.0123456789abcdef.partial"]  # fmt: skip
    for stray in strays:
        stray.write_bytes(b"12345")
    library.add_written("good", 1)
    library.set_limits(LibrarySettings(1 << 30, None))
    foreign = [root / "notes.txt", root / "other" / "data", root / ".cache", root / "nul"]
    (root / "other").mkdir()
    for path in foreign:
        path.write_text("mine")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "lock").write_text("")
    (root / "link").symlink_to(tmp_path / "target")
    with DocumentWriter.create(root / "growing", SHAPE) as writer:
        collected = library.collect_garbage()
        writer.append(0, np.zeros((1, SHAPE.padded_bytes), np.uint8))
        writer.commit(identity={}, about={}, blobs={})
    assert collected.removed == ["left"]
    assert collected.busy == ["growing"]
    assert collected.failed == []
    assert collected.stray_files == [str(stray.relative_to(root)) for stray in reversed(strays)]
    assert collected.freed_bytes >= 10
    assert collected.left_alone == [".cache", "link", "notes.txt", "nul", "other"]
    assert [path.read_text() for path in foreign] == ["mine"] * 4
    assert (tmp_path / "target" / "lock").exists()
    assert names(library) == ["damaged", "good", "growing"]
    again = library.collect_garbage()
    assert again._replace(left_alone=[]) == ([], [], 0, [], [], [])
    assert library.settings.max_disk_bytes == 1 << 30
    assert library.write_budget.total_bytes == 1


def test_a_document_that_is_finished_just_then_is_no_garbage(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_unfinished(folder: Path) -> bool:
        writer.commit(identity={}, about={}, blobs={})
        writer.close()
        return True

    writer = DocumentWriter.create(library.folder("a"), SHAPE)
    monkeypatch.setattr("penstock.storage.documents.document_library.is_unfinished", is_unfinished)
    collected = library.collect_garbage()
    assert (collected.removed, collected.busy, collected.failed) == ([], ["a"], [])
    StoredDocument.open(library.folder("a")).close()


def test_unfinished_with_files_of_others_is_no_garbage(library: Library) -> None:
    folder = leave_unfinished(library, "a")
    (folder / "thesis.txt").write_text("mine")
    assert library.collect_garbage().removed == []
    assert library.entries()[0].state.startswith("unreadable")
    with pytest.raises(StorageError, match="thesis"):
        library.remove("a")
    assert (folder / "thesis.txt").read_text() == "mine"
    (folder / "thesis.txt").unlink()
    assert library.collect_garbage().removed == ["a"]
