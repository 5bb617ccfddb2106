"""A library's limits: who goes for a new document, and the bytes written per day."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import ConfigError, DocumentBusyError, StorageError, StoreFullError
from penstock.storage import store
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument
from penstock.storage.documents.document_library import Library
from penstock.storage.documents.quota import LibrarySettings, check_room, make_room
from penstock.storage.documents.write_budget import WriteBudget

SHAPE = Shape(layers=1, unit_bytes=4096)
DAY_S = 86400
NOON = 20_000 * DAY_S + DAY_S // 2  # 2024-10-04 12:00 UTC
COUNT = """
import sys
from pathlib import Path
from penstock.storage.documents.write_budget import WriteBudget
budget = WriteBudget(Path(sys.argv[1]), clock=lambda: float(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(50):
    budget.add(3)
"""


class Clock:
    """Tells what it is told."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture
def library(tmp_path: Path, clock: Clock) -> Library:
    return Library(tmp_path / "library", clock=clock)


def make(library: Library, name: str, *, created: float, units: int = 8) -> Path:
    folder = library.folder(name)
    with DocumentWriter.create(folder, SHAPE) as writer:
        writer.append(0, np.zeros((units, SHAPE.padded_bytes), np.uint8))
        writer.commit(identity={}, about={"created": created}, blobs={})
    return folder


def sizes(library: Library) -> dict[str, int]:
    return {entry.name: entry.size_bytes for entry in library.entries()}


@pytest.fixture
def four(library: Library, clock: Clock) -> dict[str, int]:
    """Sizes of c, a, d, b, in the order in which they may go."""
    make(library, "a", created=NOON - 900)
    make(library, "b", created=NOON - 800)
    make(library, "c", created=NOON - 700)
    make(library, "d", created=NOON - 600)
    for name, now in (("c", NOON - 950), ("b", NOON - 100), ("a", NOON - 650)):
        clock.now = now
        library.touch(name)
    clock.now = NOON
    return sizes(library)


# Room ---------------------------------------------------------------------------------------------


def test_nobody_goes_while_there_is_room(library: Library, four: dict[str, int]) -> None:
    held = sum(four.values())
    assert make_room(library, 10, held + 10, set()) == []
    assert make_room(library, 1 << 60, None, set()) == []
    assert sizes(library) == four


def test_looking_for_room_removes_nobody(library: Library, four: dict[str, int]) -> None:
    held = sum(four.values())
    check_room(library, held, held)
    check_room(library, 1 << 60, None)
    with pytest.raises(StoreFullError, match="no room for"):
        check_room(library, held, held, {"a"})
    assert sizes(library) == four
    seen: list[str] = []
    assert make_room(library, four["c"] + 1, held, on_removed=seen.append) == seen == ["c", "a"]


def test_the_least_recently_asked_go_first(library: Library, four: dict[str, int]) -> None:
    held = sum(four.values())
    assert make_room(library, 1, held, set()) == ["c"]
    assert make_room(library, four["c"] + four["a"] + 1, held, set()) == ["a", "d"]
    assert list(sizes(library)) == ["b"]
    assert make_room(library, held, held, set()) == ["b"]
    assert make_room(Library(library.root), held, held, set()) == []


def test_kept_and_open_ones_stay(library: Library, four: dict[str, int]) -> None:
    with StoredDocument.open(library.folder("a")):
        assert make_room(library, 1, sum(four.values()), {"c", "none"}) == ["d"]
    assert list(sizes(library)) == ["a", "b", "c"]


def test_nobody_goes_for_nothing(library: Library, four: dict[str, int]) -> None:
    held = sum(four.values())
    with ExitStack() as opened:
        opened.enter_context(StoredDocument.open(library.folder("a")))
        opened.enter_context(DocumentWriter.extend(library.folder("b")))
        with pytest.raises(StoreFullError, match="no room for") as caught:
            make_room(library, four["c"] + four["d"] + 1, held, {"c"})
    with pytest.raises(StoreFullError, match="no room for"):
        make_room(library, held + 1, held, set())
    assert sizes(library) == four
    message = str(caught.value)
    assert "\n" not in message
    for part in ("a 3", "b 3", "(in use)", "c 3", "(to be kept)", "raise the limit"):
        assert part in message


def test_unreadable_ones_stay_and_are_named(library: Library, four: dict[str, int]) -> None:
    (library.folder("c") / "manifest.json").write_bytes(b"of another version")
    held = sum(sizes(library).values())
    assert make_room(library, 1, held, set()) == ["a"]
    with pytest.raises(StoreFullError, match=r"c .*\(unreadable\)"):
        make_room(library, held, held, set())
    for n in range(6):
        make(library, f"more-{n}", created=NOON, units=1)
    with pytest.raises(StoreFullError, match=r", 4 more "):
        make_room(library, 1 << 40, held, set())


def test_files_of_others_keep_a_document(library: Library, four: dict[str, int]) -> None:
    (library.folder("c") / "thesis.txt").write_text("mine")
    assert make_room(library, 1, sum(sizes(library).values()), set()) == ["a"]
    with pytest.raises(StoreFullError, match=r"c .*\(with files that are not ours\)"):
        make_room(library, four["c"], four["c"], set())
    assert list(sizes(library)) == ["b", "c", "d"]


def test_leftovers_of_a_killed_writer_go_first(library: Library, four: dict[str, int]) -> None:
    (library.folder("d") / "manifest.json").unlink()
    assert make_room(library, 1, sum(sizes(library).values()), set()) == ["d"]


def test_times_that_a_wrong_clock_put_ahead(library: Library) -> None:
    make(library, "ahead", created=NOON + 100 * DAY_S)
    make(library, "late", created=NOON - 2)
    assert make_room(library, 1, sum(sizes(library).values()), set()) == ["late"]
    make(library, "now", created=NOON)
    assert make_room(library, 1, sum(sizes(library).values()), set()) == ["ahead"]


def test_opened_between_the_look_and_the_removal(
    library: Library, four: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = library.remove

    def remove(name: str) -> None:
        if name == "c":
            raise DocumentBusyError("just opened")
        if name == "a":
            real(name)  # somebody else did
        real(name)

    monkeypatch.setattr(library, "remove", remove)
    need_bytes = four["a"] + four["d"]
    assert make_room(library, need_bytes, sum(four.values()), set()) == ["d"]
    with pytest.raises(StoreFullError, match=r"c .*\(in use\)"):
        make_room(library, four["b"] + four["c"], four["b"] + four["c"], set())


# Limits that stay ---------------------------------------------------------------------------------


def test_settings(library: Library) -> None:
    assert library.settings == LibrarySettings(None, None)
    library.set_limits(LibrarySettings(max_disk_bytes=10, writes_per_day_bytes=20))
    again = Library(library.root)
    assert again.settings == LibrarySettings(10, 20)
    assert again.write_budget.limit_bytes == 20
    again.set_limits(again.settings._replace(max_disk_bytes=None))
    assert library.settings == LibrarySettings(None, 20)
    assert (library.root / "library-settings.json").stat().st_mode & 0o777 == 0o600
    for bad in (0, -1, 1 << 64):
        with pytest.raises(ConfigError, match="max_disk_bytes"):
            library.set_limits(LibrarySettings(max_disk_bytes=bad))
    assert library.settings == LibrarySettings(None, 20)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"max_disk_bytes": "10"}', b'{"max_disk_bytes": -1}', b"\xff",
                b'{"writes_per_day_bytes": true}', b'{"writes_per_day_bytes": 0}']
)  # fmt: skip
def test_damaged_settings_are_no_licence(library: Library, content: bytes) -> None:
    path = library.root / "library-settings.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        _ = library.settings
    assert library.entries() == []
    library.set_limits(LibrarySettings(10, None))
    assert library.settings == LibrarySettings(10, None)


