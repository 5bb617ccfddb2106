"""What every command writes to a terminal through: nothing that it says is taken for a command."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from penstock.core.printable import printable


class PlainConsole(Console):
    """A console that prints strings as they are: no markup, no emoji, no control characters.

    Args:
        stderr: write there, not to stdout.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """As `Console.print`; what is one line in a pipe is broken between words on a terminal."""
        one_line = soft_wrap and not self.is_terminal
        super().print(*objects, soft_wrap=one_line, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """As `Console.render_str`; spelt out here, so that a table has room for it."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As `Console.render`; what controls the terminal comes from rich alone."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def plain(text: str, style: str = "") -> Text:
    """A text for a table, with its control characters spelt out."""
    return Text(printable(text), style)


def say(text: str, *, err: bool = False) -> None:
    """A line on stdout or stderr."""
    typer.echo(printable(text), err=err)


def for_reader(text: str, out: TextIO) -> str:
    """An answer for a terminal, without what it would obey; for a pipe or a file, as it is."""
    return printable(text) if out.isatty() else text


@contextmanager
def plain_output() -> Iterator[None]:
    """All that is printed within, as `printable` has it; for programs that print by themselves."""
    out: Any = _Plain(sys.stdout)
    err: Any = _Plain(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        yield


class _Plain:
    """A stream that spells control characters out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, and say how many characters were taken."""
        self._stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
