"""Plain text tables: aligned columns, for terminals and for files."""

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table: the first column to the left, the others to the right.

    A row that is shorter than the header ends in free text, which is not aligned.
    """
    full = [header, *(row for row in rows if len(row) == len(header))]
    widths = [max(len(row[i]) for row in full) for i in range(len(header))]
    widths[0] = max(widths[0], *(len(row[0]) for row in rows), 0) if rows else widths[0]
    lines = [_line(header, widths), "  ".join("-" * width for width in widths)]
    for row in rows:
        if len(row) == len(header):
            lines.append(_line(row, widths))
        else:
            lines.append("  ".join([row[0].ljust(widths[0]), *row[1:]]))
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join(cells).rstrip()
