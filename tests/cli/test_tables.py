"""Tables on terminals of any width: what is in them stays in them."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.tables import print_table

NAME = "a-name-that-is-the-key-of-its-row"
FOLDER = "/".join(["folder"] * 30)
WIDTHS = [1, 20, 60, 80, 200]


def printed(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, table)
    assert console.width == width, "what comes after the table is not wider for it"
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_key_is_in_one_piece_and_the_rest_folds(width: int) -> None:
    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_column("model")
    table.add_column("12,345 at once", justify="right", no_wrap=True)
    table.add_row(NAME, Text(FOLDER), "123,456")
    said = printed(table, width)
    assert NAME in said
    assert "12,345 at once" in said
    assert "…" not in said
    folded = "".join(line.split("│")[2].strip() for line in said.splitlines() if "│" in line)
    assert folded == FOLDER
    least = len(NAME) + len("12,345 at once") + 12 + 10
    assert max(map(len, said.splitlines())) <= max(width, least)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_that_fits_is_as_it_was(width: int) -> None:
    table = Table("a", "b")
    table.add_row("1", "2")
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    assert printed(table, width) == console.file.getvalue()


@pytest.mark.parametrize("width", [30, 60, 80])
def test_on_a_terminal_that_is_too_narrow_each_row_is_a_paragraph(width: int) -> None:
    table = Table(title="a title")
    table.caption = "a caption"
    for name in ("name", *(f"column {i}" for i in range(12))):
        table.add_column(name, no_wrap=True)
    for row in ("first", "second"):
        table.add_row(row, *(f"{row} {i}" if i != 3 else "" for i in range(12)))
    out = io.StringIO()
    print_table(Console(file=out, width=width, force_terminal=True, color_system=None), table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert lines[0] == "a title"
    assert lines[-1] == "a caption"
    assert [line for line in lines if not line.startswith(" ")][1:-1] == ["first", "second"]
    assert lines.count("  column 7 second 7") == 1
    assert not [line for line in lines if "column 3" in line], "what is empty says nothing"


def test_every_table_of_the_commands_is_printed_so() -> None:
    """`Console.print` cuts a table at the width of the terminal."""
    folder = Path(__file__).parents[2] / "src" / "penstock" / "cli"
    sources = {path: path.read_text() for path in folder.glob("*.py") if path.name != "tables.py"}
    makers = ("_table(", "_policies(", "print(table")
    found = [
        f"{os.path.relpath(path, folder)}: {line.strip()}"
        for path, source in sources.items()
        for line in source.splitlines()
        if ".print(" in line and any(maker in line for maker in makers)
    ]
    assert not found
    assert sum("print_table(" in source for source in sources.values()) >= 7
