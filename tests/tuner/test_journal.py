"""The journal: no measurement is lost, and none is taken for another's."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, StorageError
from penstock.tuner.journal import Journal

ABOUT = {"model": "m", "versions": {"torch": "2", "penstock": "1"}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.jsonl"


def answers(value: object, calls: list[object]) -> Callable[[], object]:
    def measure() -> object:
        calls.append(value)
        return value

    return measure


def never() -> object:
    raise AssertionError("this was measured before")


def test_an_interrupted_run_goes_on(path: Path) -> None:
    first, calls = Journal(path, ABOUT), list[object]()
    value = {"step_s": 0.25, "reads": 12, "list": [1, None, "ü\u2028\n"], "ok": True}
    assert first.measured({"run": 1, "batch": 2}, answers(value, calls)) == value
    assert first.measured({"run": 2}, answers(3.5, calls)) == 3.5
    assert (first.made, len(first.used), len(calls)) == (2, 2, 2)

    second = Journal(path, dict(reversed(ABOUT.items())))  # the order says nothing
    assert second.knows({"batch": 2, "run": 1})
    assert not second.knows({"run": 1})
    assert second.measured({"batch": 2, "run": 1}, never) == value
    assert second.measured({"run": 2}, never) == 3.5
    assert second.measured({"run": 3}, answers([4], calls)) == [4]
    assert (second.made, len(second.used)) == (1, 3)
    assert Journal(path, ABOUT).recall({"run": 3}) == [4]


def test_each_measurement_is_on_disk_at_once(path: Path) -> None:
    journal = Journal(path, ABOUT)

    def measure() -> int:
        assert Journal(path, ABOUT).recall({"run": 1}) == 10, "made before this one began"
        return 20

    journal.note({"run": 1}, 10)
    journal.measured({"run": 2}, measure)
    assert Journal(path, ABOUT).recall({"run": 2}) == 20


def test_what_is_made_and_what_is_used(path: Path) -> None:
    """What a result rests on is counted once, however often it is asked for."""
    first = Journal(path, ABOUT)
    for run in range(4):
        first.note({"run": run}, run)
    assert (first.made, len(first.used)) == (4, 4)
    journal = Journal(path, ABOUT)
    assert (journal.made, len(journal.used)) == (0, 0), "known, but not asked for"
    assert journal.knows({"run": 1})
    for _ in range(2):
        assert journal.measured({"run": 1}, never) == 1
        assert journal.recall({"run": 2}) == 2
        journal.measured({"run": 9}, lambda: 9)
    assert (journal.made, len(journal.used)) == (1, 3)


@pytest.mark.parametrize("cut", [1, 2, 9, 30])
def test_a_torn_last_line(path: Path, cut: int) -> None:
    """The machine went down in the middle of a write: one measurement is lost, and no later one."""
    journal = Journal(path, ABOUT)
    for run in range(3):
        journal.note({"run": run}, {"value": 100 + run})
    os.truncate(path, path.stat().st_size - cut)
    again = Journal(path, ABOUT)
    assert [again.knows({"run": run}) for run in range(3)] == [True, True, cut == 1]
    again.note({"run": 2}, {"value": 202})
    again.note({"run": 3}, {"value": 203})
    third = Journal(path, ABOUT)
    values = [third.recall({"run": run})["value"] for run in range(4) if third.knows({"run": run})]
    assert values == [100, 101, 202, 203]


def test_rubbish_between_the_lines(path: Path) -> None:
    Journal(path, ABOUT).note({"run": 1}, 1)
    with path.open("a", encoding="utf-8") as file:
        file.write('\0\0\0\n[1, 2]\n"text"\n{"key": "no value"}\nnull\n\n')
    again = Journal(path, ABOUT)
    assert again.measured({"run": 1}, never) == 1
    again.note({"run": 2}, 2)
    assert Journal(path, ABOUT).measured({"run": 2}, never) == 2


def test_another_head_starts_anew(path: Path) -> None:
    Journal(path, ABOUT).note({"run": 1}, 1)
    other = Journal(path, {**ABOUT, "model": "other"})
    assert not other.knows({"run": 1})
    other.note({"run": 1}, 7)
    assert Journal(path, {**ABOUT, "model": "other"}).recall({"run": 1}) == 7
    assert not Journal(path, ABOUT).knows({"run": 1}), "the first one's is gone"
    path.write_text("", encoding="utf-8")
    assert not Journal(path, ABOUT).knows({"run": 1}), "and so is an empty file's"


def test_nothing_is_kept_without_a_path() -> None:
    journal = Journal(None, ABOUT)
    assert journal.measured({"run": 1}, lambda: 5) == 5
    assert journal.measured({"run": 1}, never) == 5
    journal.remove()


def test_a_finished_run_leaves_nothing(path: Path) -> None:
    journal = Journal(path, ABOUT)
    journal.note({"run": 1}, 1)
    journal.remove()
    assert not path.exists()
    journal.remove()


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for bad in (tmp_path, tmp_path / "none" / "j", tmp_path / "file" / "j", Path("/proc/none")):
        with pytest.raises(StorageError, match="cannot write") as caught:
            Journal(bad, ABOUT)
        assert str(bad) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_of_something_else_is_left_alone(path: Path) -> None:
    for content in (b"\xff\xfe\x00 not text", json.dumps({"format": "other"}).encode()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is there already and is no journal"):
            Journal(path, ABOUT)
        assert path.read_bytes() == content


def test_a_journal_that_is_no_text_is_left_alone(path: Path) -> None:
    path.write_bytes(b'{"format": "penstock-tuning-1"}\n\xff\n')
    with pytest.raises(StorageError, match="cannot write"):
        Journal(path, ABOUT)
    assert path.read_bytes().endswith(b"\xff\n")


def test_unplugged(tmp_path: Path) -> None:
    """The disk goes away between two measurements."""
    folder = tmp_path / "stick"
    folder.mkdir()
    journal = Journal(folder / "j", ABOUT)
    journal.note({"run": 1}, 1)
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match="cannot write"):
        journal.note({"run": 2}, 2)


def test_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, ABOUT)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            journal.note({"run": 1}, 1)
    journal.note({"run": 2}, 2)
    assert Journal(path, ABOUT).knows({"run": 2})
