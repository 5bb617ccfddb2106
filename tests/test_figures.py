"""Every number in the tables of these pages is looked up in a result, or is what `plan` says.

`figures.toml` says, for each row of each table, where its numbers are: one expression for each
number, in their order, over the JSON document that the row links, or else the lines above the
table. Numbers that are part of a name (Qwen3-0.6B, H200) are not figures.
"""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from penstock.tuner.model_sizes import model_sizes

TOP = Path(__file__).parents[1]
PAGES = ("README.md", "docs/benchmarks.md", "docs/internals/many-hosts.md")
WHERE: dict[str, dict[str, list[str]]] = tomllib.loads(
    (Path(__file__).with_name("figures.toml")).read_text()
)
RESULT = re.compile(r"\]\(((?:\.\./)*benchmarks/results/[\w.-]+\.json)\)")
LINK_TARGET = re.compile(r"\]\([^)]*\)")
NUMBER = re.compile(r"(?<![\w./-])(\d+/\d+|\d[\d,]*(?:\.\d+)?)")

pytestmark = pytest.mark.skipif(
    not (TOP / "benchmarks" / "results").is_dir(),
    reason="the results are in the repository, not in this archive of its source",
)


@dataclass(frozen=True)
class Row:
    """One row of a table: what it is called, its numbers as printed, the results it may be of."""

    label: str
    numbers: tuple[str, ...]
    results: tuple[str, ...]


def table_rows(text: str) -> Iterator[Row]:
    """The rows of all tables of a page; a header is called by all of its cells."""
    lines = text.splitlines()
    above = ""
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            # A result that is linked in the last paragraph in front of a table is the table's.
            above = "" if line.startswith("#") else above if not line else line + above
            if line and number and not lines[number - 1]:
                above = line
            continue
        if set(line) <= set("|-: "):
            continue
        cells = [LINK_TARGET.sub("]", cell).strip() for cell in line.strip("|").split("|")]
        is_header = not lines[number - 1].startswith("|")
        yield Row(
            label=" | ".join(cells) if is_header else cells[0],
            numbers=tuple(NUMBER.findall(" | ".join(cells))),
            results=tuple(RESULT.findall(line) or dict.fromkeys(RESULT.findall(above))),
        )


def one(dicts: list[dict[str, Any]], **where: object) -> dict[str, Any]:
    """The only one that has these values."""
    [found] = [each for each in dicts if all(each.get(k) == v for k, v in where.items())]
    return found


def plan(model: str, context: int) -> int:
    """Bytes of a context's whole cache, as `penstock plan` has them."""
    return model_sizes(model).shape.full_cache_bytes(1, context)


def look_up(expression: str, result: dict[str, Any]) -> object:
    """What an expression of `figures.toml` is in a result."""
    return eval(
        expression,
        {
            "__builtins__": {"int": int, "len": len, "sum": sum, "min": min, "max": max},
            "one": one, "median": median, "plan": plan, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
        },
        {"figures": result["figures"], "settings": result["settings"]},
    )  # fmt: skip


def rounds_to(value: object, printed: str) -> bool:
    """Whether a figure, rounded to the digits that are printed, is what is printed."""
    if "/" in printed or isinstance(value, str):
        return value == printed
    assert isinstance(value, int | float)
    plain = printed.replace(",", "")
    decimals = len(plain.partition(".")[2])
    return abs(value - float(plain)) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


def faults(page: str, text: str) -> list[str]:
    """What is wrong with the figures of a page, one line each."""
    where = dict(WHERE[page])
    found = []
    for row in table_rows(text):
        expressions = where.pop(row.label, [])
        if len(expressions) != len(row.numbers):
            found.append(f"{row.label}: {len(row.numbers)} numbers, {len(expressions)} places")
        elif row.numbers and len(row.results) != 1:
            found.append(f"{row.label}: links {len(row.results)} results, not one")
        elif row.numbers:
            result = json.loads((TOP / page).parent.joinpath(row.results[0]).read_text())
            for printed, expression in zip(row.numbers, expressions, strict=True):
                value = look_up(expression, result)
                if not rounds_to(value, printed):
                    found.append(f"{row.label}: {printed} is {value} in {row.results[0]}")
    return found + [f"{label}: is in no table" for label in where]


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_that_of_its_result(page: str) -> None:
    assert faults(page, (TOP / page).read_text()) == []


def test_a_wrong_a_new_and_a_lost_number_are_found() -> None:
    text = (TOP / "README.md").read_text()
    assert len(faults("README.md", text.replace("145 ms", "146 ms"))) == 1
    assert len(faults("README.md", text.replace("145 ms", "145 ms, 9 W"))) == 1
    assert len(faults("README.md", text.replace("throughput-b1.json", "throughput-b4.html"))) == 1
    assert len(faults("README.md", re.sub(r"\n\| right answers, `recall`.*", "", text))) == 1
    assert faults("README.md", text + "\n| a | b |\n| - | - |\n| new | 12 |\n") != []


@pytest.mark.parametrize(
    ("value", "printed", "same"),
    [
        (589.36, "589", True), (588.4, "589", False), (2560.77, "2,561", True),
        (0.0347, "0.03", True), (0.0347, "0.04", False), (0.0347, "0.0350", False),
        ("1/13", "1/13", True), ("1/34", "1/13", False), (13, "1/13", False),
    ],
)  # fmt: skip
def test_rounding_is_to_the_printed_digits(value: object, printed: str, same: bool) -> None:
    assert rounds_to(value, printed) is same


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Another user's checkout (a container's) is read all the same.
    command = ["git", "-c", "safe.directory=*", "-C", str(TOP), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("page", PAGES)
def test_results_are_of_commits_of_this_history(page: str) -> None:
    try:
        shallow = git("rev-parse", "--is-shallow-repository")
    except FileNotFoundError:
        pytest.skip("there is no git")
    if not (TOP / ".git").exists() or shallow.stdout.strip() != "false":
        pytest.skip("no git history, or a part of it, is here to look commits up in")
    linked = dict.fromkeys(RESULT.findall((TOP / page).read_text()))
    assert linked
    bad = {}
    for link in linked:
        commit = json.loads((TOP / page).parent.joinpath(link).read_text())["commit"]
        # "unknown", "...+changes" and two commits in one file are no commit.
        is_one = re.fullmatch(r"[0-9a-f]{7,40}", commit) is not None
        if not is_one or git("merge-base", "--is-ancestor", commit, "HEAD").returncode != 0:
            bad[link] = commit
    assert bad == {}, "measure these again from a clean checkout, or take their figures out"
