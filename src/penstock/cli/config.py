"""`penstock config`: every setting, its value, and where that came from."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from penstock.cli.command import SETTINGS_ERROR, PenstockCommand
from penstock.cli.console import PlainConsole, say
from penstock.cli.options import JsonOption
from penstock.cli.settings import SettingsFile, commands, parameters, settings_path
from penstock.cli.tables import print_table
from penstock.core.errors import ConfigError


class ConfigCommand(PenstockCommand):
    """`penstock config --path` works beside a file that cannot be used."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the file is read once more below."""
        if ctx.params.get("path"):
            ctx.meta.pop(SETTINGS_ERROR, None)
        return super().invoke(ctx)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of one command."""

    command: str
    name: str
    value: str
    source: str
    """An environment variable, a line of the file, or "default"."""


def config_command(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="Such as generate, or doc ask.")
    ] = None,
    path: Annotated[
        bool, typer.Option("--path", help="Print where the file is, and nothing else.")
    ] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Leave out what is at its default.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the default of every option, and where it comes from.

    The command line comes first, then the environment, then the file, then the option's default.
    PENSTOCK_MEMORY is for all commands that have --memory, PENSTOCK_GENERATE_MEMORY for one.
    The file is TOML: memory = "2GiB" at its top is for all commands, below [generate] for one.
    PENSTOCK_CONFIG says where it is.
    """
    place = settings_path()
    if path:
        say(str(place))
        return
    root = context.find_root()
    settings = [
        each for each in _settings(root, SettingsFile(place, root))
        if not (changed and each.source == "default")
    ]  # fmt: skip
    wanted = " ".join(command or ())
    if wanted:
        known = [name for name, _ in commands(root.command)]
        if not any(name == wanted or name.startswith(f"{wanted} ") for name in known):
            raise ConfigError(f"there is no command {wanted}; penstock --help lists them")
        settings = [each for each in settings if f"{each.command} ".startswith(f"{wanted} ")]
    if as_json:
        typer.echo(
            json.dumps({"file": str(place), "settings": [asdict(each) for each in settings]})
        )
        return
    _show(place, settings)


def _settings(root: Any, file: SettingsFile) -> list[Setting]:
    """Every setting of every command, as a command line without options would have it."""
    found = []
    for path, command in commands(root.command):
        context = type(root)(command, info_name=path, default_map=file.by_command.get(path))
        for name, parameter in parameters(path, command).items():
            value, source = parameter.consume_value(context, {})
            kind = getattr(source, "name", "DEFAULT")
            said = "default"
            if kind == "ENVIRONMENT":
                said = next(each for each in parameter.envvar if os.environ.get(each))
            elif kind == "DEFAULT_MAP":
                line = file.line_of(*path.split(), name)
                said = f"{file.path.name}, line {line}" if line else file.path.name
            found.append(
                Setting(command=path, name=name, value=_value(parameter, value), source=said)
            )
    return found


def _value(parameter: Any, value: Any) -> str:
    if value is None:
        shown = parameter.show_default
        return shown if isinstance(shown, str) else "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(map(repr, value)) or "-"
    return str(getattr(value, "value", value))


def _show(place: Path, settings: list[Setting]) -> None:
    console = PlainConsole()
    console.print(f"file: {place}{'' if place.exists() else ' (there is none)'}", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, border_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("command", no_wrap=True)
    table.add_column("option", no_wrap=True)
    table.add_column("value")
    table.add_column("from")
    for before, each in zip([None, *settings], settings, strict=False):
        same = before is not None and before.command == each.command
        table.add_row(
            "" if same else each.command, each.name, each.value, each.source,
            style="dim" if each.source == "default" else "",
        )  # fmt: skip
    print_table(console, table)
