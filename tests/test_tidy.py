"""Rules about the code itself, so that review can be about the design.

A rule is one test: it lists every place that breaks it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_trees import (
    Node,
    blocks_in,
    no_collections,
    of_kind,
    text_of,
    tree_of,
)

TESTS = Path(__file__).parent
ROOT = TESTS.parent / "src" / "penstock"
RESEARCH = TESTS.parent / "research"
MODULES = sorted([*ROOT.rglob("*.py"), *RESEARCH.rglob("*.py")])
FILES = [*MODULES, *sorted(TESTS.rglob("*.py")), *sorted((TESTS.parent / "training").rglob("*.py"))]
MAY_PRINT = {"cli", "evaluate", "research"}

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
LINE_LENGTH_MAX = 100
BANNED_STEMS = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "manager"}
BANNED_ENDINGS = ("Manager", "Helper", "Handler", "Utils")
BANNED_TEXT = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "break" + "point(", "pdb.set_" + "trace")


@pytest.fixture(scope="module", autouse=True)
def _no_collections() -> Iterator[None]:
    with no_collections():
        yield


def nodes(paths: list[Path], kind: type[Node]) -> Iterator[tuple[Path, Node]]:
    """Every node of the kind, with its file."""
    for path in paths:
        for node in of_kind(path, kind):
            yield path, node


def place(path: Path, line: int = 1) -> str:
    return f"{path.relative_to(TESTS.parent)}:{line}"


def outside(*packages: str) -> list[Path]:
    """The modules of all other packages."""

    def package_of(path: Path) -> str:
        top = RESEARCH.parent if path.is_relative_to(RESEARCH) else ROOT
        return path.relative_to(top).parts[0]

    return [path for path in MODULES if package_of(path) not in packages]


def is_method(path: Path) -> bool:
    """Whether a file implements a published method: it derives a policy."""
    classes = of_kind(path, ast.ClassDef)
    bases = [base.id for c in classes for base in c.bases if isinstance(base, ast.Name)]
    return "SelectionPolicy" in bases


def test_the_rules_see_the_files() -> None:
    assert {"src", "tests", "training", "research"} == {
        path.relative_to(TESTS.parent).parts[0] for path in FILES
    }
    assert ROOT / "core" / "errors.py" in MODULES


def test_files_are_short() -> None:
    assert [place(p) for p in FILES if len(text_of(p).splitlines()) > FILE_LINES_MAX] == []


def test_lines_are_short() -> None:
    assert [
        place(path, number)
        for path in FILES
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if len(line) > LINE_LENGTH_MAX
    ] == []


def test_functions_are_short() -> None:
    assert [
        f"{place(path, node.lineno)} {node.name}"
        for path in FILES
        for node in blocks_in(tree_of(path))
        if isinstance(node, ast.FunctionDef)
        if (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ] == []


def test_names_say_what_is_inside() -> None:
    assert [place(path) for path in MODULES if path.stem in BANNED_STEMS] == []
    assert [
        f"{place(path, node.lineno)} {node.name}"
        for path, node in nodes(MODULES, ast.ClassDef)
        if node.name.endswith(BANNED_ENDINGS)
    ] == []


def test_a_module_starts_by_saying_what_it_is() -> None:
    first_lines = {
        path: (ast.get_docstring(tree_of(path)) or "").split("\n")[0] for path in MODULES
    }
    assert [place(path) for path, line in first_lines.items() if not line.endswith(".")] == []


def test_a_method_cites_its_paper() -> None:
    methods = [path for path in MODULES if is_method(path)]
    assert methods
    assert [
        place(path) for path in methods if "Source:" not in (ast.get_docstring(tree_of(path)) or "")
    ] == []


def test_no_leftovers() -> None:
    assert [
        f"{place(path)} {banned}"
        for path in FILES
        for banned in BANNED_TEXT
        if banned in text_of(path)
    ] == []


def test_only_entry_points_print() -> None:
    assert [
        place(path, node.lineno)
        for path, node in nodes(outside(*MAY_PRINT), ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "print"
    ] == []


def test_the_environment_is_read_by_the_command_line_only() -> None:
    reads = ("os.environ", "getenv")
    assert [
        place(path) for path in outside("cli") if any(read in text_of(path) for read in reads)
    ] == []


def test_no_state_in_modules() -> None:
    assert [place(path, node.lineno) for path, node in nodes(MODULES, ast.Global)] == []


def names_in(path: Path) -> set[str]:
    """Every name that a file uses, looks up, imports or quotes; not those that it defines."""
    names = {node.id for node in of_kind(path, ast.Name) if isinstance(node.ctx, ast.Load)}
    names |= {node.attr for node in of_kind(path, ast.Attribute)}
    names |= {node.name.split(".")[-1] for node in of_kind(path, ast.alias)}
    quoted = {node.value for node in of_kind(path, ast.Constant) if isinstance(node.value, str)}
    return names | {text for text in quoted if text.isidentifier()}


def test_nothing_is_there_for_tests_alone() -> None:
    users = [path for path in FILES if "tests" not in path.parts] + sorted(
        (TESTS.parent / "benchmarks").rglob("*.py")
    )
    used: set[str] = set().union(*map(names_in, users))
    unused = []
    for path in outside("testing"):
        for node in tree_of(path).body:
            match node:
                case ast.FunctionDef(name=name, decorator_list=[]) | ast.ClassDef(name=name):
                    defined = name
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    defined = name
                case _:
                    continue
            if defined not in used and not defined.startswith("__"):
                unused.append(f"{place(path, node.lineno)} {defined}")
    assert unused == []


def test_what_the_sanitizers_run_is_there() -> None:
    from tests import sanitize

    named = (*sanitize.TESTS, *sanitize.TRITON)
    assert [path for path in named if not (sanitize.ROOT / path).exists()] == []


def test_slow_tests_are_there() -> None:
    from tests.choose_slow import LIST

    missing = []
    for line in LIST.read_text().splitlines():
        path, *names = line.partition("[")[0].split("::")
        file = TESTS.parent / path
        if not file.exists() or any(f"def {name}(" not in text_of(file) for name in names[-1:]):
            missing.append(line)
    assert missing == []


def test_a_models_cache_is_named_by_cache_argument() -> None:
    """transformers calls it `cache`, before 5.20 `past_key_values`."""
    passing = re.compile(r"\b(cache|past_key_values)\s*=")
    found = [
        f"{path.relative_to(TESTS.parent)}:{call.lineno}"
        for path, call in nodes([path for path in FILES if passing.search(text_of(path))], ast.Call)
        for keyword in call.keywords
        if keyword.arg in ("cache", "past_key_values")
        if ast.unparse(call.func).rpartition(".")[2] in ("model", "_model", "generate")
    ]
    assert not found, found
