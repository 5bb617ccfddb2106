"""Going on with a result: what is refused, what stays, and what a crash leaves."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, StorageError
from penstock.evaluate.number_lists import real_numbers, whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import GroupedRows, check_same, digest_of, grow
from penstock.evaluate.sitting import Sitting, sit


def asked(out: Path, *, resume: bool = True, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(out=str(out), resume=resume, json=False, **more)


def begun(kind: str = "search.speed", seed: int = 0) -> Result:
    return Result.begin(kind, [], {}, seed=seed)


def test_what_must_be_the_same_and_what_may_grow() -> None:
    former = {"model": "a", "lengths": [1, 2]}
    settings: dict[str, Any] = {"model": "a", "lengths": [2, 3], "steps": 4}
    check_same(former, settings, ["model"])
    with pytest.raises(ConfigError, match=r"cannot merge.*steps=None, not 4"):
        check_same(former, settings, ["model", "steps"], "merge")
    grow(settings, former, ["lengths"])
    assert settings["lengths"] == [1, 2, 3]


def row(group: str, method: str, **more: Any) -> dict[str, Any]:
    return {"group": group, "method": method, **more}


def key_of(found: dict[str, Any]) -> tuple[Any, ...]:
    return found["group"], found["method"]


def held(rows: Sequence[dict[str, Any]]) -> GroupedRows:
    out = GroupedRows(key_of)
    out.take_up(rows, [[("a", "x"), ("a", "y")], [("b", "x")]])
    return out


def test_rows_of_a_group_stay_until_it_is_measured_again() -> None:
    old = [row("a", "x", ms=1), row("c", "x", ms=3)]
    rows = held(old)
    assert rows.rows == old, "y is asked for beside it; nothing is lost meanwhile"
    assert rows.done == {("c", "x")}
    rows.put([row("a", "x", ms=2), row("a", "y", ms=2)], [("a", "x"), ("a", "y")])
    assert rows.rows == [old[1], row("a", "x", ms=2), row("a", "y", ms=2)]
    assert rows.done == {("a", "x"), ("a", "y"), ("c", "x")}


def test_what_failed_is_tried_again_and_what_was_refused_is_not() -> None:
    rows = [row("a", "x", ms=1), row("a", "y", error="no memory left"), row("b", "x", ms=1)]
    assert held(rows).done == {("b", "x")}
    rows[1]["refused"] = True
    assert held(rows).done == {("a", "x"), ("a", "y"), ("b", "x")}


def test_texts_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    one, two, folder = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "data"
    one.write_text("left")
    two.write_text("left")
    folder.mkdir()
    (folder / "q.jsonl").write_text("left")
    assert digest_of([]) is None
    assert digest_of([one]) == digest_of([two]) == digest_of([folder])
    assert digest_of([one, two]) != digest_of([one])
    two.write_text("right")
    assert digest_of([one]) != digest_of([two])
    with pytest.raises(ConfigError, match="cannot read"):
        digest_of([tmp_path / "none.txt"])


def test_a_sitting_goes_on_with_its_own_kind_alone(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert Sitting(begun(), asked(out)).former is None, "there is none yet"
    first = Sitting(begun(), asked(out, resume=False))
    first.keep({"rows": [1]})
    again = Sitting(begun(), asked(out))
    assert again.former is not None
    again.keep({"rows": [1, 2]})
    assert again.result.figures["minutes"] > first.result.figures["minutes"]
    for wrong, why in (
        (begun("needles"), "a result of search.speed, not of needles"),
        (begun(seed=1), "seed=0, not 1"),
    ):
        with pytest.raises(ConfigError, match=why):
            Sitting(wrong, asked(out))
    with pytest.raises(ConfigError, match="name it"):
        read_options(argparse.ArgumentParser(), ["--resume"])


class Counted:
    """Work that counts to three, and stops at a number with an error."""

    def __init__(self, stop: BaseException | None = None) -> None:
        self.rows: list[int] = []
        self._stop = stop

    def take_up(self, former: Result) -> None:
        self.rows = list(former.figures["rows"])

    def run(self, sitting: Sitting) -> None:
        for number in range(len(self.rows), 3):
            if sitting.time_is_up():
                return
            self.rows.append(number)
            sitting.keep(self.figures())
            if self._stop is not None:
                raise self._stop

    def figures(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def report(self) -> str:
        return f"counted to {len(self.rows)}"


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), ConfigError("no more"), RuntimeError("bad")])
def test_work_that_is_stopped_is_saved_and_gone_on_with(
    stop: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured is printed, unless the program itself is wrong."""
    args = asked(tmp_path / "result.json")
    with pytest.raises(type(stop)):
        sit(Sitting(begun(), args), Counted(stop), args)
    told = "" if isinstance(stop, RuntimeError) else "counted to 1\n"
    assert capsys.readouterr().out == told
    assert Result.load(args.out).figures["rows"] == [0]
    assert sit(Sitting(begun(), args), Counted(), args).figures["rows"] == [0, 1, 2]
    assert capsys.readouterr().out == "counted to 3\n"


def test_work_begins_nothing_when_the_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = asked(tmp_path / "result.json", minutes=0)
    assert sit(Sitting(begun(), args), Counted(), args).figures["rows"] == []
    assert "time is up after 0.0 minutes; --resume goes on" in capsys.readouterr().err


@pytest.mark.parametrize("left", ["", '{"format": "penstock-result-1", "kind": "se', "[]"])
def test_a_file_that_cannot_be_read_is_not_written_over(tmp_path: Path, left: str) -> None:
    out = tmp_path / "result.json"
    out.write_text(left)
    with pytest.raises(ConfigError, match="cannot resume"):
        Sitting(begun(), asked(out))
    assert out.read_text() == left


def test_a_result_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "made" / "result.json"
    begun().save(out)
    before = out.read_text()

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    later = begun()
    later.figures = {"rows": [1]}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(StorageError, match="No space left"):
            later.save(out)
    assert out.read_text() == before
    assert os.listdir(out.parent) == ["result.json"], "no half of it is left"
    later.save(out)
    assert json.loads(out.read_text())["figures"] == {"rows": [1]}


def test_what_is_no_file_is_written_to() -> None:
    begun().save(os.devnull)
    assert not Path(os.devnull).is_file()


def test_numbers_with_commas() -> None:
    assert whole_numbers("4, 2,4,", "--batches") == [4, 2]
    assert whole_numbers("0,3", "--decay", least=0) == [0, 3]
    assert whole_numbers("", "--lengths", may_be_empty=True) == []
    assert real_numbers("0.1,1", "--ratios") == [0.1, 1.0]
    for text in ("1,x", "1.5", "", ",", "0", "-1"):
        with pytest.raises(ConfigError, match="--batches takes numbers"):
            whole_numbers(text, "--batches")
    for text in ("nan", "inf", "-0.1"):
        with pytest.raises(ConfigError, match="--ratios takes numbers from 0"):
            real_numbers(text, "--ratios")
