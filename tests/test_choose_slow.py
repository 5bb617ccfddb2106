"""What `make test` leaves out: further instances, of which other tests reach all the branches."""

from pathlib import Path

import pytest

from tests import choose_slow
from tests.choose_slow import chosen, mark_slow, put_back, read_durations, shortened

PRODUCT = "tests/engine/test_it.py::test_it"
SECONDS = {
    f"{PRODUCT}[a]": 3.0, f"{PRODUCT}[b]": 2.0, f"{PRODUCT}[c]": 1.0,
    "tests/engine/test_it.py::test_once": 9.0, "tests/engine/test_it.py::test_quick[a]": 0.1,
    "tests/research/test_run.py::test_run": 5.0, "tests/research/test_run.py::test_alone": 4.0,
    "tests/research/test_few.py::test_few": 0.1, "tests/conformance/test_all.py::test_all[a]": 8.0,
}  # fmt: skip


def branches(*lines: int) -> frozenset[tuple[str, int, int]]:
    return frozenset(("a.py", line, line + 1) for line in lines)


REACHED = {
    f"{PRODUCT}[a]": branches(1, 2), f"{PRODUCT}[b]": branches(1, 3),
    f"{PRODUCT}[c]": branches(1, 2), "tests/research/test_run.py::test_run": branches(1, 2),
    "tests/research/test_run.py::test_alone": branches(4),
}  # fmt: skip


def test_instances_whose_branches_others_reach() -> None:
    found = chosen(SECONDS, REACHED)
    assert found == ["tests/research/test_run.py::test_run", f"{PRODUCT}[a]"], (
        "[b] alone reaches 3, then [c] alone 2; the last instance of the product stays"
    )
    everything = {name: branches(1) for name in SECONDS}
    found = chosen(SECONDS, everything)
    assert f"{PRODUCT}[c]" not in found
    assert set(found) == {
        f"{PRODUCT}[a]", f"{PRODUCT}[b]", "tests/research/test_run.py::test_run",
        "tests/research/test_run.py::test_alone",
    }  # fmt: skip
    assert shortened(found, SECONDS) == [
        f"{PRODUCT}[a]", f"{PRODUCT}[b]", "tests/research/test_run.py"
    ]  # fmt: skip


def test_what_was_missed_is_put_back() -> None:
    names = ["tests/research/test_run.py::test_run", f"{PRODUCT}[a]"]
    assert put_back(names, SECONDS, REACHED, branches(2, 9)) == names[:1], "[a] is the cheaper one"
    assert put_back(names, SECONDS, REACHED, branches(3)) == names


def test_a_test_with_no_instance_left_is_named_whole() -> None:
    seconds = {"a.py::t[1]": 1.0, "a.py::t[2]": 1.0, "a.py::u[1]": 1.0, "a.py::u[2 x]": 1.0}
    gone = ["a.py::t[2]", "a.py::u[2 x]", "a.py::t[1]"]
    assert shortened(gone, seconds) == ["a.py::t", "a.py::u[2 x]"]


def test_durations_are_those_of_all_phases() -> None:
    log = "2 passed\n1.50s setup    a.py::t[b c]\n0.25s call     a.py::t[b c]\n3.00s call a.py::u\n"
    assert read_durations(log) == {"a.py::t[b c]": 1.75, "a.py::u": 3.0}


class Item:
    """Stands for pytest's."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid, self.marks = nodeid, list[str]()

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def test_what_is_listed_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "slow.txt"
    listed.write_text("a.py::t\na.py::u[2 x]\nb.py\n")
    monkeypatch.setattr(choose_slow, "LIST", listed)
    items = [
        Item(name) for name in ("a.py::t[1]", "a.py::t", "a.py::u[2 x]", "b.py::t", "a.py::u[2]")
    ]
    mark_slow(items)
    assert [item.marks for item in items] == [["slow"]] * 4 + [[]]
