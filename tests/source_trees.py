"""What the rules about code look at: each file's text, tree and nodes, found once a process."""

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)
Nodes = dict[type[ast.AST], list[ast.AST]]


@contextmanager
def no_collections() -> Iterator[None]:
    """So many trees, kept from rule to rule, would be walked by each collection again."""
    was_on = gc.isenabled()
    gc.disable()
    yield
    gc.freeze()
    if was_on:
        gc.enable()


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    """It is shared: a rule changes nothing in it."""
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> Nodes:
    """The nodes of each kind, whichever block or expression they stand in."""
    found: Nodes = {}
    below: list[ast.AST] = [tree_of(path)]
    for node in below:  # which grows meanwhile
        found.setdefault(node.__class__, []).append(node)
        # `ast.walk` takes twice as long: it asks for each field by its name.
        for value in vars(node).values():
            if value.__class__ is list:
                below += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                below.append(value)
    return found


def of_kind(path: Path, kind: type[Node]) -> list[Node]:
    """A file's nodes of the kind."""
    found = nodes_of(path).get(kind, [])
    return [node for node in found if isinstance(node, kind)]


def blocks_in(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements and what holds some: no expression is looked through."""
    blocks: list[ast.AST] = [tree]
    while blocks:
        block = blocks.pop()
        yield block
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(block, name, [])
            blocks += inner if isinstance(inner, list) else []  # of a lambda: an expression
