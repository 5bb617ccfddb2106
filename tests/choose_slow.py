"""Chooses the tests that `make test` leaves out, and writes tests/slow.txt.

What is listed costs no covered branch of src by that measure: another test reached each of them. Of
a test of the product one instance stays at least. Tests of the programs in research/ and training/
may go whole. Single tests that take long carry the mark `slow` where they stand.

    python -m pytest --cov=penstock --cov-branch --cov-context=test --durations=0 > log
    python tests/choose_slow.py .coverage log

What draws or waits does not reach the same each time, and tests with the mark count as staying.
With the coverage of a run of what was left, as a third word, the cheapest instance for each branch
that it missed stays too.
"""

import argparse
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, TypeAlias

LIST = Path(__file__).with_name("slow.txt")
"""A file, a test or an instance of one, a line."""
Branch: TypeAlias = tuple[str, int, int]
"""A file, and two of its lines."""
_ALWAYS = re.compile(r"tests/([^/]*\.py|conformance/.*|storage/documents/.*|.*exactness.*)::")
"""Rules, examples, invariants of every policy, crashes."""
_PROGRAM = re.compile(r"tests/(research|training)/")
_DURATION = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(\S.*)$", re.MULTILINE)
_LEAST_S = 0.15
"""Of an instance that may go."""
_LONG_FILE_S = 2.0
"""Of a program's tests that may go whatever each takes: what they share is dear."""


def chosen(seconds: Mapping[str, float], reached: Mapping[str, frozenset[Branch]]) -> list[str]:
    """What may go, the dearest first.

    Args:
        seconds: of each instance.
        reached: branches of src, by instance.
    """
    others = Counter(branch for branches in reached.values() for branch in branches)
    staying = Counter(function_of(name) for name in seconds)
    files: defaultdict[str, float] = defaultdict(float)
    for name, taken in seconds.items():
        files[file_of(name)] += taken
    found = []
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        of_program = _PROGRAM.match(name) is not None
        dear = of_program and files[file_of(name)] >= _LONG_FILE_S
        last = staying[function_of(name)] == 1 and not of_program
        if last or _ALWAYS.match(name) or not (dear or seconds[name] >= _LEAST_S):
            continue
        branches = reached.get(name, frozenset())
        if all(others[branch] > 1 for branch in branches):
            others.subtract(branches)
            staying[function_of(name)] -= 1
            found.append(name)
    return found


def function_of(name: str) -> str:
    """A test's name without what its instance is called."""
    return name.partition("[")[0]


def put_back(
    names: Iterable[str], seconds: Mapping[str, float], reached: Mapping[str, frozenset[Branch]],
    missed: Set[Branch],
) -> list[str]:  # fmt: skip
    """What may go of those that were chosen, when some branches were missed without them."""
    staying: set[str] = set()
    cheapest = sorted(names, key=lambda name: seconds[name])
    for branch in missed:
        staying.update([name for name in cheapest if branch in reached.get(name, ())][:1])
    return [name for name in names if name not in staying]


def file_of(name: str) -> str:
    """The file that a test stands in."""
    return name.partition("::")[0]


def shortened(names: list[str], seconds: Mapping[str, float]) -> list[str]:
    """A function's name in place of all its instances, a file's in place of all its tests."""
    gone = set(names)
    staying = seconds.keys() - gone
    for wider in (function_of, file_of):
        whole = {wider(name) for name in gone} - {wider(name) for name in staying}
        gone = {wider(name) if wider(name) in whole else name for name in gone}
    return sorted(gone)


def mark_slow(items: Iterable[Any]) -> None:
    """Mark pytest's items that are listed."""
    listed = set(LIST.read_text(encoding="utf-8").splitlines())
    for item in items:
        name: str = item.nodeid
        if listed & {name, function_of(name), file_of(name)}:
            item.add_marker("slow")


def read_durations(log: str) -> dict[str, float]:
    """Seconds of instances in pytest's list of durations."""
    found: defaultdict[str, float] = defaultdict(float)
    for taken, name in _DURATION.findall(log):
        found[name] += float(taken)
    return found


def read_branches(path: Path) -> dict[str, frozenset[Branch]]:
    """Branches of src that each instance reached, of coverage's file."""
    reached: defaultdict[str, set[Branch]] = defaultdict(set)
    with sqlite3.connect(path) as database:
        names = dict(database.execute("select id, context from context"))
        files = dict(database.execute("select id, path from file"))
        for file, context, first, last in database.execute(
            "select file_id, context_id, fromno, tono from arc"
        ):
            own = files[file].rpartition("/penstock/")[2]
            reached[names[context].rpartition("|")[0]].add((own, first, last))
    return {name: frozenset(branches) for name, branches in reached.items()}


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("coverage", type=Path, help="coverage's file, with contexts")
    parser.add_argument("log", type=Path, help="what pytest printed")
    parser.add_argument("left", type=Path, nargs="?", help="coverage's file of what was left")
    asked = parser.parse_args()
    seconds = read_durations(asked.log.read_text(encoding="utf-8"))
    reached = read_branches(asked.coverage)
    for name in reached.keys() - seconds.keys():  # pytest lists no phase below its least
        seconds[name] = 0.0
    names = chosen(seconds, reached)
    if asked.left is not None:
        left = read_branches(asked.left)
        missed = frozenset().union(*reached.values()) - frozenset().union(*left.values())
        names = put_back(names, seconds, reached, missed)
    lines = shortened(names, seconds)
    LIST.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    taken = sum(seconds[name] for name in names)
    print(f"{len(names)} of {len(seconds)} instances, {taken:.0f} of {sum(seconds.values()):.0f} s")


if __name__ == "__main__":
    main()
