"""Rules about names: below the methods one thing has one word.

`docs/concepts.md` defines the words. A name is split at underscores and capitals, so that
`first_ring_group` has `ring` and `group` in it.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.source_trees import no_collections, nodes_of, text_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "kernels", "storage", "engine")

INSTEAD = {
    "ring": "window",
    "tail": "window, or kept for window and sinks",
    "group": "unit",
    "reference": "twin",
    "plainly": "twin",
    "option": "setting",
    "config": "settings",
    "shelf": "library",
    "tell": "report, observe or a verb that says what happens",
    "told": "the thing that was observed",
    "beside": "what runs or lies there",
    "held": "current, deferred, allocated: why it is there",
    "leavers": "leaving",
    "pace": "a rate with its unit",
    "shrunk": "a smaller what",
    "processor": "cpu",
    "circumstances": "conditions",
}
"""A word that names do not use, and what they say."""

GROUPS_OF_BEAMS = "beams that run together"
KVSWAP = "KVSwap's G tokens"
FORMAT = "a document's format"
REGEX = "a regular expression's"
QUANTISED = "channels that are quantised together"
EXCEPTIONS = (
    ("group", "*", "*group_tokens", "the public field of policies, and the formats'"),
    ("group", "engine/beams/*", "*", GROUPS_OF_BEAMS),
    ("group", "engine/stored_past.py", "*", FORMAT),
    ("group", "engine/restoring.py", "unit_of_group", FORMAT),
    ("group", "core/byte_size.py", "group", REGEX),
    ("group", "core/printable.py", "group", REGEX),
    ("group", "kernels/group_*", "*", KVSWAP),
    ("group", "kernels/low_rank.py", "*", KVSWAP),
    ("group", "kernels/device/group_shares*", "*", KVSWAP),
    ("group", "engine/*.py", "[Gg]roup*[Ss]election", KVSWAP),
    ("group", "engine/*.py", "[Gg]roup*[Ff]etch", KVSWAP),
    ("group", "kernels/key_*.py", "group*", QUANTISED),
    ("group", "kernels/packed_weights.py", "*", QUANTISED),
    (
        "option",
        "core/renamed_options.py",
        "renamed_options",
        "what the command line calls a setting",
    ),
    ("config", "*", "ConfigError", "the public error for settings that make no sense"),
    ("processor", "core/cpu_name.py", "processor", "a function of the standard library"),
)
"""A word, the files, the names, and what it means there."""

STORAGE_HAS_NO_ROWS = "a row is a sequence: a unit on a disk has a place, one in a buffer a slot"


@pytest.fixture(scope="module", autouse=True)
def _no_collections() -> Iterator[None]:
    with no_collections():
        yield


@cache
def may_use(path: Path) -> set[str]:
    """The words of whatever looks like a name in a file, in comments and texts too."""
    return set().union(*map(words, set(re.findall(r"\w+", text_of(path)))))


@cache
def names(path: Path) -> tuple[tuple[str, int], ...]:
    """Every name that a file defines, uses or imports, with its line."""
    found: list[tuple[str, int]] = []
    for node in itertools.chain.from_iterable(nodes_of(path).values()):
        line = getattr(node, "lineno", 1)
        match node:
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
                | ast.keyword(arg=str(name))
            ):
                found.append((name, line))
            case ast.ImportFrom(module=module, names=aliases):
                found += [(alias.asname or alias.name, line) for alias in aliases]
                found += [(part, line) for part in (module or "").split(".")[1:]]
            case ast.Import(names=aliases):
                found += [(alias.asname or alias.name, line) for alias in aliases]
    return tuple(dict.fromkeys(found))


@cache
def words(name: str) -> set[str]:
    """The words of a name, in the singular."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return {part.removesuffix("s") for part in parts} | set(parts)


def modules(*packages: str) -> Iterator[tuple[Path, str]]:
    """The files of packages, and what each is called below src/penstock."""
    top = ROOT / "src" / "penstock"
    for package in packages:
        for path in sorted((top / package).rglob("*.py")):
            yield path, path.relative_to(top).as_posix()


def excepted(word: str, file: str, name: str) -> list[int]:
    """Which exceptions allow the word in this name of this file."""
    return [
        number
        for number, (of, files, allowed, _) in enumerate(EXCEPTIONS)
        if of == word and fnmatch(file, files) and fnmatch(name, allowed)
    ]


def offenders() -> Iterator[tuple[str, str, str, int]]:
    """Banned words, each with its file, name and line."""
    for path, file in modules(*PACKAGES):
        # A tree is dear: most files have no such word anywhere.
        used = names(path) if may_use(path) & INSTEAD.keys() else ()
        for name, line in [*used, (path.stem, 1)]:
            for word in sorted(words(name) & INSTEAD.keys()):
                yield word, file, name, line


def test_a_name_is_split_into_its_words() -> None:
    assert words("first_ring_groups") == {"first", "ring", "group", "groups"}
    assert words("_TailSlots") == {"", "tail", "slot", "slots"}


def test_names_use_the_words_of_the_glossary() -> None:
    assert [
        f"{file}:{line} {name}: say {INSTEAD[word]}"
        for word, file, name, line in offenders()
        if not excepted(word, file, name)
    ] == []


def test_every_exception_is_needed() -> None:
    used = {number for word, file, name, _ in offenders() for number in excepted(word, file, name)}
    assert [EXCEPTIONS[n] for n in range(len(EXCEPTIONS)) if n not in used] == []


def test_storage_has_no_rows() -> None:
    assert [
        f"{file}:{line} {name}: {STORAGE_HAS_NO_ROWS}"
        for path, file in modules("storage")
        if "row" in may_use(path)
        for name, line in names(path)
        if "row" in words(name)
    ] == []


def test_the_glossary_has_each_word_once() -> None:
    lines = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").splitlines()
    rows = [re.split(r"\s*\|\s*", line)[1:4] for line in lines if line.startswith("| ")]
    defined = [word for row in rows if row[0] != "word" for word in row[0].split(", ")]
    assert len(defined) == len(set(defined))
    assert {"row", "unit", "slot", "window", "tier", "twin", "setting"} <= set(defined)
    never = " ".join(row[2] for row in rows)
    assert [w for w in ("ring", "tail", "group", "reference", "option", "shelf")
            if not re.search(rf"\b{w}\b", never)] == []  # fmt: skip
