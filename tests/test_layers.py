"""Imports go one way along the ladder, and third-party libraries stay behind their walls."""

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "penstock"
ROOT = Path(__file__).parents[1] / "src" / PACKAGE

LADDER = (  # a package may import only from earlier rungs; packages on one rung are strangers
    {"core"},
    {"devices", "kernels"},
    {"storage", "tiers", "indexes"},
    {"near_storage"},
    {"policies"},
    {"runtime"},
    {"models"},
    {"generation"},
    {"workloads"},
    {"tuner"},
    {"bench"},
    {"cli", "testing"},
)
WALLS = {  # library -> the only packages that may import it
    "transformers": {"models", "testing"},
    "triton": {"kernels"},
    "matplotlib": {"bench"},
    "typer": {"cli"},
    "rich": {"cli"},
}
RUNG = {package: rung for rung, packages in enumerate(LADDER) for package in packages}
MODULES = sorted(ROOT.rglob("*.py"))


@cache
def imported_names(source: str) -> set[str]:
    """Every absolute name imported anywhere, lazy and typing-only imports included."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def broken_rules(package: str, source: str) -> list[str]:
    """What a module of `package` may not import but does."""
    broken = []
    for name in sorted(imported_names(source)):
        top, *rest = name.split(".")
        if top == PACKAGE:
            there = rest[0] if rest else ""
            # The root module holds the public names and the version; only entry points use it.
            if there not in RUNG:
                if not (package == "cli" and there == "__version__"):
                    broken.append(f"{package} imports {name} through the root module")
            elif there != package and RUNG[there] >= RUNG[package]:
                broken.append(f"{package} must not import {there} ({name})")
        elif top in WALLS and package not in WALLS[top]:
            broken.append(f"{package} must not import {top}")
    return broken


def test_imports_go_one_way() -> None:
    inside = [path for path in MODULES if path.parent != ROOT]  # the root re-exports the public API
    assert inside
    assert [
        f"{path.relative_to(ROOT)}: {broken}"
        for path in inside
        for broken in broken_rules(path.relative_to(ROOT).parts[0], path.read_text())
    ] == []


def test_every_package_has_a_rung_and_every_rung_its_packages() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(RUNG)


def test_walls_are_opened_for_those_who_go_through() -> None:
    going: dict[str, set[str]] = {library: set() for library in WALLS}
    for path in MODULES:
        for name in imported_names(path.read_text()):
            if (library := name.split(".")[0]) in WALLS:
                going[library].add(path.relative_to(ROOT).parts[0])
    assert going == WALLS


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("storage", "from penstock.runtime.writer import Writer"),
        ("storage", "def later():\n    import penstock.tiers.pool"),
        (
            "policies",
            "if TYPE_CHECKING:\n    import transformers",
        ),
        ("runtime", "from penstock import TieredCache"),
    ],
)
def test_a_broken_rule_is_seen(package: str, source: str) -> None:
    assert len(broken_rules(package, source)) == 1
