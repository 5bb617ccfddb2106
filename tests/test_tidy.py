"""Rules about the code itself, so that review can be about the design."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent / "src" / "penstock"
MODULES = sorted(ROOT.rglob("*.py"))
MAY_PRINT = {"cli", "bench"}

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
LINE_LENGTH_MAX = 100
BANNED_STEMS = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "manager"}
BANNED_ENDINGS = ("Manager", "Helper", "Handler", "Utils")
BANNED_TEXT = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "break" + "point(", "pdb.set_" + "trace")


def name_of(path: Path) -> str:
    return str(path.relative_to(TESTS.parent))


each_module = pytest.mark.parametrize("path", MODULES, ids=name_of)
each_file = pytest.mark.parametrize("path", [*MODULES, *sorted(TESTS.rglob("*.py"))], ids=name_of)


def is_method(path: Path) -> bool:
    """Whether a file implements a published method: it derives a policy."""
    classes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
    bases = [base.id for c in classes for base in c.bases if isinstance(base, ast.Name)]
    return "SelectionPolicy" in bases


@each_file
def test_size(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= FILE_LINES_MAX
    assert [n for n, line in enumerate(lines, start=1) if len(line) > LINE_LENGTH_MAX] == []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < FUNCTION_LINES_MAX, node.name


@each_module
def test_name_says_what_is_inside(path: Path) -> None:
    assert path.stem not in BANNED_STEMS
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            assert not node.name.endswith(BANNED_ENDINGS), node.name


@each_module
def test_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, "a module starts by saying what it is"
    assert docstring.splitlines()[0].endswith("."), "the first line is a sentence"
    if is_method(path):
        assert "Source:" in docstring, "a method cites its paper"


@each_file
def test_no_leftovers(path: Path) -> None:
    text = path.read_text()
    for banned in BANNED_TEXT:
        assert banned not in text, banned


@each_module
def test_nobody_prints_below_the_entry_points(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] in MAY_PRINT:
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
    assert "print" not in names


@each_module
def test_the_environment_is_read_by_the_command_line_only(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] == "cli":
        return
    text = path.read_text()
    assert "os.environ" not in text
    assert "getenv" not in text


@each_module
def test_no_state_in_modules(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: global {node.names}"
