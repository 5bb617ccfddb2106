"""Write docs/reference/commands.md from the commands themselves, or say that it is stale.

python docs/tools/commands.py           # write it
python docs/tools/commands.py --check   # exit with 1 where the page is not what would be written
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from penstock.cli.main import app

PAGE = Path(__file__).parents[1] / "reference" / "commands.md"
HEAD = """# Command reference

`python docs/tools/commands.py` writes this page from the commands; a test says when it is stale.
[The quickstart](../quickstart.md#from-a-shell) has examples.

"""
OWN_OPTIONS = " (--help lists the options)"
"""The end of the help of a command that reads its options by itself."""


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(_lines("penstock", get_command(app), 2))


def _lines(name: str, command: Any, level: int) -> Iterator[str]:
    """A command's section, and those of the commands below it."""
    parameters = [each for each in command.params if each.name != "help"]
    words = [_word(each) for each in parameters if each.param_type_name == "argument"]
    last = "COMMAND" if hasattr(command, "commands") else "[OPTIONS]"
    path = ["penstock"] if name == "penstock" else ["penstock", name]
    yield f"{'#' * level} {name}\n"
    yield f"    {' '.join([*path, *words, last])}\n"
    about = _paragraphs(command.help)
    yield about.replace(OWN_OPTIONS, f". `penstock {name} --help` lists its options") + "\n"
    if parameters:
        yield "| setting | default | meaning |"
        yield "| --- | --- | --- |"
        yield from map(_row, parameters)
        yield ""
    for word, below in sorted(getattr(command, "commands", {}).items()):
        if below.hidden:
            continue
        yield from _lines(word if name == "penstock" else f"{name} {word}", below, level + 1)


def _paragraphs(text: str | None) -> str:
    """A docstring with each paragraph on one line, without its parts for Python's readers."""
    parts = (" ".join(part.split()) for part in (text or "").partition("\f")[0].split("\n\n"))
    return "\n\n".join(parts)


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{_word(parameter)}`"
    else:
        name = ", ".join(f"`{each}`" for each in [*parameter.opts, *parameter.secondary_opts])
        if parameter.metavar:
            name += f" `{parameter.metavar}`".replace("|", "\\|")
    meaning = " ".join((getattr(parameter, "help", None) or "").split())
    for special, shown in (("|", "\\|"), ("<", "&lt;"), ("*", "\\*")):
        meaning = meaning.replace(special, shown)
    return f"| {name} | {_default(parameter)} | {meaning} |"


def _default(parameter: Any) -> str:
    """What a setting is where it is not given; empty for off and for none."""
    default = getattr(parameter.default, "value", parameter.default)
    if parameter.required:
        return "required"
    if isinstance(default, bool):
        return "on" if default else ""
    return f"`{default}`" if isinstance(default, str | int | float | Path) and default != "" else ""


def _word(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def main() -> int:
    """Write or check the page; the exit status."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/reference/commands.md is stale: run python docs/tools/commands.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
