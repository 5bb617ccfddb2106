"""print_table(): a table that loses nothing to a narrow terminal."""

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock.cli.console import PlainConsole
from penstock.core.printable import printable

_FOLDED_WIDTH = 12
"""A column that folds keeps so many characters."""


def print_table(console: Console, table: Table) -> None:
    """Print a table: columns marked `no_wrap` keep their width, the others fold.

    Where that is wider than a terminal, each row is a paragraph. In a pipe the lines are wider.
    """
    if console.is_terminal and _least_width(table) > console.width:
        _print_paragraphs(console, table)
        return
    before = console.width
    console.width = max(before, _least_width(table))
    console.print(table)
    console.width = before


def _print_paragraphs(console: Console, table: Table) -> None:
    """Each row by itself: its first cell, and the others behind their headers."""
    if table.title:
        console.print(table.title, style="italic")
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        lines = [_as_text(cells[0], "bold")]
        for column, cell in zip(table.columns[1:], cells[1:], strict=True):
            value = _as_text(cell)
            if value:
                lines.append(Text.assemble(("  ", ""), (f"{column.header} ", "dim"), value))
        console.print(Text("\n").join(lines), overflow="fold")
    if table.caption:
        console.print(table.caption, style="dim")


def _as_text(cell: RenderableType, style: str = "") -> Text:
    return cell if isinstance(cell, Text) else Text(printable(str(cell)), style)


def _least_width(table: Table) -> int:
    """What a table needs so that nothing in it is cut, in characters."""
    endless = PlainConsole(width=100_000)
    least = Measurement.get(endless, endless.options, table).maximum
    for column in table.columns:
        if not column.no_wrap:
            column.overflow = "fold"
            cells = (column.header, *column.cells)
            most = max(Measurement.get(endless, endless.options, cell).maximum for cell in cells)
            least -= max(0, most - _FOLDED_WIDTH)
    return least
