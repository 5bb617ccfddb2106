"""print_table(): a table that loses nothing to a narrow terminal."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from penstock.cli.console import PlainConsole

_FOLDED_WIDTH = 12
"""A column that folds keeps so many characters."""


def print_table(console: Console, table: Table) -> None:
    """Print a table: columns marked `no_wrap` keep their width, the others fold.

    Where that is wider than the terminal, so are the lines.
    """
    before = console.width
    console.width = max(before, _least_width(table))
    console.print(table)
    console.width = before


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