# Bytes written ------------------------------------------------------------------------------------


def test_days(tmp_path: Path, clock: Clock) -> None:
    budget = WriteBudget(tmp_path, clock=clock)
    assert (budget.today_bytes, budget.total_bytes, budget.days()) == (0, 0, {})
    assert not list(tmp_path.iterdir())
    budget.add(5)
    budget.add(0)
    clock.now += DAY_S // 2 - 1
    budget.add(6)
    assert budget.today_bytes == 11
    clock.now += 1
    assert budget.today_bytes == 0
    for _ in range(40):
        budget.add(7)
        clock.now += DAY_S
    assert WriteBudget(tmp_path).total_bytes == budget.total_bytes == 11 + 40 * 7
    assert list(budget.days().values()) == [7] * 30
    assert min(budget.days()) == "2024-10-15"


def test_limit(tmp_path: Path, clock: Clock) -> None:
    budget = WriteBudget(tmp_path, 100, clock=clock)
    budget.require(100)
    budget.add(60)
    budget.require(40)
    with pytest.raises(ConfigError, match="try again from 2024-10-05 00:00 UTC"):
        budget.require(41)
    with pytest.raises(ConfigError, match="a whole day's"):
        budget.require(101)
    clock.now += DAY_S
    budget.require(100)
    WriteBudget(tmp_path, None, clock=clock).require(1 << 50)
    with pytest.raises(ConfigError, match="whole day"):
        WriteBudget(tmp_path, 0, clock=clock).require(1)


