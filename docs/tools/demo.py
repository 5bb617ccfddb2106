"""Run `penstock demo` and draw what its terminal shows in the end: docs/images/demo.svg.

The table's rows on time and traffic are the machine's, and are left out.

python docs/tools/demo.py [OPTIONS OF THE DEMO]
"""

import io
import sys
from pathlib import Path
from typing import Any

from rich.text import Text

import penstock.cli.demo
import penstock.cli.screen
from penstock.cli.console import PlainConsole
from penstock.cli.main import app

PICTURE = Path(__file__).parents[1] / "images" / "demo.svg"
WIDTH = 104
SHOWN = ("policy", "KV cache lies on", "KV cache", "weights")
# rich's own frame asks a server for its font; here the reader's is taken.
FRAME = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img"
  aria-label="penstock demo in a terminal">
<style>
.{unique_id}-matrix {{
  font: {char_height}px/{line_height}px ui-monospace, Menlo, "DejaVu Sans Mono", monospace;
}}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Screen(PlainConsole):
    """What a terminal shows in the end: progress is gone by then."""

    def __init__(self) -> None:
        super().__init__(record=True, width=WIDTH, file=io.StringIO())

    def print(self, *objects: Any, **options: Any) -> None:
        """As `Console.print`, but for lines of progress."""
        if not (objects and isinstance(objects[0], str) and objects[0].startswith("prefill")):
            super().print(*objects, **options)


class Out(io.StringIO):
    """A stdout that writes to the screen; a line waits for its end."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen, self._line = screen, ""

    def write(self, text: str) -> int:
        """Show every line that is whole."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._screen.print(Text(line))
        return len(text)


def main() -> None:
    """Run it and write the picture."""
    screen, stdout = Screen(), sys.stdout
    screen.print(Text("$ penstock demo", "bold green"))
    penstock.cli.demo.PlainConsole = lambda **_: screen  # type: ignore[attr-defined, assignment]
    rows = penstock.cli.screen.report_rows
    penstock.cli.screen.report_rows = lambda report, sizes=None: [
        (name, figure) for name, figure in rows(report, sizes) if name in SHOWN
    ]
    sys.stdout = Out(screen)
    try:
        app(["demo", *sys.argv[1:]], standalone_mode=False)
    finally:
        sys.stdout = stdout
    svg = screen.export_svg(title="penstock demo", code_format=FRAME, unique_id="demo")
    PICTURE.write_text(svg.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
