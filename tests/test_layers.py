"""Imports go one way along the ladder, and third-party libraries stay behind their walls."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.source_trees import blocks_in, no_collections, text_of, tree_of

PACKAGE = "penstock"
ROOT = Path(__file__).parents[1] / "src" / PACKAGE

LADDER = (  # a package may import only from earlier rungs; packages on one rung are strangers
    {"core"},
    {"devices", "kernels"},
    {"storage"},
    {"engine"},
    {"methods"},
    {"models"},
    {"generation"},
    {"documents", "search"},
    {"workloads"},
    {"tuner"},
    {"evaluate"},
    {"server"},
    {"cluster"},
    {"bench", "cli", "testing", "research"},  # bench: the former name of evaluate
)
WALLS = {  # library -> the only packages that may import it
    "transformers": {"models", "testing"},
    "huggingface_hub": {"models"},
    "triton": {"kernels"},
    "matplotlib": {"evaluate", "research"},
    "typer": {"cli"},
    "rich": {"cli"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "pydantic": {"server"},
    "uvicorn": {"server"},
    "prometheus_client": {"server"},
    "llguidance": {"server"},
    "ray": {"cluster"},
}
RUNG = {package: rung for rung, packages in enumerate(LADDER) for package in packages}
RESEARCH = Path(__file__).parents[1] / "research"
MODULES = sorted([*ROOT.rglob("*.py"), *RESEARCH.rglob("*.py")])


def place(path: Path) -> Path:
    """Where a module is below src/penstock; research/ stands beside its packages."""
    return path.relative_to(RESEARCH.parent if path.is_relative_to(RESEARCH) else ROOT)


@pytest.fixture(scope="module", autouse=True)
def _no_collections() -> Iterator[None]:
    with no_collections():
        yield


@cache
def imported_names(tree: ast.Module) -> set[str]:
    """Every absolute name imported anywhere, lazy and typing-only imports included."""
    names = set()
    for node in blocks_in(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


METHODS = ROOT / "methods"
STRANGERS = sorted(path.name for path in METHODS.iterdir() if (path / "__init__.py").exists())
"""Folders of methods, which import nothing of each other."""
GENERAL = ("core", "engine", "storage", "kernels")
"""Packages that know no method."""
NAMES = re.compile(
    r"(?<![a-z])(kv_?swap|dyna_?kv|hill_?infer|louis_?kv|quest(?![a-z])|arkvale|infinigen"
    r"|shadow_?kv|pq_?cache|cluster_?kv|h2o|raas|snap_?kv|loki|leoam|flexgen|streaming_?llm)",
    re.IGNORECASE,
)


def broken_rules(package: str, tree: ast.Module) -> list[str]:
    """What a module of `package` may not import but does."""
    broken = []
    for name in sorted(imported_names(tree)):
        top, *rest = name.split(".")
        if top in (PACKAGE, "research"):
            there = "research" if top == "research" else rest[0] if rest else ""
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
        f"{place(path)}: {broken}"
        for path in inside
        for broken in broken_rules(place(path).parts[0], tree_of(path))
    ] == []


def test_every_package_has_a_rung_and_every_rung_its_packages() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"research"} == set(RUNG)


def test_walls_are_opened_for_those_who_go_through() -> None:
    going: dict[str, set[str]] = {library: set() for library in WALLS}
    for path in MODULES:
        for name in imported_names(tree_of(path)):
            if (library := name.split(".")[0]) in WALLS:
                going[library].add(place(path).parts[0])
    assert going == WALLS


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("storage", "from penstock.engine.writer import Writer"),
        ("storage", "def later():\n    import penstock.engine.tiers.token_pool"),
        ("methods", "if TYPE_CHECKING:\n    import transformers"),
        ("engine", "from penstock import TieredCache"),
        ("evaluate", "def later():\n    from research.search import speed"),
        ("cli", "import research"),
        ("research", "from penstock.cli import main"),
    ],
)
def test_a_broken_rule_is_seen(package: str, source: str) -> None:
    assert len(broken_rules(package, ast.parse(source))) == 1


def named_methods(source: str) -> list[str]:
    """Names of methods in a module's code; its comments and docstrings may cite papers."""
    if not NAMES.search(source):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        words: list[str] = []
        if isinstance(node, ast.Name):
            words = [node.id]
        elif isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            words = [node.name]
        elif isinstance(node, ast.arg):
            words = [node.arg]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            words = [alias.name for alias in node.names]
            words.append(getattr(node, "module", None) or "")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # a docstring
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = [node.value]
        found += [word for word in words if NAMES.search(word)]
    return found


def test_engine_and_core_know_no_method() -> None:
    assert [
        f"{place(path)}: {found}"
        for path in MODULES
        if place(path).parts[0] in GENERAL and (found := named_methods(text_of(path)))
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "from penstock.methods.dynakv.layer import ClusterLayer",
        "if isinstance(policy, HillInfer):\n    pass",
        "if policy.name == 'louiskv':\n    pass",
        "def plan(kvswap): pass",
    ],
)
def test_a_named_method_is_seen(source: str) -> None:
    assert named_methods(f'"""Source: KVSwap, section 3."""\nrequest = "a question"\n{source}')


def test_methods_are_strangers() -> None:
    assert len(STRANGERS) > 3
    broken = []
    for path in METHODS.rglob("*.py"):
        folder = path.relative_to(METHODS).parts[0]
        for name in imported_names(tree_of(path)):
            there = name.removeprefix("penstock.methods.").split(".")[0]
            is_other = name.startswith("penstock.methods.") and there in STRANGERS
            if folder in STRANGERS and is_other and there != folder:
                broken.append(f"{path.relative_to(METHODS)} imports {name}")
    assert broken == []