def test_clock_that_goes_back(tmp_path: Path, clock: Clock) -> None:
    budget = WriteBudget(tmp_path, 100, clock=clock)
    budget.add(60)
    clock.now -= DAY_S
    budget.add(50)
    clock.now += DAY_S
    assert budget.today_bytes == 60
    clock.now += 1000 * DAY_S
    budget.add(1)
    clock.now -= 1000 * DAY_S
    budget.add(2)
    assert budget.today_bytes == 2
    assert budget.total_bytes == 113
    assert all(count >= 0 for count in budget.days().values())


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"days": {}}', b'{"total_bytes": 5}',
        b'{"days": {"2024-10-04": -1}, "total_bytes": 5}', b'{"days": {}, "total_bytes": -5}',
        b'{"days": {"today": 1}, "total_bytes": 5}', b'{"days": [], "total_bytes": 5}',
        b'{"days": {}, "total_bytes": 1e400}', b'{"days": {}, "total_bytes": true}',
        b'{"days": {}, "total_bytes": 1' + b"0" * 400 + b"}", b" " * 2**21,
    ],
    ids=range(16),
)  # fmt: skip
def test_damaged_counts_are_begun_anew(tmp_path: Path, clock: Clock, content: bytes) -> None:
    (tmp_path / "writes.json").write_bytes(content)
    budget = WriteBudget(tmp_path, 100, clock=clock)
    assert (budget.today_bytes, budget.total_bytes) == (0, 0)
    assert "begun anew" in str(budget.notice)
    budget.require(100)
    budget.add(5)
    assert (budget.today_bytes, budget.total_bytes, budget.notice) == (5, 5, None)


def test_a_total_below_its_days_is_their_sum(tmp_path: Path, clock: Clock) -> None:
    content = {"days": {"2024-10-04": 7, "2024-10-03": 8}, "total_bytes": 3}
    (tmp_path / "writes.json").write_text(json.dumps(content))
    budget = WriteBudget(tmp_path, clock=clock)
    assert (budget.today_bytes, budget.total_bytes, budget.notice) == (7, 15, None)


def test_counts_that_are_no_file(tmp_path: Path, clock: Clock) -> None:
    budget = WriteBudget(tmp_path, clock=clock)
    target = tmp_path / "target"
    target.write_text('{"days": {}, "total_bytes": 9}')
    (tmp_path / "writes.json").symlink_to(target)
    assert (budget.total_bytes, "symbolic link" in str(budget.notice)) == (0, True)
    budget.add(1)
    assert target.read_text() == '{"days": {}, "total_bytes": 9}'
    (tmp_path / "writes.json").unlink()
    (tmp_path / "writes.json").mkdir()
    assert (budget.total_bytes, "not a file" in str(budget.notice)) == (0, True)
    with pytest.raises(StorageError, match=r"writes\.json"):
        budget.add(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "writes.json"]
    with pytest.raises(StorageError):
        WriteBudget(tmp_path / "none").add(1)


def test_a_full_disk_keeps_the_old_counts(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = WriteBudget(tmp_path, clock=clock)
    budget.add(5)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFullError, match="no room"):
        budget.add(5)
    assert budget.total_bytes == 5
    assert [path.name for path in tmp_path.iterdir()] == ["writes.json"]


def test_two_processes_lose_no_counts(tmp_path: Path, clock: Clock) -> None:
    root = str(Path(store.__file__).parents[2])
    command = [sys.executable, "-c", COUNT, str(tmp_path), str(NOON)]
    env = {**os.environ, "PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", "")}
    others = [
        subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for other in others:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
    for other in others:
        assert other.stdin is not None
        other.stdin.write("\n")
        other.stdin.flush()
    budget = WriteBudget(tmp_path, clock=clock)
    for _ in range(50):
        budget.add(3)
    assert [other.communicate(timeout=60) and other.returncode for other in others] == [0, 0]
    assert budget.today_bytes == budget.total_bytes == 450
    assert budget.notice is None
